"""Preflight B, after the groups are made: does every link answer, and how fast?

Owns the small collectives and messages of the check and the judgement of their times. Who the
ranks are belongs to `preflight`. It runs before the seam is handed out, so that the ledger of a
run holds the run's own traffic only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist

from rankmesh.comm.exchange import Store, barrier, consult
from rankmesh.comm.preflight import Finding, host_of, where
from rankmesh.comm.seam import Group

__all__ = ["Limits", "Link", "LinkReport", "check_links"]

_NAME = "preflight B"
_AXES = ("tp", "cp", "dp", "pp", "ep", "world")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Patience, in seconds, and what counts as slow.

    arrive_s: for all ranks to come to a check. answer_s: for one collective or message. A link is
    slow whose latency is both `slow_ratio` times the median and above `slow_s`, or above `late_s`
    whatever the others take; likewise for the time of a large message.
    """

    arrive_s: float = 120.0
    answer_s: float = 20.0
    slow_ratio: float = 10.0
    slow_s: float = 0.01
    late_s: float = 0.2
    rounds: int = 8
    message_bytes: int = 1 << 20


@dataclass(frozen=True)
class Link:
    """Two neighbours in a group: one-way latency, time of one large message, or an error."""

    group: str
    low: int
    high: int
    latency_s: float = 0.0
    message_s: float = 0.0
    message_bytes: int = 0
    error: str = ""

    @property
    def bytes_per_s(self) -> float:
        return self.message_bytes / self.message_s if self.message_s else 0.0


@dataclass(frozen=True)
class LinkReport:
    """What rank 0 knows after the check; other ranks get the findings only."""

    findings: tuple[Finding, ...]
    links: tuple[Link, ...] = ()


def check_links(
    store: Store,
    groups: Mapping[str, Group],
    *,
    rank: int,
    world_size: int,
    device: torch.device,
    limits: Limits,
    before: Callable[[str], None] = lambda step: None,
) -> LinkReport:
    """Tries every group and the links between neighbours of every axis; the same findings on all.

    Collectives: one all-reduce of one element a group; a few messages between neighbours along
    each axis. Nothing waits longer than the limits. `before` is called with the name of each step.
    Raises MeshError only where rank 0 or the store is gone; faults of ranks and links are findings.
    """
    before("arrive")
    host = host_of(store)
    keeper = where([0], host)
    absent = barrier(
        store,
        f"{_NAME}/arrive",
        rank=rank,
        world_size=world_size,
        limit_s=limits.arrive_s,
        keeper=keeper,
    )
    if absent:
        text = f"{where(absent, host)} did not answer within {limits.arrive_s:g} s"
        return LinkReport((Finding("B", text),))
    axes = _axes(groups)
    record = _try_groups(groups, rank, device, limits, before)
    if not record.errors:
        record.links.extend(_try_links(axes, rank, device, limits, before))
    # A rank may have met as many silent neighbours before it answers here.
    patience_s = limits.answer_s * (3 * len(axes) + 2)
    links: list[Link] = []

    def judge(records: Mapping[int, Any], missing: Sequence[int]) -> list[dict[str, Any]]:
        links.extend(Link(**link) for one in records.values() for link in one["links"])
        if missing:
            text = f"{where(missing, host)} stopped answering within {patience_s:g} s"
            return [asdict(Finding("B", text))]
        entered = {member: one["entered"] for member, one in records.items()}
        errors = [error for one in records.values() for error in one["errors"]]
        found = [*_broken_groups(errors, entered, limits, host), *_broken_links(links, host)]
        return [asdict(finding) for finding in found or _slow(links, limits, host)]

    verdict = consult(
        store,
        f"{_NAME}/links",
        rank=rank,
        world_size=world_size,
        record=asdict(record),
        judge=judge,
        limit_s=patience_s,
        keeper=keeper,
    )
    findings = tuple(Finding(**found) for found in verdict)
    return LinkReport(findings, tuple(link for link in links if not link.error))


@dataclass
class _Record:
    """What one rank met: failed groups as (name, ranks, text), when it entered each, links it led.

    A link that failed is reported by both ends.
    """

    errors: list[tuple[str, list[int], str]] = field(default_factory=list)
    entered: dict[str, float] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)


def _distinct(groups: Mapping[str, Group]) -> list[Group]:
    """One group for each set of ranks, in the order of their creation."""
    first: dict[tuple[int, ...], Group] = {}
    for group in groups.values():
        first.setdefault(group.ranks, group)
    return list(first.values())


def _axes(groups: Mapping[str, Group]) -> list[Group]:
    """The groups along single axes, whose neighbours talk most."""
    chosen = {name: groups[name] for name in _AXES if name in groups}
    if len(chosen) > 1:
        chosen.pop("world", None)
    return _distinct(chosen)


def _rounds(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The neighbouring pairs of a ring, in three rounds in each of which a rank has one pair."""
    pairs = list(zip(ranks, ranks[1:], strict=False))
    closing = [(ranks[0], ranks[-1])] if len(ranks) > 2 else []
    return [pairs[0::2], pairs[1::2], closing]


def _try_groups(
    groups: Mapping[str, Group],
    rank: int,
    device: torch.device,
    limits: Limits,
    before: Callable[[str], None],
) -> _Record:
    """An all-reduce over each group, up to the first that fails: it may have broken the others."""
    record = _Record()
    start = time.monotonic()
    for group in _distinct(groups):
        before(f"all_reduce {group.name}")
        record.entered[group.name] = time.monotonic() - start
        error = _try_all_reduce(group, rank, device, limits)
        if error:
            record.errors.append((group.name, list(group.ranks), error))
            break
    return record


def _try_all_reduce(group: Group, rank: int, device: torch.device, limits: Limits) -> str:
    """One all-reduce with a known answer; what went wrong, or ""."""
    value = torch.tensor([float(rank + 1)], dtype=torch.float64, device=device)
    expected = float(sum(member + 1 for member in group.ranks))
    try:
        work = dist.all_reduce(value, group=group.handle, async_op=True)
        if work is not None:
            work.wait(timedelta(seconds=limits.answer_s))
    except RuntimeError as error:
        return _short(error)
    if float(value) != expected:
        return f"an all-reduce gave {float(value):g} on rank {rank}, not {expected:g}"
    return ""


def _try_links(
    axes: Sequence[Group],
    rank: int,
    device: torch.device,
    limits: Limits,
    before: Callable[[str], None],
) -> list[Link]:
    """This rank's links along each axis, those that it leads and those that failed."""
    found = []
    step = 0
    for group in axes:
        for pairs in _rounds(group.ranks):
            step += 1
            for low, high in pairs:
                if rank in (low, high):
                    before(f"link {group.name} {low}-{high}")
                    # A neighbour may still wait for its own, silent, neighbour of earlier rounds.
                    patience = timedelta(seconds=limits.answer_s * step)
                    link = _measure(group, (low, high), rank, device, limits, patience)
                    found += [link] if rank == low or link.error else []
    return found


def _measure(
    group: Group,
    pair: tuple[int, int],
    rank: int,
    device: torch.device,
    limits: Limits,
    patience: timedelta,
) -> Link:
    """Times messages between two neighbours; the lower rank leads. Best of several rounds."""
    low, high = pair
    leads = rank == low
    small = torch.zeros(1, dtype=torch.float32, device=device)
    large = torch.zeros(limits.message_bytes, dtype=torch.uint8, device=device)
    ends = partial(_round_trip, group=group, peer=high if leads else low, leads=leads)
    try:
        latency = min(ends(small, small, patience) for _ in range(limits.rounds)) / 2
        both = min(ends(large, small, patience) for _ in range(3))
    except RuntimeError as error:
        return Link(group.name, low, high, error=_short(error))
    return Link(group.name, low, high, latency, max(both - latency, 1e-9), limits.message_bytes)


def _round_trip(
    out: torch.Tensor,
    back: torch.Tensor,
    patience: timedelta,
    *,
    group: Group,
    peer: int,
    leads: bool,
) -> float:
    """Seconds for `out` from the leader to its peer and `back` in return."""
    start = time.perf_counter()
    for tensor, sends in ((out, leads), (back, not leads)):
        move = dist.isend if sends else dist.irecv
        work = move(tensor, peer, group=group.handle)
        if work is not None:
            work.wait(patience)
        if tensor.is_cuda:
            # NCCL's wait orders streams only; the clock needs the arrival.
            torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - start


def _broken_groups(
    errors: Sequence[tuple[str, Sequence[int], str]],
    entered: Mapping[int, Mapping[str, float]],
    limits: Limits,
    host: Callable[[int], str],
) -> list[Finding]:
    """Each group that failed once, with the rank that came to it too late where one did."""
    first: dict[tuple[str, tuple[int, ...]], str] = {}
    for name, members, text in errors:
        first.setdefault((name, tuple(members)), text)
    found = []
    for (name, ranks), text in first.items():
        times = {rank: entered[rank][name] for rank in ranks if name in entered[rank]}
        late = [rank for rank in times if times[rank] > min(times.values()) + limits.answer_s / 2]
        late += [rank for rank in ranks if rank not in times]
        cause = f"; {where(late, host)} came to it late or never" if late else ""
        found.append(Finding("B", f"group {name} of {where(ranks, host)}: {text}{cause}"))
    return found


def _broken_links(links: Sequence[Link], host: Callable[[int], str]) -> list[Finding]:
    broken = {(link.low, link.high): link.error for link in links if link.error}
    return [Finding("B", f"link {where(pair, host)}: {text}") for pair, text in broken.items()]


def _slow(links: Sequence[Link], limits: Limits, host: Callable[[int], str]) -> list[Finding]:
    """Warnings: ranks all of whose links are slow, then other slow links."""
    slow: dict[tuple[int, int], str] = {}
    for what, plain in (("latency_s", "latency"), ("message_s", "large message")):
        times = [float(getattr(link, what)) for link in links]
        # The lower median: of two links, one slow, the other is the usual.
        usual = median_low(times) if times else 0.0
        for link, took in zip(links, times, strict=True):
            if took > limits.late_s or took > max(limits.slow_ratio * usual, limits.slow_s):
                text = f"{plain} {took * 1e3:.3g} ms, the median is {usual * 1e3:.3g} ms"
                slow.setdefault((link.low, link.high), text)
    return _name_slow(slow, {(link.low, link.high) for link in links}, host)


def _name_slow(
    slow: Mapping[tuple[int, int], str],
    measured: set[tuple[int, int]],
    host: Callable[[int], str],
) -> list[Finding]:
    own: dict[int, list[tuple[int, int]]] = {}
    for pair in sorted(measured):
        for rank in pair:
            own.setdefault(rank, []).append(pair)
    ranks = [
        rank
        for rank, pairs in own.items()
        if len(pairs) > 1 and all(pair in slow for pair in pairs)
    ]
    found = [
        Finding("B", f"{where([rank], host)} is slow: {slow[own[rank][0]]}", fatal=False)
        for rank in ranks
    ]
    return found + [
        Finding("B", f"link {where(pair, host)} is slow: {text}", fatal=False)
        for pair, text in slow.items()
        if not set(pair) & set(ranks)
    ]


def _short(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
