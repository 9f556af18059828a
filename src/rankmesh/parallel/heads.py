"""Means over the elements of all heads where the heads are split over tp.

Owns one small autograd Function. Gathering queries and keys to norm them would move h * D numbers
a token; their sums of squares are one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankmesh.comm.seam import Group, Seam


class _Total(torch.autograd.Function):
    """The sum over the group, of which every rank makes a use of its own: its gradient is the sum
    of theirs.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group, seam: Seam) -> Tensor:
        ctx.group, ctx.seam = group, seam
        total = part.clone()
        seam.all_reduce(total, group, "forward").wait()
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        ctx.seam.all_reduce(total, ctx.group, "backward").wait()
        return total, None, None


@dataclass(frozen=True)
class HeadMeans:
    """The `head_means` part; 1 all-reduce of [N, number of values] forward and 1 backward.

    shares: weight -> what one element here counts for in the mean: 1 / (elements of the whole model
    * ranks that hold this one).
    """

    shares: Mapping[Tensor, float]
    group: Group
    seam: Seam

    def __call__(
        self, values: tuple[Tensor, ...], weights: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        pairs = zip(values, weights, strict=True)
        sums = [value.sum(dim=-1) * self.shares[weight] for value, weight in pairs]
        total: Tensor = _Total.apply(torch.stack(sums, dim=-1), self.group, self.seam)
        means: tuple[Tensor, ...] = total.split(1, dim=-1)
        return means
