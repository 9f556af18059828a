"""Rotary position embedding in the half-split layout of Hugging Face Llama.

Owns the frequencies with their scalings, the phases and the rotation (Su et al. 2021,
arXiv:2104.09864, eq. 34). Phases are made from integer positions in fp64 and kept in fp32 or
wider, whatever the model's dtype.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rankmesh.nn.layout import Layout

Phases = tuple[Tensor, Tensor]


def frequencies(head_dim: int, theta: float) -> Tensor:
    """theta^(-2i/D) for each pair i: fp64 [D/2]."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    return theta**-exponent


def llama3_scaled(plain: Tensor, *, factor: float, low: float, high: float, context: int) -> Tensor:
    """Llama 3.1's: waves that turn fewer than `low` times in `context` tokens are stretched by
    `factor`, those that turn more than `high` times kept, a ramp between.
    """
    turns = context * plain / (2 * math.pi)
    return _between(plain / factor, plain, ((turns - low) / (high - low)).clamp(0.0, 1.0))


def yarn_scaled(
    plain: Tensor, *, theta: float, factor: float, slow: float, fast: float, context: int
) -> Tensor:
    """YaRN's (Peng et al. 2023, arXiv:2309.00071, section 3.2): the same ends, with the ramp over
    the pairs' numbers instead of their turns, between the pairs that turn `fast` and `slow` times.
    """
    half = len(plain)

    def pair(turns: float) -> float:
        return half * math.log(context / (turns * 2 * math.pi)) / math.log(theta)

    first, last = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), 2 * half - 1)
    number = torch.arange(half, dtype=torch.float64)
    # A ramp of no length is a step.
    stretched = ((number - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
    return _between(plain, plain / factor, stretched)


def _between(start: Tensor, end: Tensor, share: Tensor) -> Tensor:
    return (1 - share) * start + share * end


class Rotary:
    """Makes the phases of a layout. A plain object: it has no parameters and no buffers to cast or
    move.

    gain: what cosines and sines are multiplied with, YaRN's attention factor.
    """

    def __init__(self, frequencies: Tensor, gain: float = 1.0) -> None:
        self._frequencies = frequencies
        self._gain = gain

    def phases(self, layout: Layout, dtype: torch.dtype) -> Phases:
        """cos and sin, each [N, 1, D/2], in max(fp32, dtype)."""
        positions = layout.positions
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions.to(torch.float64).unsqueeze(1) * self._frequencies
        wide = torch.promote_types(dtype, torch.float32)
        cos, sin = angles.cos().mul_(self._gain), angles.sin().mul_(self._gain)
        return cos.to(wide).unsqueeze(1), sin.to(wide).unsqueeze(1)


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
