"""The layers of a post-norm encoder as one TorchScript call, which runs from end to end without Python's lock (GIL).

Called by ``packed_encoder``. Run from Python, a forward pass takes and releases the lock at every one of some hundred
operations; a server's event loop and the other lanes hold it now and then, and each time the pass waits. As one call it
waits once.

No ``from __future__ import annotations`` here: TorchScript reads the annotations as they are.

Shape suffixes: T packed tokens, D width, N heads, H head size, L length of a group.
"""
# ruff: noqa: I002

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Product(NamedTuple):
    """The tensors of a ``FastLinear``."""

    weight: Tensor  # ``[O, I]``; empty, but of the dtype of the factors, where only ``packed`` is held
    packed: Tensor | None  # oneDNN's layout of it
    bias: Tensor | None
    prepacked_rows: int  # up to so many rows ``packed`` is used
    epilogue: str  # activation that oneDNN runs behind the product: a name of its own, or "none"
    algorithm: str  # of the epilogue
    activation: str  # activation that torch runs: "gelu", "gelu_tanh", "relu", "silu" or ""


class LayerTensors(NamedTuple):
    """The tensors of one layer."""

    qkv: Product
    out: Product
    up: Product
    down: Product
    attention_scale: Tensor
    attention_shift: Tensor
    scale: Tensor
    shift: Tensor


def product(x: Tensor, p: Product, residual: Tensor | None) -> Tensor:
    """``[T, I]`` -> ``[T, O]``, the activation applied, then the residual added in its own dtype."""
    x = x.to(p.weight.dtype)
    packed = p.packed
    fused = False
    if packed is not None and x.size(0) <= p.prepacked_rows:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, p.bias, p.epilogue, [], p.algorithm)
        fused = p.epilogue != "none"
    else:
        y = F.linear(x, p.weight, p.bias)
    if not fused:
        if p.activation == "gelu":
            torch.ops.aten.gelu_(y)
        elif p.activation == "gelu_tanh":
            torch.ops.aten.gelu_(y, approximate="tanh")
        elif p.activation == "relu":
            torch.ops.aten.relu_(y)
        elif p.activation == "silu":
            torch.ops.aten.silu_(y)
    if residual is None:
        return y
    if y.dtype == residual.dtype:
        return y.add_(residual)
    return residual + y


def attention(
    qkv: Tensor, groups: list[tuple[int, int, int]], masks: list[Tensor | None], heads: int, scale: float
) -> Tensor:
    """``[T, 3 * N * H]`` -> ``[T, N * H]``: one dense call per group ``(start, sequences, length)``, on views."""
    tokens, width = qkv.size(0), qkv.size(1) // 3
    size = width // heads
    out = torch.empty([tokens, width], dtype=qkv.dtype)
    for i, (start, count, length) in enumerate(groups):
        rows = qkv.narrow(0, start, count * length).view(count, length, 3, heads, size).permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(rows[0], rows[1], rows[2], masks[i], 0.0, False, scale=scale)
        out.narrow(0, start, count * length).view(count, length, heads, size).copy_(context.transpose(1, 2))
    return out


def run_layers(
    x: Tensor,
    layers: list[LayerTensors],
    groups: list[tuple[int, int, int]],
    masks: list[Tensor | None],
    heads: int,
    scale: float,
    eps: float,
) -> Tensor:
    """``[T, D]`` float32 embeddings -> ``[T, D]`` hidden states.

    Args:
        x: The normed embeddings.
        layers: In order.
        groups: ``(start, sequences, length)`` of each run of sequences of one length.
        masks: Of each group, True where attention is allowed; None: everywhere.
        heads: N.
        scale: Factor on the scores.
        eps: Of the norms.
    """
    for layer in layers:
        context = attention(product(x, layer.qkv, None), groups, masks, heads, scale)
        x = product(context, layer.out, x)
        x = F.layer_norm(x, [x.size(1)], layer.attention_scale, layer.attention_shift, eps)
        x = product(product(x, layer.up, None), layer.down, x)
        x = F.layer_norm(x, [x.size(1)], layer.scale, layer.shift, eps)
    return x


@functools.cache
def compiled() -> Callable[..., Tensor]:
    """``run_layers`` for serving: compiled where this torch still has TorchScript, else as it is."""
    script: Any = getattr(torch.jit, "script", None)
    if script is None:
        return run_layers
    with warnings.catch_warnings():
        # Deprecated in favour of torch.compile, which compiles per shape and gains nothing on the CPU.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        scripted = script(run_layers)

    def run(*args: Any) -> Tensor:
        # Without this, the first calls are profiled and compiled for their shapes, which never come again.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            result: Tensor = scripted(*args)
            return result

    return run
