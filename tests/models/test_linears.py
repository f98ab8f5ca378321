"""Fast linears against ``nn.Linear``, whatever multiplies and in which precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from infinity_bento.models import linears, scripted
from infinity_bento.models.linears import ACTIVATIONS, FastLinear, Kernel, LinearPlan, Precision, replace_linears

TORCH_ACTIVATIONS = {
    "gelu": nn.functional.gelu,
    "gelu_new": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
    "silu": nn.functional.silu,
    "swish": nn.functional.silu,
}


def made(*sizes: tuple[int, int], bias: bool = True) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(*size, bias=bias).requires_grad_(False) for size in sizes]


@pytest.mark.parametrize("rows", [1, linears.FEW_ROWS, linears.FEW_ROWS + 1, 200])
@pytest.mark.parametrize("kernel", list(Kernel))
@pytest.mark.parametrize("bias", [True, False])
def test_equals_linear(rows: int, kernel: Kernel, bias: bool) -> None:
    (linear,) = made((48, 80), bias=bias)
    x = torch.randn(2, rows, 48)
    fast = FastLinear([linear], LinearPlan(kernel))
    torch.testing.assert_close(fast(x), linear(x), atol=2e-6, rtol=1e-5)
    assert (fast.in_features, fast.out_features) == (48, 80)


@pytest.mark.parametrize("kernel", list(Kernel))
def test_several_linears_are_one_product(kernel: Kernel) -> None:
    parts = made((32, 16), (32, 16), (32, 8))
    x = torch.randn(5, 32)
    joined = FastLinear(parts, LinearPlan(kernel))(x)
    torch.testing.assert_close(joined, torch.cat([part(x) for part in parts], 1), atol=2e-6, rtol=1e-5)


def test_every_activation_is_tested() -> None:
    assert set(TORCH_ACTIVATIONS) == set(ACTIVATIONS)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kernel", list(Kernel))
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activation_and_residual(name: str, kernel: Kernel, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "fuses_activations", lambda: fused)
    (linear,) = made((48, 80))
    x, residual = torch.randn(60, 48), torch.randn(60, 80)
    fast = FastLinear([linear], LinearPlan(kernel), activation=name)
    found = scripted.product(x, fast.product(), residual)
    torch.testing.assert_close(found, TORCH_ACTIVATIONS[name](linear(x)) + residual, atol=1e-5, rtol=1e-5)


def test_mixed_keeps_the_residual_in_float32() -> None:
    (linear,) = made((48, 80))
    x, residual = torch.randn(60, 48), torch.randn(60, 80)
    fast = FastLinear([linear], LinearPlan(Kernel.TORCH, Precision.MIXED))
    plain, summed = scripted.product(x, fast.product(), None), scripted.product(x, fast.product(), residual)
    assert (plain.dtype, summed.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(summed, residual + plain)
    assert fast(x).dtype is torch.float32
    torch.testing.assert_close(fast(x), linear(x), atol=3e-2, rtol=3e-2)


class Special(nn.Linear):
    """A linear with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def test_replacing_keeps_what_is_not_plain_and_lets_the_originals_go() -> None:
    tree = nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"a": nn.Linear(8, 4), "b": Special(8, 8)}), nn.LayerNorm(4))
    assert replace_linears(tree, LinearPlan(Kernel.ONEDNN)) == 2
    kinds = [type(part).__name__ for part in tree.modules()]
    assert kinds.count("FastLinear") == 2 and kinds.count("Special") == 1
    # Held once: oneDNN's copy is no parameter, and the original weight is gone.
    assert sum(p.numel() for name, p in tree.named_parameters() if name.endswith("0.weight")) == 0


def test_the_best_kernel_depends_on_processor_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    small = nn.Linear(8, 8)
    monkeypatch.setattr(linears, "has_onednn", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert linears.best_kernel(small) is Kernel.ONEDNN
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert linears.best_kernel(small) is Kernel.BOTH
    assert linears.best_kernel(nn.Linear(6000, 6000, device="meta")) is Kernel.TORCH
    monkeypatch.setattr(linears, "has_onednn", lambda: False)
    assert linears.best_kernel(small) is Kernel.TORCH


def test_compiled_layers_fall_back_where_torch_has_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted.compiled.cache_clear()
    monkeypatch.delattr(torch.jit, "script")
    assert scripted.compiled() is scripted.run_layers
    scripted.compiled.cache_clear()
