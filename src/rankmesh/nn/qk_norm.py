"""Norms of queries and keys, over each head or over all heads at once.

Owns the two kinds; a model without them has neither. How many heads are here it does not know.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rankmesh.nn.layers import RMSNorm, RMSNorm1p
from rankmesh.nn.parts import Piece


class HeadNorms(Piece):
    """One norm for all query heads and one for all key heads, each over D (Henry et al. 2020,
    arXiv:2010.04245).
    """

    def __init__(self, q: RMSNorm | RMSNorm1p, k: RMSNorm | RMSNorm1p) -> None:
        super().__init__()
        self.q = q
        self.k = k

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [N, h, D] and k [N, g, D] to the same shapes."""
        return self.q(q), self.k(k)


class Weight(nn.Module):
    """Holder of a weight [size]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))


class ProjectionNorms(Piece):
    """RMS norms over all heads of the model together, one weight an element, as OLMo 2's. Mean
    squares are a part: where heads are split, they need what the other ranks hold.
    """

    def __init__(self, q_size: int, k_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.q = Weight(q_size)
        self.k = Weight(k_size)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [N, h, D] and k [N, g, D] to the same shapes; arithmetic in fp32 or wider."""
        weights = (self.q.weight, self.k.weight)
        wide = torch.promote_types(q.dtype, torch.float32)
        flat = tuple(x.flatten(1).to(wide) for x in (q, k))
        means = self.parts.head_means(tuple(x.square() for x in flat), weights)
        normed = (
            x * torch.rsqrt(mean + self.eps) * self.parts.parameter(weight)
            for x, mean, weight in zip(flat, means, weights, strict=True)
        )
        new_q, new_k = normed
        return new_q.view_as(q).to(q.dtype), new_k.view_as(k).to(k.dtype)
