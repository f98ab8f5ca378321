"""Linear layers as the CPU runs them best: weights laid out once for the kernel, epilogues fused where that pays.

Used by the native encoders, and by ``replace_linears`` on the modules of transformers. oneDNN reads weights that were
laid out once: faster than torch's own ``F.linear`` (MKL) at every size with AVX-512; with AVX2 a quarter faster for the
few rows of a lone request, and a tenth slower for full batches.

Shape suffixes: T packed tokens, I inputs, O outputs.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from infinity_bento.models.scripted import Product, product

# Rows that oneDNN lays the weights out for: a full batch on the CPU, or (BOTH) a lone request.
PACKED_FOR_ROWS = 1024
PACKED_FOR_FEW_ROWS = 16
# BOTH: up to so many rows oneDNN multiplies. Each new number of rows costs it a millisecond once, so few are better.
FEW_ROWS = 48
# Linears of up to this size are held twice where that pays: small models, whose lone requests are a few milliseconds.
HELD_TWICE_BYTES = 100 << 20


class Kernel(enum.StrEnum):
    """What multiplies; the values are those of the option ``cpu-linear``."""

    TORCH = "torch"
    ONEDNN = "onednn"
    BOTH = "both"  # oneDNN for the few rows of a lone request, torch for batches; the weights are held twice


class Precision(enum.StrEnum):
    """In which type linears and attention of a CPU model compute."""

    FLOAT32 = "float32"
    MIXED = "mixed"  # bfloat16 products and attention; residual stream, norms and sums in float32


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """How the linears of one model run."""

    kernel: Kernel | None = None  # None: the best for this processor and model
    precision: Precision = Precision.FLOAT32

    @property
    def dtype(self) -> torch.dtype:
        """Type of the factors."""
        return torch.bfloat16 if self.precision is Precision.MIXED else torch.float32


def best_kernel(module: nn.Module) -> Kernel:
    """The kernel for this processor and a model that has these linears."""
    if not has_onednn():
        return Kernel.TORCH
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        return Kernel.ONEDNN
    size = sum(part.weight.numel() * 4 for part in module.modules() if type(part) is nn.Linear)
    return Kernel.BOTH if size <= HELD_TWICE_BYTES else Kernel.TORCH


def has_onednn() -> bool:
    """Whether this build of torch has the prepacked oneDNN product."""
    return torch.backends.mkldnn.is_available() and hasattr(  # type: ignore[no-untyped-call]
        torch.ops.mkldnn, "_reorder_linear_weight"
    )


def fuses_activations() -> bool:
    """Whether oneDNN's activation behind a product is cheaper than torch's own; with AVX2 it costs five times that."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def has_fast_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 faster than float32; without it ``mixed`` would only be slower."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


class Activation(NamedTuple):
    """An activation behind a product."""

    name: str  # a name of ``scripted.Product.activation``
    epilogue: str  # oneDNN's name of it
    algorithm: str


ACTIVATIONS = {
    "gelu": Activation("gelu", "gelu", "none"),
    "gelu_new": Activation("gelu_tanh", "gelu", "tanh"),
    "gelu_pytorch_tanh": Activation("gelu_tanh", "gelu", "tanh"),
    "relu": Activation("relu", "relu", ""),
    "silu": Activation("silu", "swish", ""),
    "swish": Activation("silu", "swish", ""),
}
NOTHING = Activation("", "none", "")


class FastLinear(nn.Module):
    """One or several ``nn.Linear`` of the same input as one product, with an activation behind it.

    The originals may be dropped afterwards; with one of them and the torch kernel, the weight is shared, not copied.

    Args:
        linears: Concatenated along their outputs; all with or all without bias.
        plan: Kernel and precision.
        activation: A key of ``ACTIVATIONS``; None: none.
    """

    def __init__(self, linears: Sequence[nn.Linear], plan: LinearPlan, *, activation: str | None = None) -> None:
        super().__init__()
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        self.dtype = plan.dtype
        self.kernel = plan.kernel or best_kernel(nn.ModuleList(linears))
        self._prepacked_rows = {Kernel.TORCH: 0, Kernel.BOTH: FEW_ROWS, Kernel.ONEDNN: sys.maxsize}[self.kernel]
        self._activation = ACTIVATIONS[activation] if activation else NOTHING
        weight = _joined([linear.weight for linear in linears]).to(self.dtype)
        biases = [linear.bias for linear in linears if linear.bias is not None]
        bias = _joined(biases).to(self.dtype) if biases else None
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        if self.kernel is not Kernel.TORCH:
            # An opaque tensor is no parameter: its storage is oneDNN's own.
            rows = PACKED_FOR_ROWS if self.kernel is Kernel.ONEDNN else PACKED_FOR_FEW_ROWS
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
        if self.kernel is Kernel.ONEDNN:
            weight = weight.new_empty(0)  # some modules ask for weight.dtype
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._product = self.product()

    def product(self) -> Product:
        """The tensors, for ``scripted.product``."""
        fused = self._activation if self.kernel is Kernel.ONEDNN and fuses_activations() else NOTHING
        packed = None if self.kernel is Kernel.TORCH else self.packed
        return Product(
            weight=self.weight,
            packed=packed,
            bias=self.bias,
            prepacked_rows=self._prepacked_rows,
            epilogue=fused.epilogue,
            algorithm=fused.algorithm,
            activation=self._activation.name,
        )

    def forward(self, x_TI: Tensor) -> Tensor:
        """``[..., I]`` of any float dtype -> ``[..., O]``."""
        y = product(x_TI.flatten(0, -2), self._product, None)
        return y.view(*x_TI.shape[:-1], self.out_features).to(x_TI.dtype)

    def extra_repr(self) -> str:
        """The figures that ``nn.Linear`` shows, and the kernel."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, kernel={self.kernel}, dtype={self.dtype}"


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].detach() if len(tensors) == 1 else torch.cat([tensor.detach() for tensor in tensors])


def replace_linears(module: nn.Module, plan: LinearPlan) -> int:
    """Replace every ``nn.Linear`` below a module by a ``FastLinear`` of the same result, in place.

    Subclasses of ``nn.Linear`` stay: their forward is their own. Originals are dropped one by one, so that the weights
    are held once.

    Returns:
        How many were replaced.
    """
    replaced = 0
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(module, name, FastLinear([child], plan))
            replaced += 1
        else:
            replaced += replace_linears(child, plan)
    return replaced
