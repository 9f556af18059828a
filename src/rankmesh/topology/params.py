"""ParamSpec and ParamTable: all that is known about a parameter, as plain values.

Owns placements and the slices that follow from them. It knows no torch, no process group and no
model family.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rankmesh.errors import PlanError

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the whole dimension."""


@dataclass(frozen=True)
class Shard:
    """Dimension `dim` is cut at `boundaries` along the axis; `replicas` neighbouring ranks hold one
    slice.

    `boundaries` has one more entry than there are slices, from 0 to the dimension's size, so sizes
    may be uneven. With tp 4 and 2 KV heads of 8, boundaries (0, 8, 16) and replicas 2 give ranks
    0,1 the first head.
    """

    dim: int
    boundaries: tuple[int, ...]
    replicas: int = 1

    def bounds(self, axis_rank: int) -> tuple[int, int]:
        """First and one-past-last index that `axis_rank` holds along `dim`."""
        piece = axis_rank // self.replicas
        return self.boundaries[piece], self.boundaries[piece + 1]

    @property
    def axis_size(self) -> int:
        return (len(self.boundaries) - 1) * self.replicas


Placement = Replicate | Shard


@dataclass(frozen=True)
class Init:
    """Rule for initial values: normal with standard deviation `std`, or a constant."""

    kind: Literal["normal", "zeros", "ones"]
    std: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One logical parameter (DESIGN: unfused, unpadded, the same on every mesh).

    name: logical name. shape: unpadded global shape. placements: axis name -> placement (absent =
    Replicate). grad_sum: group names over which this replica's gradient is only partial. view:
    dense or expert mesh view. stages: pipeline stages that hold it (tied weights have two).
    shard_unit: whether ZeRO may cut inside it.
    """

    name: str
    shape: tuple[int, ...]
    init: Init
    placements: Mapping[str, Placement] = field(default_factory=dict)
    grad_sum: tuple[str, ...] = ()
    trainable: bool = True
    decay: bool = True
    view: Literal["dense", "expert"] = "dense"
    stages: tuple[int, ...] = (0,)
    kind: Literal["parameter", "buffer"] = "parameter"
    shard_unit: Literal["element", "tensor"] = "element"

    def __post_init__(self) -> None:
        for axis, placement in self.placements.items():
            if isinstance(placement, Shard):
                self._check_shard(axis, placement)

    def _check_shard(self, axis: str, shard: Shard) -> None:
        bounds = shard.boundaries
        if not 0 <= shard.dim < len(self.shape):
            raise PlanError(
                f"{self.name}: axis {axis} shards dim {shard.dim} of shape {self.shape}"
            )
        if bounds[0] != 0 or bounds[-1] != self.shape[shard.dim] or list(bounds) != sorted(bounds):
            raise PlanError(
                f"{self.name}: boundaries {bounds} of axis {axis} do not cover dim {shard.dim} "
                f"of shape {self.shape}"
            )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def slices(self, axis_ranks: Mapping[str, int]) -> Slices:
        """Index of the slice held at these axis coordinates, one `slice` a dimension."""
        index = [slice(0, size) for size in self.shape]
        for axis, placement in self.placements.items():
            if isinstance(placement, Shard):
                low, high = placement.bounds(axis_ranks[axis])
                index[placement.dim] = slice(low, high)
        return tuple(index)

    def local_shape(self, axis_ranks: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in self.slices(axis_ranks))

    def is_first_holder(self, axis_ranks: Mapping[str, int]) -> bool:
        """True for exactly one of the ranks that hold this slice, over the axes that place the
        parameter.

        `axis_ranks` names every axis over which the parameter may repeat (tp, and later cp and ep);
        an axis without a placement counts as replicated.
        """
        for axis, rank in axis_ranks.items():
            placement = self.placements.get(axis, Replicate())
            repeats = placement.replicas if isinstance(placement, Shard) else rank + 1
            if rank % repeats:
                return False
        return True


@dataclass(frozen=True)
class ParamTable:
    """Logical name -> ParamSpec, in the order of use in the forward pass."""

    specs: tuple[ParamSpec, ...]

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.specs]
        if len(set(names)) != len(names):
            raise PlanError(
                f"parameter names repeat: {sorted({n for n in names if names.count(n) > 1})}"
            )

    def __iter__(self) -> Iterator[ParamSpec]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __getitem__(self, name: str) -> ParamSpec:
        for spec in self.specs:
            if spec.name == name:
                return spec
        raise KeyError(name)

    @property
    def numel(self) -> int:
        """Parameters of the whole model, each logical element once."""
        return sum(spec.numel for spec in self.specs if spec.kind == "parameter")
