"""Preflight A, before any process group: do the processes of this launch belong together?

Owns what a finding is, the comparison of identities, and the warning where a tp group crosses
hosts. Links between ranks belong to `links`, the model's shards to `shards`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rankmesh.comm.exchange import Store, consult, span
from rankmesh.comm.identity import Identity
from rankmesh.errors import MeshError
from rankmesh.topology.hosts import crossing_groups, mending_axes, mending_order
from rankmesh.topology.plan import ParallelPlan

__all__ = ["Finding", "check_identities", "host_of", "raise_fatal", "tp_across_hosts", "where"]

_NAME = "preflight A"
_SHOWN = 4


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, in one line with ranks, hosts and values."""

    check: str
    text: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"preflight {self.check}: {self.text}"


def check_identities(
    store: Store, mine: Identity, world_size: int, limit_s: float
) -> tuple[Identity, ...]:
    """Compares who all ranks are; returns them all on rank 0 and nothing elsewhere.

    Raises MeshError on every rank: for ranks that did not come within `limit_s`, two processes
    that claim one rank or share one accelerator, and values of `agree` that differ.
    """
    if store.add(f"{_NAME}/claims/{mine.rank}", 1) > 1:
        raise MeshError(f"{_NAME}: a second process claims rank {mine.rank} ({mine.host})")
    identities: list[Identity] = []

    def judge(records: Mapping[int, Any], absent: Sequence[int]) -> list[dict[str, Any]]:
        identities.extend(Identity(**record) for record in records.values())
        found = [*_absent(identities, absent, limit_s), *_shared(identities)]
        return [asdict(finding) for finding in (*found, *_disagreements(identities))]

    verdict = consult(
        store,
        _NAME,
        rank=mine.rank,
        world_size=world_size,
        record=asdict(mine),
        judge=judge,
        limit_s=limit_s,
    )
    raise_fatal(Finding(**found) for found in verdict)
    return tuple(identities)


def raise_fatal(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Raises MeshError with the fatal findings, else returns them all."""
    found = tuple(findings)
    fatal = [str(finding) for finding in found if finding.fatal]
    if fatal:
        raise MeshError("; ".join(fatal))
    return found


def host_of(store: Store) -> Callable[[int], str]:
    """Looks up the host that a rank named in preflight A; "unknown host" where it did not come."""

    def look_up(rank: int) -> str:
        key = f"{_NAME}/{rank}"
        if not store.check([key]):
            return "unknown host"
        return str(json.loads(store.get(key))["host"])

    return look_up


def where(ranks: Iterable[int], host: Callable[[int], str]) -> str:
    """Ranks with their hosts: `ranks 0-3 (alpha), rank 4 (beta)`."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(host(rank), []).append(rank)
    return ", ".join(f"{span(there)} ({name})" for name, there in by_host.items())


def tp_across_hosts(plan: ParallelPlan, hosts: Sequence[str]) -> tuple[Finding, ...]:
    """A warning where tp groups cross hosts, with what mends it. hosts: of each rank."""
    crossing = crossing_groups(plan, hosts)
    if not crossing:
        return ()
    shown = " ".join(f"[{where(ranks, hosts.__getitem__)}]" for ranks in crossing[:_SHOWN])
    more = f" and {len(crossing) - _SHOWN} more" if len(crossing) > _SHOWN else ""
    text = (
        f"{len(crossing)} of {plan.world_size // plan.tp} tp groups cross hosts, over slower "
        f"links: {shown}{more}; {_cure(plan, hosts)}"
    )
    return (Finding("B", text, fatal=False),)


def _cure(plan: ParallelPlan, hosts: Sequence[str]) -> str:
    axes = mending_axes(plan, hosts)
    if axes is not None:
        return f"set parallel.order to {', '.join(axes)}"
    mending = mending_order(plan, hosts)
    order = ",".join(map(str, mending.order[:64])) + (",..." if plan.world_size > 64 else "")
    left = len(mending.still_crossing)
    rest = f"; {left} will still cross, as no host has room" if left else ""
    return f"start the processes in this order of today's ranks: {order}{rest}"


def _absent(there: Sequence[Identity], absent: Sequence[int], limit_s: float) -> list[Finding]:
    if not absent:
        return []
    came = where((one.rank for one in there), _hosts(there).__getitem__)
    return [Finding("A", f"{span(absent)} did not come within {limit_s:g} s; there are {came}")]


def _shared(identities: Sequence[Identity]) -> list[Finding]:
    """Two processes on one accelerator: half the memory each, and a hang in NCCL."""
    users: dict[tuple[str, str], list[Identity]] = {}
    for one in identities:
        if one.device_id:
            users.setdefault((one.host, one.device_id), []).append(one)
    return [
        Finding(
            "A",
            f"{span(one.rank for one in sharing)} ({host}) share the accelerator {device_id}, as "
            f"local ranks {', '.join(str(one.local_rank) for one in sharing)}; each needs its own",
        )
        for (host, device_id), sharing in users.items()
        if len(sharing) > 1
    ]


def _disagreements(identities: Sequence[Identity]) -> list[Finding]:
    names = dict.fromkeys(name for one in identities for name in one.agree)
    hosts = _hosts(identities)
    found = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for one in identities:
            holders.setdefault(one.agree.get(name, "nothing"), []).append(one.rank)
        if len(holders) > 1:
            # The many first: the few are those to look at.
            ordered = sorted(holders.items(), key=lambda item: -len(item[1]))
            sides = [f"{where(ranks, hosts.__getitem__)}: {value}" for value, ranks in ordered]
            found.append(Finding("A", f"{name} differs: {'; '.join(sides[:_SHOWN])}"))
    return found


def _hosts(identities: Sequence[Identity]) -> dict[int, str]:
    return {one.rank: one.host for one in identities}
