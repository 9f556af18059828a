"""Which rank this process is where somebody else may have started the world: Ray, a notebook, a
script with a process group of its own.

Owns that answer alone: it makes no process group. The launchers' variables belong to environ.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from rankmesh.comm.environ import Launch, alone, read_launch
from rankmesh.comm.exchange import consult, span
from rankmesh.errors import MeshError, UserError

__all__ = ["this_launch"]

_PATIENCE_S = 600.0

# torch's type stubs do not export the stores.
_stores: Any = dist


def this_launch() -> Launch:
    """This process's place: in the world group that exists, else as a launcher says, else alone.

    Every rank of a group that exists calls it together: where no launcher's variables give the
    place on the host, the ranks exchange their hosts through the group's store. Issues no
    collective. Raises UserError for a launcher's variables in error, where there is no group.
    """
    if not dist.is_initialized():
        return read_launch() or alone()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    try:
        said = read_launch()
    except UserError:
        said = None  # variables of something else: the group itself is what counts
    agrees = said is not None and (said.rank, said.world_size) == (rank, world_size)
    # All ranks must take the same way.
    hosts = _hosts(rank, world_size, agrees)
    if hosts is None:
        assert said is not None
        return said
    mine = [other for other in range(world_size) if hosts[other] == hosts[rank]]
    return Launch(
        launcher="group",
        rank=rank,
        world_size=world_size,
        local_rank=mine.index(rank),
        local_world_size=len(mine),
        master_addr="",
        master_port=0,
        # Whoever made the group keeps its store.
        agent_store=True,
    )


def _hosts(rank: int, world_size: int, agrees: bool) -> list[str] | None:
    """The host of each rank; None where on every rank the launcher's word will do."""
    assert dist.group.WORLD is not None
    base: Any = dist.group.WORLD.get_group_store()
    turn = base.add(f"rankmesh/joined/{rank}", 1)
    store = _stores.PrefixStore(f"rankmesh/joined/{turn}", base)

    def judge(records: Mapping[int, Any], absent: Sequence[int]) -> dict[str, Any]:
        if absent:
            return {"absent": list(absent)}
        told = [records[other] for other in range(world_size)]
        alike = all(record["agrees"] for record in told)
        return {"absent": [], "hosts": None if alike else [record["host"] for record in told]}

    verdict = consult(
        store,
        "hosts",
        rank=rank,
        world_size=world_size,
        record={"host": socket.gethostname(), "agrees": agrees},
        judge=judge,
        limit_s=_PATIENCE_S,
    )
    if verdict["absent"]:
        raise MeshError(
            f"{span(verdict['absent'])} of the process group did not come within {_PATIENCE_S:g} s"
        )
    hosts: list[str] | None = verdict["hosts"]
    return hosts
