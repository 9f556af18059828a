"""Segment: the elements of one parameter that this rank updates, as views of flat memory.

Owns the value only; who makes segments and what updates them is elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """`param` and `grad`: 1-D views of equal length. `decay`: whether weight decay applies."""

    name: str
    param: Tensor
    grad: Tensor
    decay: bool
