"""Mesh: a parallel plan made live.

Owns this rank's coordinate, its named process groups, the seam and the device. Made once and passed
down; it makes no group itself and knows no layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from rankmesh.comm.seam import FakeTransport, Group, Ledger, Seam, TorchTransport
from rankmesh.topology.groups import GROUP_NAMES, group_of
from rankmesh.topology.plan import ParallelPlan
from rankmesh.topology.ranks import Coordinate, coordinate


@dataclass(frozen=True)
class Mesh:
    """Handed to whatever communicates. `groups` holds every name that the plan needs."""

    plan: ParallelPlan
    rank: int
    device: torch.device
    seam: Seam
    groups: Mapping[str, Group] = field(repr=False)

    @property
    def coordinate(self) -> Coordinate:
        return coordinate(self.plan, self.rank)

    def group(self, name: str) -> Group:
        """This rank's group of that name; a group of one rank where the plan does not split that
        axis.

        Raises KeyError for a group that the plan has but nobody made, such as one that only tied
        embeddings need: a missing group must not pass for a sum over one rank.
        """
        if name in self.groups:
            return self.groups[name]
        if len(group_of(self.plan, name, self.rank)) > 1:
            raise KeyError(f"group {name} of plan {self.plan} was not made at start-up")
        return Group(name, (self.rank,), 0)

    def axis_ranks(self) -> dict[str, int]:
        """Coordinate along each axis that can place a parameter, as `ParamSpec.slices` takes it."""
        place = self.coordinate
        return {"tp": place.tp}


def single_mesh(device: torch.device | None = None) -> Mesh:
    """The mesh of one process: every group has one rank and no collective is issued."""
    return Mesh(
        plan=ParallelPlan(),
        rank=0,
        device=device or torch.device("cpu"),
        seam=Seam(TorchTransport()),
        groups={},
    )


def fake_mesh(plan: ParallelPlan, rank: int, *, kv_replicas: int = 1, device: str = "cpu") -> Mesh:
    """One process plays rank `rank` of the plan's world: no network, every collective recorded in
    order.
    """
    groups = {}
    for name in GROUP_NAMES:
        ranks = group_of(plan, name, rank, kv_replicas=kv_replicas)
        if len(ranks) > 1:
            groups[name] = Group(name, ranks, ranks.index(rank))
    return Mesh(
        plan, rank, torch.device(device), Seam(FakeTransport(), Ledger(keep_events=True)), groups
    )
