"""What the ranks of the group tests do, in worker processes."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rankmesh.comm.bootstrap import Options, make_groups, start
from rankmesh.comm.environ import Launch
from rankmesh.comm.links import Limits
from rankmesh.testing.worker import Worker
from rankmesh.topology.plan import ParallelPlan

QUICK = Limits(arrive_s=15.0, answer_s=5.0, rounds=2, message_bytes=1 << 12)


def launch_of(worker: Worker) -> Launch:
    """The launch that a launcher would have told this worker of."""
    return Launch(
        launcher="torchrun",
        rank=worker.rank,
        world_size=worker.world_size,
        local_rank=worker.rank,
        local_world_size=worker.world_size,
        master_addr="localhost",
        master_port=1,
    )


def use_every_group(worker: Worker, plan: dict[str, Any]) -> list[Any]:
    """One barrier and one all-reduce of the rank on every group; [name, ranks, sum] of each."""
    mesh = worker.mesh(ParallelPlan(**plan))
    seen = []
    for name, group in mesh.groups.items():
        dist.barrier(group=group.handle)
        value = torch.tensor([worker.rank], dtype=torch.int64)
        mesh.seam.all_reduce(value, group, "test").wait()
        seen.append([name, list(group.ranks), int(value)])
    return seen


def time_set_up(worker: Worker, plan: dict[str, Any]) -> float:
    """Seconds that a whole start takes, from the store to preflight B."""
    began = time.perf_counter()
    start(
        ParallelPlan(**plan),
        launch_of(worker),
        options=Options(device="cpu", limits=QUICK),
        store=worker.store(),
    )
    return time.perf_counter() - began


def describe_groups(worker: Worker, plan: dict[str, Any], seconds: float) -> dict[str, list[Any]]:
    """Name -> description and time-out in seconds of each group that was made."""
    worker.start()
    groups = make_groups(ParallelPlan(**plan), worker.rank, timeout=timedelta(seconds=seconds))
    found: dict[str, list[Any]] = {}
    for name, group in groups.items():
        handle: Any = group.handle
        backend = handle._get_backend(torch.device("cpu"))
        found[name] = [handle.group_desc, backend.options._timeout.total_seconds()]
    return found


def wait_in_a_group(worker: Worker, plan: dict[str, Any], seconds: float) -> str:
    """Rank 0 waits in its tp group for a peer that never comes; the words of the time-out."""
    worker.start()
    groups = make_groups(ParallelPlan(**plan), worker.rank, timeout=timedelta(seconds=seconds))
    text = ""
    if worker.rank == 0:
        try:
            dist.all_reduce(torch.ones(1), group=groups["tp"].handle)
        except RuntimeError as error:
            text = str(error)
    worker.store().add("left", 1)
    while worker.store().add("left", 0) < worker.world_size:
        time.sleep(0.02)
    return text


def start_twice(worker: Worker) -> list[list[int]]:
    """Two meshes in one world, the second over the first's process group and store."""
    worker.start()
    world = dist.group.WORLD
    options = Options(device="cpu", limits=QUICK)
    first = start(ParallelPlan(tp=4), launch_of(worker), options=options)
    second = start(ParallelPlan(tp=2, dp=2), launch_of(worker), options=options)
    assert dist.group.WORLD is world and first.mesh.group("tp").handle is world
    return [list(started.mesh.group("tp").ranks) for started in (first, second)]


def two_models(worker: Worker, first: dict[str, Any], second: dict[str, Any]) -> list[list[int]]:
    """Two plans over one world; each sums the ranks of its own tp group, in turn."""
    sums = []
    meshes = [worker.mesh(ParallelPlan(**plan)) for plan in (first, second)]
    for mesh in (*meshes, *reversed(meshes)):
        value = torch.tensor([worker.rank], dtype=torch.int64)
        mesh.seam.all_reduce(value, mesh.group("tp"), "test").wait()
        sums.append([int(value), sum(mesh.group("tp").ranks)])
    return sums


def create_own_groups_only(worker: Worker) -> None:
    """What the factory prevents: each rank makes just the pair that it is in."""
    worker.start()
    pair = [0, 3] if worker.rank in (0, 3) else [1, 2]
    group = dist.new_group(pair, timeout=timedelta(seconds=worker.timeout))
    dist.barrier(group=group)
