"""Faults injected into the ranks of the preflight tests, in worker processes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rankmesh.comm import links
from rankmesh.comm.bootstrap import Options, start
from rankmesh.comm.identity import Identity, identify
from rankmesh.comm.links import check_links
from rankmesh.comm.preflight import check_identities
from rankmesh.comm.seam import Group
from rankmesh.comm.shards import ShardDigest, check_model, fingerprint
from rankmesh.errors import MeshError
from rankmesh.testing.worker import Worker
from rankmesh.topology.plan import ParallelPlan
from tests.gloo.group_jobs import QUICK, launch_of

CPU = torch.device("cpu")
Fault = Mapping[str, Any]


def host(rank: int) -> str:
    """Two ranks a host: alpha, beta."""
    return ("alpha", "beta", "gamma", "delta")[rank // 2]


def identity(worker: Worker, fault: Fault) -> Identity:
    """This rank's identity, with what the fault says of it laid over."""
    mine = identify(launch_of(worker), CPU, {"plan": "dp 4", "config": "abc"}, host(worker.rank))
    change = fault.get(str(worker.rank), {})
    agree = {**mine.agree, **change.get("agree", {})}
    return replace(mine, **{"device_id": f"GPU-{worker.rank}", **change, "agree": agree})


def try_a(worker: Worker, fault: Fault, limit_s: float = 10.0) -> str:
    """Preflight A alone; the text of its refusal. `fault`: rank -> changed fields, or "absent"."""
    if fault.get(str(worker.rank)) == "absent":
        return ""
    try:
        check_identities(worker.store(), identity(worker, fault), worker.world_size, limit_s)
    except MeshError as error:
        return str(error)
    return ""


def without_a(worker: Worker) -> None:
    """The same absent rank with preflight A off: the world group waits for it."""
    if worker.rank != 2:
        worker.start()


def other_order(worker: Worker, check: bool) -> str:
    """Rank 3 makes its groups in another order; with the check it is refused, without it hangs."""
    pairs = [[0, 1], [2, 3], [0, 2], [1, 3]]
    order = pairs[::-1] if worker.rank == 3 else pairs
    if check:
        return try_a(worker, {str(worker.rank): {"agree": {"groups": str(order)}}})
    worker.start()
    for ranks in order:
        group = dist.new_group(ranks, timeout=timedelta(seconds=worker.timeout))
        if worker.rank in ranks:
            dist.all_reduce(torch.ones(1), group=group)
    return ""


def disable(kind: str) -> None:
    """What a fault does to its process."""
    if kind == "dead":
        os._exit(0)
    if kind == "hung":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(float(kind))


def try_b(
    worker: Worker,
    plan: dict[str, Any],
    rank: int,
    step: str,
    kind: str,
    limits: dict[str, float],
) -> list[Any]:
    """Preflight B, while `rank` is disabled before a step; [seconds, findings]."""
    store = worker.store()
    check_identities(store, identity(worker, {}), worker.world_size, 10.0)
    mesh = worker.mesh(ParallelPlan(**plan))

    def before(name: str) -> None:
        if worker.rank == rank and name.startswith(step):
            disable(kind)

    began = time.monotonic()
    try:
        report = check_links(
            store,
            mesh.groups,
            rank=worker.rank,
            world_size=worker.world_size,
            device=CPU,
            limits=replace(QUICK, **limits),
            before=before if kind else lambda name: None,
        )
        found = [[str(finding), finding.fatal] for finding in report.findings]
    except MeshError as error:
        found = [[str(error), True]]
    return [time.monotonic() - began, found]


def tell_b(worker: Worker, **fault: Any) -> None:
    """`try_b` for a rank that is lost for good: prints the findings, and ends the job."""
    _, found = try_b(worker, **fault)
    print("found", json.dumps(found), flush=True)
    raise SystemExit(1)


def without_b(worker: Worker) -> None:
    """A rank that hangs after start-up, with preflight B off: the first collective waits."""
    worker.start()
    if worker.rank == 1:
        disable("hung")
    dist.all_reduce(torch.ones(1))


def slow_messages(worker: Worker, rank: int, seconds: float) -> list[Any]:
    """Rank `rank` takes its time for every message; findings, and the links that were measured."""
    real: Callable[..., Any] = dist.isend

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return real(*args, **kwargs)

    if worker.rank == rank:
        links.dist.isend = late
    store = worker.store()
    check_identities(store, identity(worker, {}), worker.world_size, 10.0)
    mesh = worker.mesh(ParallelPlan(dp=worker.world_size))
    report = check_links(
        store,
        mesh.groups,
        rank=worker.rank,
        world_size=worker.world_size,
        device=CPU,
        limits=QUICK,
    )
    links.dist.isend = real
    found = [[str(finding), finding.fatal] for finding in report.findings]
    return [found, [[link.low, link.high, link.latency_s] for link in report.links]]


def crossed_handles(worker: Worker) -> list[str]:
    """A group whose handle belongs to other ranks than it says."""
    store = worker.store()
    check_identities(store, identity(worker, {}), worker.world_size, 10.0)
    groups = worker.mesh(ParallelPlan(tp=2, dp=2)).groups
    tp, dp = groups["tp"], groups["dp"]
    wrong = {"tp": Group("tp", tp.ranks, tp.index, dp.handle)}
    report = check_links(store, wrong, rank=worker.rank, world_size=4, device=CPU, limits=QUICK)
    return [str(finding) for finding in report.findings]


def hosts(worker: Worker, plan: dict[str, Any], names: list[str]) -> list[list[Any]]:
    """A whole start with injected host names; the findings of rank 0."""
    options = Options(device="cpu", limits=QUICK, host=names[worker.rank])
    started = start(ParallelPlan(**plan), launch_of(worker), options=options, store=worker.store())
    return [[finding.text, finding.fatal] for finding in started.findings]


def refused_start(worker: Worker, agree: dict[str, str]) -> str:
    """A whole start in which rank 1 disagrees; the text, and that no group was made before."""
    options = Options(
        device="cpu", limits=replace(QUICK, arrive_s=10.0), agree=agree if worker.rank == 1 else {}
    )
    try:
        start(ParallelPlan(tp=2), launch_of(worker), options=options, store=worker.store())
    except MeshError as error:
        return f"{dist.is_initialized()} {error}"
    return ""


def shards(worker: Worker, fault: str) -> list[str]:
    """Preflight C over tp 2 x dp 2 for one sharded, one replicated and one constant parameter."""
    store = worker.store()
    check_identities(store, identity(worker, {}), worker.world_size, 10.0)
    mesh = worker.mesh(ParallelPlan(tp=2, dp=2))
    tp = mesh.coordinate.tp
    seed = 0 if fault == "identical" else tp
    shard = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    norm = torch.ones(8)
    if fault == "drifted" and worker.rank == 2:
        norm[3] += 2**-23
    held = {
        "q.weight": ShardDigest(f"[{tp}]", fingerprint(shard), random=True),
        "norm.weight": ShardDigest("[]", fingerprint(norm), random=False),
        "q.bias": ShardDigest(f"[{tp}]", fingerprint(torch.zeros(4)), random=False),
    }
    if fault == "other" and worker.rank == 3:
        del held["q.bias"]
    try:
        check_model(mesh, held, store)
    except MeshError as error:
        assert not mesh.seam.ledger.calls
        return str(error).split("; preflight ")
    return []
