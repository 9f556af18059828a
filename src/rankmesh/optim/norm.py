"""One verdict a step for all ranks: gradient norm, finiteness, loss, stop.

Owns the sum of squares of the elements that this rank owns and the single world all-reduce that
decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankmesh.comm.mesh import Mesh

# Partial sums of this many squares stay accurate in fp32; they are added up in fp64.
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Verdict:
    """What all ranks agree on: the loss sum, and the norm of its gradient."""

    norm: float
    loss_sum: float
    stop: bool

    @property
    def finite(self) -> bool:
        return math.isfinite(self.norm) and math.isfinite(self.loss_sum)


def sum_of_squares(pieces: Sequence[Tensor], device: torch.device) -> Tensor:
    """fp64, one element: sum over all elements of the 1-D `pieces`."""
    norms = [torch.linalg.vector_norm(part) for piece in pieces for part in piece.split(_CHUNK)]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(norms).to(torch.float64).square().sum()


def agree(pieces: Sequence[Tensor], loss_sum: Tensor, mesh: Mesh, *, stop: bool = False) -> Verdict:
    """Issues one all-reduce over the world of 3 fp64 values.

    pieces: the gradient elements that this rank owns; over the world each logical element is owned
    once. loss_sum: this replica's loss sum where this rank speaks for its replica, else zero.
    """
    vector = torch.stack(
        (
            sum_of_squares(pieces, mesh.device),
            loss_sum.to(torch.float64).reshape(()),
            torch.tensor(float(stop), dtype=torch.float64, device=mesh.device),
        )
    )
    mesh.seam.all_reduce(vector, mesh.group("world"), "norm").wait()
    square, loss, stopping = vector.tolist()
    return Verdict(
        norm=math.sqrt(square) if square >= 0 else math.nan, loss_sum=loss, stop=stopping > 0
    )


def clip_factor(norm: float, limit: float) -> float:
    """What clipping multiplies the gradient by: min(1, limit / (norm + 1e-6)), torch's own rule; 0
    = off.
    """
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
