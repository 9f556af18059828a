"""The soft cap: a number squeezed smoothly into (-cap, cap)."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), with gradient 1 - (y / cap)^2 (Bello et al. 2016, arXiv:1611.09940)."""
    return cap * torch.tanh(x / cap)
