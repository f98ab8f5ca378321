"""What the native model classes share: ALiBi, rotary angles, and checks of their config.

Shape suffixes: T packed tokens, N heads, H head size, D width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from infinity_bento.attention import biased
from infinity_bento.batching.packing import PackedBatch
from infinity_bento.errors import LoadError


def required(config: Mapping[str, Any], key: str, title: str) -> Any:
    """A value of config.json that has no default.

    Raises:
        LoadError: If it is missing.
    """
    value = config.get(key)
    if value is None:
        raise LoadError(f"config.json of this {title} checkpoint has no {key!r}, which the architecture needs.")
    return value


def only(config: Mapping[str, Any], title: str, **allowed: Sequence[Any]) -> None:
    """Refuse a config that asks for something the class does not do; a missing key counts as the first value.

    Raises:
        LoadError: Naming the key, its value and the values allowed.
    """
    for key, values in allowed.items():
        value = config.get(key, values[0])
        if value not in values:
            choices = " or ".join(repr(choice) for choice in values)
            raise LoadError(f"config.json: {key}={value!r} is not supported for {title}; it must be {choices}.")


def alibi_slopes(heads: int) -> list[float]:
    """One slope per head: ``2 ** (-8 (h + 1) / n)``, extended for head counts that are no power of two.

    https://arxiv.org/abs/2108.12409, and its code for the other counts: the slopes of the next lower power of two,
    then every second one of the next higher.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    finer = [2.0 ** (-4.0 * (head + 1) / power) for head in range(2 * power)]
    return slopes + finer[0::2][: heads - power]


def alibi_attention(query_TNH: Tensor, key_TNH: Tensor, value_TNH: Tensor, packed: PackedBatch) -> Tensor:
    """Bidirectional attention within each sequence with the bias ``-slope * |i - j|``: ``[T, N * H]``."""
    heads, size = query_TNH.shape[1:]
    key = ("alibi", heads, query_TNH.dtype)
    if key not in packed.cache:
        slopes = torch.tensor(alibi_slopes(heads), device=packed.device)
        distances = biased.distances(packed).abs().float()
        packed.cache[key] = biased.ByDistance(-(slopes[:, None] * distances).to(query_TNH.dtype))
    q, k, v = (x.transpose(0, 1) for x in (query_TNH, key_TNH, value_TNH))
    return biased.run(q, k, v, packed, size**-0.5, packed.cache[key])


def sequence_lengths(packed: PackedBatch) -> Tensor:
    """Length of the sequence each token belongs to, ``[T]`` int64."""
    return packed.cu_seqlens.diff().long()[packed.sequence_ids()]


def dynamic_base(lengths: Tensor, base: float, size: int, factor: float, trained: int) -> Tensor:
    """The NTK-scaled rotary base of each token: by its own sequence's length, never its neighbours'.

    Args:
        lengths: ``[T]`` length of each token's sequence.
        base: Rotary base up to the trained length.
        size: Rotated dimensions of a head.
        factor: Scaling factor.
        trained: Positions seen in training; shorter sequences keep ``base``.

    Returns:
        ``[T]`` float32.
    """
    stretch = (factor * lengths.float().clamp_min(trained) / trained) - (factor - 1)
    scaled: Tensor = base * stretch ** (size / (size - 2))
    return scaled


def rotary_angles(position_ids_T: Tensor, base_T: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[T, 1, size]`` in float32, halves repeated, for ``rotate``."""
    exponents = torch.arange(0, size, 2, device=position_ids_T.device).float() / size
    angles = position_ids_T[:, None].float() / base_T[:, None] ** exponents
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos(), angles.sin()


def rotate(x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of all dimensions of a head, first half paired with second."""
    first, second = x_TNH.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_TNH * cos.to(x_TNH.dtype) + turned * sin.to(x_TNH.dtype)


def heads_of(projection: nn.Module, x_TD: Tensor, heads: int) -> Tensor:
    """``[T, D]`` projected and split: ``[T, N, H]``."""
    split: Tensor = projection(x_TD).unflatten(-1, (heads, -1))
    return split
