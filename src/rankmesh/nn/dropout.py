"""Dropout whose mask is derived, element by element, from what the element is.

Owns the keyed mask: a pure function of (seed, step, sample, layer, site, index in the sample). It
stores nothing: backward draws the same mask again. It knows no mesh, so every split draws the
single process's mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

Index = tuple[Tensor, ...]

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# Finalizer constants of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
# generators").
_MUL_A = 0xBF58476D1CE4E5B9
_MUL_B = 0x94D049BB133111EB


@dataclass(frozen=True)
class DropoutKey:
    """Seed and step of a run and the global sample number of each row of the microbatch ([B],
    int64).
    """

    seed: int
    step: int
    samples: Tensor


def _signed(value: int) -> int:
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def mix_int(value: int) -> int:
    """splitmix64's finalizer on a Python int, result in [0, 2^64)."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * _MUL_A) & _MASK64
    value = ((value ^ (value >> 27)) * _MUL_B) & _MASK64
    return value ^ (value >> 31)


def mix(value: Tensor) -> Tensor:
    """The same finalizer on an int64 tensor (wrapping arithmetic; shifts made logical by a mask).
    In place.
    """
    value ^= (value >> 30) & ((1 << 34) - 1)
    value *= _signed(_MUL_A)
    value ^= (value >> 27) & ((1 << 37) - 1)
    value *= _signed(_MUL_B)
    value ^= (value >> 31) & ((1 << 33) - 1)
    return value


def keep_mask(key: DropoutKey, layer: int, site: int, index: Tensor, rate: float) -> Tensor:
    """Which elements stay: bool of the shape of `index` [B, ...], whose entries number the sample's
    elements.
    """
    base = mix_int(mix_int(mix_int(key.seed) + key.step * _GOLDEN) + (layer << 8) + site)
    rows = mix(key.samples * _signed(_GOLDEN) + _signed(base))
    hashed = mix(index * _signed(_GOLDEN) + rows.view(-1, *[1] * (index.dim() - 1)))
    threshold = min(int(rate * 2**64), _MASK64) - 2**63
    return hashed >= threshold


class _Dropout(torch.autograd.Function):
    """x * mask / (1 - rate), the mask drawn again in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, key: DropoutKey, layer: int, site: int, index: Index, rate: float
    ) -> Tensor:
        ctx.draw = (key, layer, site, index, rate)
        return _masked(x, *ctx.draw)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _masked(grads[0], *ctx.draw), None, None, None, None, None


def _masked(x: Tensor, key: DropoutKey, layer: int, site: int, index: Index, rate: float) -> Tensor:
    number = reduce(torch.add, index).view(len(key.samples), -1)
    mask = keep_mask(key, layer, site, number, rate).view(x.shape)
    return x * mask.to(x.dtype).mul_(1.0 / (1.0 - rate))


def dropout(
    x: Tensor, key: DropoutKey | None, layer: int, site: int, index: Index, rate: float
) -> Tensor:
    """Drop elements of `x` with probability `rate`; the sum of `index`, broadcast to x's shape,
    numbers each element in its sample. Only the addends are kept for backward.
    """
    if key is None or rate == 0.0:
        return x
    result: Tensor = _Dropout.apply(x, key, layer, site, index, rate)
    return result
