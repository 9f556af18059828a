"""The one seam through which every collective passes, and the ledger of what passed.

Owns the operations, their wire bytes by the ring formulas, and the record of each. It records only:
what ought to have passed is theory's business. A group of one rank issues nothing and records
nothing.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rankmesh.errors import MeshError
from rankmesh.obs.trace import COMMUNICATION, NO_MARK, NO_TRACE, Mark, Tracer


@dataclass(frozen=True)
class Group:
    """One named process group: its global ranks, this rank's place among them (-1 outside), torch's
    handle.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Hop:
    """One message between two ranks of a group: `tensor` goes to, or takes what comes from, the
    group's `peer`-th rank. label: what it is, for errors.
    """

    op: Literal["send", "receive"]
    tensor: Tensor
    peer: int
    phase: str
    label: str


@dataclass(frozen=True)
class Event:
    """One collective or hop: `payload_bytes` is the full buffer, `wire_bytes` what one rank sends
    under the ring; a receiver sends nothing.
    """

    op: str
    axis: str
    size: int
    phase: str
    payload_bytes: int
    wire_bytes: int


@dataclass
class Ledger:
    """Totals of the collectives of a run, and their ordered list where `keep_events` is set."""

    keep_events: bool = False
    events: list[Event] = field(default_factory=list)
    wire_bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    waited_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def record(self, event: Event) -> None:
        """Add one collective to the totals, and to the list where it is kept."""
        self.wire_bytes[event.axis] += event.wire_bytes
        self.calls[event.axis] += 1
        if self.keep_events:
            self.events.append(event)

    def take(self) -> Ledger:
        """What was recorded since the last call; the ledger starts anew."""
        taken = Ledger(self.keep_events, self.events, self.wire_bytes, self.calls, self.waited_s)
        self.events, self.wire_bytes, self.calls = [], Counter(), Counter()
        self.waited_s = defaultdict(float)
        return taken


class Transport(Protocol):
    """What moves the bytes: torch.distributed, or a fake that plays one rank alone."""

    def all_reduce(self, tensor: Tensor, group: Group, op: str) -> Any: ...

    def all_gather(self, out: Tensor, tensor: Tensor, group: Group) -> Any: ...

    def reduce_scatter(self, out: Tensor, tensor: Tensor, group: Group) -> Any: ...

    def broadcast(self, tensor: Tensor, group: Group, source: int) -> Any: ...

    def hops(self, hops: Sequence[Hop], group: Group) -> list[Any]: ...


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass
class _LocalSum:
    """A reduce-scatter over Gloo, whose own moves as much as an all-reduce: every rank's part of
    the sum comes here and is added up in rank order, in fp32 or wider.
    """

    work: Any
    parts: Tensor
    out: Tensor

    def wait(self) -> None:
        self.work.wait()
        wide = torch.promote_types(self.parts.dtype, torch.float32)
        self.out.view(-1).copy_(self.parts.sum(dim=0, dtype=wide))


class TorchTransport:
    """torch.distributed, every call asynchronous."""

    def all_reduce(self, tensor: Tensor, group: Group, op: str) -> Any:
        return dist.all_reduce(tensor, _OPS[op], group=group.handle, async_op=True)

    def all_gather(self, out: Tensor, tensor: Tensor, group: Group) -> Any:
        return dist.all_gather_single(
            out.view(-1), tensor.view(-1), group=group.handle, async_op=True
        )

    def reduce_scatter(self, out: Tensor, tensor: Tensor, group: Group) -> Any:
        """Over Gloo an all-to-all and a local sum."""
        if out.is_cuda:
            return dist.reduce_scatter_single(
                out.view(-1), tensor.view(-1), group=group.handle, async_op=True
            )
        parts = torch.empty_like(tensor)
        work = dist.all_to_all_single(
            parts.view(-1), tensor.view(-1), group=group.handle, async_op=True
        )
        return _LocalSum(work, parts.view(group.size, -1), out)

    def broadcast(self, tensor: Tensor, group: Group, source: int) -> Any:
        return dist.broadcast(tensor, group.ranks[source], group=group.handle, async_op=True)

    def hops(self, hops: Sequence[Hop], group: Group) -> list[Any]:
        """One work a hop."""
        ops = {"send": dist.isend, "receive": dist.irecv}
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(ops[hop.op], hop.tensor, group=group.handle, group_peer=hop.peer)
                for hop in hops
            ]
        )
        # NCCL answers with one work for all.
        return works if len(works) == len(hops) else works[-1:] * len(hops)


class FakeTransport:
    """Plays one rank alone: sums are its own contribution, gathers repeat it, nothing is what it
    receives. For layouts, never for values.
    """

    def all_reduce(self, tensor: Tensor, group: Group, op: str) -> None:
        """The tensor as it is."""

    def all_gather(self, out: Tensor, tensor: Tensor, group: Group) -> None:
        out.view(group.size, -1).copy_(tensor.view(1, -1).expand(group.size, -1))

    def reduce_scatter(self, out: Tensor, tensor: Tensor, group: Group) -> None:
        out.view(-1).copy_(tensor.view(group.size, -1)[group.index])

    def broadcast(self, tensor: Tensor, group: Group, source: int) -> None:
        """The tensor as it is."""

    def hops(self, hops: Sequence[Hop], group: Group) -> list[None]:
        """Zeros are received."""
        for hop in hops:
            if hop.op == "receive":
                hop.tensor.zero_()
        return [None] * len(hops)


@dataclass
class Handle:
    """A collective under way. It keeps the tensors alive; `wait` raises MeshError naming op, axis
    and phase. mark: its span, which ends with the wait.
    """

    work: Any
    label: str
    axis: str
    ledger: Ledger
    tensors: Sequence[Tensor] = ()
    mark: Mark = NO_MARK

    def wait(self) -> None:
        """Block until the result may be read; on CUDA until the stream may go on."""
        if self.work is None:
            self.mark.close()
            return
        start = time.perf_counter()
        try:
            self.work.wait()
        except RuntimeError as error:
            raise MeshError(f"{self.label} failed: {_reason(error)}") from error
        finally:
            self.work, self.tensors = None, ()
            self.mark.close()
            self.ledger.waited_s[self.axis] += time.perf_counter() - start


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _contiguous(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"collectives take contiguous tensors, got strides {tensor.stride()}")
    return tensor


class Seam:
    """All collectives of one process. Each returns a Handle; wait for it before reading."""

    def __init__(
        self, transport: Transport, ledger: Ledger | None = None, trace: Tracer = NO_TRACE
    ) -> None:
        self.ledger = ledger if ledger is not None else Ledger()
        self._transport = transport
        self._trace = trace
        self._watch: Callable[[Tensor, str], None] | None = None

    def traced(self, trace: Tracer) -> Seam:
        """This seam, transport and ledger the same, with every collective as a span of `trace`."""
        return Seam(self._transport, self.ledger, trace)

    @contextmanager
    def watched(self, watch: Callable[[Tensor, str], None]) -> Iterator[None]:
        """Inside, `watch(tensor, phase)` sees what this rank is about to contribute to each
        collective.
        """
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    def all_reduce(self, tensor: Tensor, group: Group, phase: str, op: str = "sum") -> Handle:
        """In place over `group`; wire bytes 2 (P-1)/P S."""
        if group.size == 1:
            return self._nothing(group)
        payload = _bytes(_contiguous(tensor))
        self._record(
            "all_reduce", group, phase, payload, 2 * (group.size - 1) * payload // group.size
        )
        return self._issue("all_reduce", group, phase, (tensor,), tensor, group, op)

    def all_gather(self, out: Tensor, tensor: Tensor, group: Group, phase: str) -> Handle:
        """`out` [P * n] takes every rank's `tensor` [n] in group order; wire bytes (P-1)/P of
        `out`.
        """
        if group.size == 1:
            out.view(-1).copy_(tensor.reshape(-1))
            return self._nothing(group)
        payload = _bytes(_contiguous(out))
        self._record("all_gather", group, phase, payload, (group.size - 1) * payload // group.size)
        return self._issue(
            "all_gather", group, phase, (out, tensor), out, _contiguous(tensor), group
        )

    def reduce_scatter(self, out: Tensor, tensor: Tensor, group: Group, phase: str) -> Handle:
        """`out` [n] takes this rank's part of the sum of `tensor` [P * n]; wire bytes (P-1)/P of
        `tensor`.
        """
        if group.size == 1:
            out.view(-1).copy_(tensor.reshape(-1))
            return self._nothing(group)
        payload = _bytes(_contiguous(tensor))
        self._record(
            "reduce_scatter", group, phase, payload, (group.size - 1) * payload // group.size
        )
        return self._issue(
            "reduce_scatter", group, phase, (out, tensor), _contiguous(out), tensor, group
        )

    def broadcast(self, tensor: Tensor, group: Group, phase: str, source: int = 0) -> Handle:
        """From the group's `source`-th rank; wire bytes (P-1)/P S, the mean over the ranks of a
        ring.
        """
        if group.size == 1:
            return self._nothing(group)
        payload = _bytes(_contiguous(tensor))
        self._record("broadcast", group, phase, payload, (group.size - 1) * payload // group.size)
        return self._issue("broadcast", group, phase, (tensor,), tensor, group, source)

    def hops(self, hops: Sequence[Hop], group: Group) -> list[Handle]:
        """Start messages to and from single ranks, committed together; a Handle each. Between two
        ranks messages arrive in the order in which they were sent. Wire bytes: those sent.
        """
        if not hops:
            return []
        for hop in hops:
            payload = _bytes(_contiguous(hop.tensor))
            self._record(hop.op, group, hop.phase, payload, payload * (hop.op == "send"))
            if self._watch is not None and hop.op == "send":
                self._watch(hop.tensor, hop.phase)
        marks = [self._mark(hop.op, group, hop.phase, hop.tensor, what=hop.label) for hop in hops]
        labels = [f"{hop.label} over {group.name} {_short(group.ranks)}" for hop in hops]
        try:
            works = self._transport.hops(hops, group)
        except RuntimeError as error:
            raise MeshError(f"{labels[0]} failed: {_reason(error)}") from error
        return [
            Handle(work, label, group.name, self.ledger, (hop.tensor,), mark)
            for work, label, hop, mark in zip(works, labels, hops, marks, strict=True)
        ]

    def _nothing(self, group: Group) -> Handle:
        return Handle(None, "", group.name, self.ledger)

    def _record(self, op: str, group: Group, phase: str, payload: int, wire: int) -> None:
        self.ledger.record(Event(op, group.name, group.size, phase, payload, wire))

    def _issue(
        self, op: str, group: Group, phase: str, tensors: tuple[Tensor, ...], *args: Any
    ) -> Handle:
        label = f"{op} over {group.name} {_short(group.ranks)} ({phase})"
        if self._watch is not None:
            self._watch(tensors[-1], phase)
        mark = self._mark(op, group, phase, max(tensors, key=torch.numel))
        try:
            work = getattr(self._transport, op)(*args)
        except RuntimeError as error:
            raise MeshError(f"{label} failed: {_reason(error)}") from error
        return Handle(work, label, group.name, self.ledger, tensors, mark)

    def _mark(self, op: str, group: Group, phase: str, full: Tensor, **more: str) -> Mark:
        """The span of a collective whose larger buffer is `full`."""
        return self._trace.open(
            COMMUNICATION, op, axis=group.name, phase=phase, bytes=_bytes(full), **more
        )


def _reason(error: RuntimeError) -> str:
    """The first line of torch's words, without the place in its sources."""
    return re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\]\s*", "", str(error).splitlines()[0])


def _short(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"[{shown}{', ...' if len(ranks) > 8 else ''}]"


def scalar(value: float, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    """A one-element tensor for small agreements."""
    return torch.tensor([value], dtype=dtype, device=device)
