"""Start-up and end of one rank, in the one right order.

Owns the order: launcher's environment, device, rendezvous, preflight A, world group with that
device, the plan's groups, preflight B. The steps belong to the modules that it calls; it knows no
model, and whoever builds one runs preflight C (`shards`) before the first step.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rankmesh.comm.environ import Launch, alone, local_device, read_launch
from rankmesh.comm.exchange import Store
from rankmesh.comm.failure import Lifeline, leave
from rankmesh.comm.groupfactory import make_groups
from rankmesh.comm.identity import Identity, digest, identify, rank_lines
from rankmesh.comm.links import Limits, LinkReport, check_links
from rankmesh.comm.mesh import Mesh
from rankmesh.comm.preflight import Finding, check_identities, raise_fatal, tp_across_hosts
from rankmesh.comm.seam import Seam, TorchTransport
from rankmesh.errors import MeshError, UserError
from rankmesh.topology.groups import creation_order
from rankmesh.topology.plan import ParallelPlan

__all__ = ["Options", "Startup", "bind_device", "make_groups", "run_rank", "start"]

# torch's type stubs do not export the stores.
_stores: Any = dist


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to start. device: auto, cpu or cuda. timeout_s: of every collective of every group.

    agree: name -> value that must be equal on all ranks, beside versions, code and plan. host: a
    name to use instead of the system's. kv_replicas, experts, tied_embeddings: facts of the model
    that decide which groups are needed. limits: patience of the preflight.
    """

    device: str = "auto"
    timeout_s: float = 600.0
    agree: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    kv_replicas: int = 1
    experts: bool = False
    tied_embeddings: bool = False
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, kw_only=True)
class Startup:
    """A world that has started. ranks, links: on rank 0 only. phases: (name, seconds) in order."""

    launch: Launch
    mesh: Mesh
    store: Store
    ranks: tuple[Identity, ...]
    findings: tuple[Finding, ...]
    links: LinkReport
    phases: tuple[tuple[str, float], ...]


def run_rank(launch: Launch, body: Callable[[Lifeline], int]) -> int:
    """Runs `body` as one rank of the launch, and ends the process as a rank should.

    Where nobody launched us it is just called, and errors pass through. Otherwise this does not
    return: after success the ranks part in order; an error of any rank ends all of them within
    seconds, its text reaching the user once.
    """
    lifeline = Lifeline(launch, socket.gethostname())
    if launch.launcher == "none":
        return body(lifeline)
    try:
        # Before anything that a rank may fail in alone, such as a file that its host lacks.
        lifeline.attach(_meet(launch, Options(), None))
        code = body(lifeline)
        lifeline.await_all()
        if dist.is_initialized():
            dist.destroy_process_group()
        lifeline.part()
    except BaseException as error:
        lifeline.fail(error)
    leave(code)


def start(
    plan: ParallelPlan,
    launch: Launch | None = None,
    *,
    lifeline: Lifeline | None = None,
    options: Options | None = None,
    store: Store | None = None,
    logger: logging.Logger | None = None,
) -> Startup:
    """Brings this rank into the world of `plan`; every rank calls it, with the same arguments.

    launch: read from the environment unless given. A world group that exists already is reused,
    with its store unless one is given. The rank map, times and warnings go to `logger`. Raises
    UserError for an environment or device that cannot be, MeshError for ranks that cannot work
    together; both name ranks, hosts and values.
    """
    options = options or Options()
    clock = _Clock()
    with clock("environment"):
        launch = _fitting(plan, launch or read_launch() or alone())
    with clock("device"):
        device = bind_device(launch, options.device)
    with clock("rendezvous"):
        tied = lifeline.store if lifeline is not None else None
        store = _meet(launch, options, store or tied)
        if lifeline is not None and tied is None:
            lifeline.attach(store)
    with clock("preflight A"):
        mine = identify(launch, device, {**_agreed(plan, options), **options.agree}, options.host)
        ranks = check_identities(store, mine, launch.world_size, options.limits.arrive_s)
    with clock("world group"):
        _make_world(launch, device, store, options.timeout_s)
    with clock("groups"):
        mesh = _make_mesh(plan, launch, device, options)
    with clock("preflight B"):
        links = check_links(
            store,
            mesh.groups,
            rank=launch.rank,
            world_size=launch.world_size,
            device=device,
            limits=options.limits,
        )
        findings = raise_fatal(links.findings)
        if ranks:
            findings += tp_across_hosts(plan, [one.host for one in ranks])
    started = Startup(
        launch=launch,
        mesh=mesh,
        store=store,
        ranks=ranks,
        findings=findings,
        links=links,
        phases=tuple(clock.phases),
    )
    if logger is not None:
        _log(started, logger)
    return started


def bind_device(launch: Launch, kind: str) -> torch.device:
    """This process's device, made current before anything can touch another.

    A first collective on an unbound process guesses a device from the rank, and opens a context
    on a GPU that belongs to another process. kind: auto, cpu or cuda. Raises UserError.
    """
    count = 0 if kind == "cpu" else torch.cuda.device_count()
    if count == 0:
        if kind == "cuda":
            raise UserError("device cuda: no CUDA device is visible; allowed here: auto, cpu")
        return torch.device("cpu")
    device = torch.device("cuda", local_device(launch, count))
    torch.cuda.set_device(device)
    return device


def _fitting(plan: ParallelPlan, launch: Launch) -> Launch:
    if plan.world_size != launch.world_size:
        raise MeshError(
            f"the plan ({plan}) has {plan.world_size} ranks, the launcher started "
            f"{launch.world_size}"
        )
    return launch


class _Clock:
    """Names and times the steps of start-up, in order."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.phases.append((name, time.perf_counter() - began))


def _meet(launch: Launch, options: Options, store: Store | None) -> Store:
    """The store of this start, under names of its own.

    torch's agent keeps a store under torchrun; elsewhere rank 0 does.
    """
    base: Any = store
    if base is None and dist.group.WORLD is not None:
        base = dist.group.WORLD.get_group_store()
    elif base is None and launch.world_size == 1:
        base = _stores.HashStore()
    elif base is None:
        base = _connect(launch, options.limits.arrive_s)
    # Two jobs may meet in one store where their ports are the same: then ranks are absent, not
    # mixed. A process may start twice (one mesh after another); all ranks do so equally often.
    prefix = f"rankmesh/{launch.job}/{launch.attempt}"
    turn = base.add(f"{prefix}/starts/{launch.rank}", 1)
    named: Store = _named(f"{prefix}/{turn}", base)
    return named


def _named(prefix: str, store: Any) -> Any:
    """The same store under a prefix."""
    return _stores.PrefixStore(prefix, store)


def _connect(launch: Launch, limit_s: float) -> Any:
    address = f"{launch.master_addr}:{launch.master_port}"
    keeps = launch.rank == 0 and not launch.agent_store
    try:
        return _stores.TCPStore(
            launch.master_addr,
            launch.master_port,
            launch.world_size,
            is_master=keeps,
            timeout=timedelta(seconds=limit_s),
            # Preflight A waits for the others, and names those that do not come.
            wait_for_workers=False,
        )
    except RuntimeError as error:
        host = socket.gethostname()
        if keeps:
            text = f"rank 0 ({host}) cannot keep the rendezvous store at {address}"
            cure = "is the port taken? MASTER_PORT chooses another"
        else:
            text = f"rank {launch.rank} ({host}) cannot reach the rendezvous store at {address}"
            cure = f"no answer within {limit_s:g} s: does rank 0 run there?"
        first = str(error).strip().partition("\n")[0]
        raise MeshError(f"{text}: {cure} ({first})") from error


def _agreed(plan: ParallelPlan, options: Options) -> dict[str, str]:
    order = creation_order(
        plan,
        kv_replicas=options.kv_replicas,
        experts=options.experts,
        tied_embeddings=options.tied_embeddings,
    )
    return {"plan": f"{plan} #{digest(plan.to_dict())}", "groups": digest(order)}


def _make_world(launch: Launch, device: torch.device, store: Store, timeout_s: float) -> None:
    """The world group, bound to the device; one that exists is kept, none is made for one rank."""
    if dist.is_initialized() or launch.world_size == 1:
        return
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=_named("world", store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as error:
        first = str(error).strip().partition("\n")[0]
        raise MeshError(f"making the world group failed: {first}") from error


def _make_mesh(plan: ParallelPlan, launch: Launch, device: torch.device, options: Options) -> Mesh:
    groups = make_groups(
        plan,
        launch.rank,
        timeout=timedelta(seconds=options.timeout_s),
        kv_replicas=options.kv_replicas,
        experts=options.experts,
        tied_embeddings=options.tied_embeddings,
    )
    return Mesh(plan, launch.rank, device, Seam(TorchTransport()), groups)


def _log(started: Startup, logger: logging.Logger) -> None:
    """One line for the console; the rank map, where this rank knows it, and the times below it."""
    plan, took = started.mesh.plan, sum(seconds for _, seconds in started.phases)
    hosts = {one.host for one in started.ranks}
    if hosts:
        on = f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}"
        ranks = f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''}"
        logger.info("%s on %s: %s; start-up %.2f s", ranks, on, plan, took)
    for line in rank_lines(plan, started.ranks):
        logger.debug("%s", line)
    times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in started.phases)
    logger.debug("start-up: %s", times)
    for finding in started.findings:
        logger.warning("%s", finding)
