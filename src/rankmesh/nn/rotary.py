"""Rotary position embedding in the half-split layout of Hugging Face Llama.

Owns the phases and the rotation (Su et al. 2021, arXiv:2104.09864, eq. 34) with Llama 3's frequency
scaling. Phases are made from integer positions in fp64 and kept in fp32 or wider, whatever the
model's dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankmesh.nn.layout import Layout

Phases = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RotaryScaling:
    """Llama 3.1's scaling: long waves stretched by `factor`, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int


class Rotary:
    """Makes the phases of a layout. A plain object: it has no parameters and no buffers to cast or
    move.
    """

    def __init__(self, head_dim: int, theta: float, scaling: RotaryScaling | None = None) -> None:
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        self._frequencies = _scaled(theta**-exponent, scaling)

    def phases(self, layout: Layout, dtype: torch.dtype) -> Phases:
        """cos and sin, each [N, 1, D/2], in max(fp32, dtype)."""
        positions = layout.positions
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions.to(torch.float64).unsqueeze(1) * self._frequencies
        wide = torch.promote_types(dtype, torch.float32)
        return angles.cos().to(wide).unsqueeze(1), angles.sin().to(wide).unsqueeze(1)


def _scaled(frequencies: Tensor, scaling: RotaryScaling | None) -> Tensor:
    if scaling is None:
        return frequencies
    wavelength = 2 * math.pi / frequencies
    ratio = scaling.original_max_seq_len / wavelength
    span = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = ((ratio - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back: nothing but the phases is kept.

    The output lies head after head in memory, as attention reads it; the gradient token after
    token, as the product that made x reads it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.phases = (cos, sin)
        tokens, heads, width = x.shape
        out = torch.empty((heads, tokens, width), dtype=cos.dtype, device=x.device)
        return _turn(x, cos, sin, out.transpose(0, 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.phases
        out = torch.empty(grads[0].shape, dtype=cos.dtype, device=cos.device)
        return _turn(grads[0], cos, -sin, out), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    wide = x.to(cos.dtype)
    low, high = wide.chunk(2, dim=-1)
    out_low, out_high = out.chunk(2, dim=-1)
    torch.mul(low, cos, out=out_low).addcmul_(high, sin, value=-1)
    torch.mul(high, cos, out=out_high).addcmul_(low, sin)
    return out.to(x.dtype)


def rotate(x: Tensor, phases: Phases) -> Tensor:
    """Rotate the pairs (i, i + D/2) of x [N, heads, D] by the phases of its tokens."""
    result: Tensor = _Rotate.apply(x, *phases)
    return result
