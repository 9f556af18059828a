"""Flat buffers: the parameters of a rank in one piece of memory, their main gradients in another.

Owns the layout (runs, buckets), the deposit of gradients and the start of each bucket's reduction
as soon as its last gradient of the step has arrived. It knows no layer, no schedule and no
optimizer; `p.grad` stays None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankmesh.comm.mesh import Mesh
from rankmesh.comm.seam import Group, Handle
from rankmesh.topology.params import ParamSpec

_ALIGN = 16  # elements: 64 bytes of fp32, a cache line and a vector register


@dataclass(frozen=True)
class Entry:
    """One logical parameter as held here: its place in the flat buffers and its local shape."""

    spec: ParamSpec
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass
class Bucket:
    """A stretch of the gradient buffer that one collective reduces."""

    start: int
    stop: int
    pending: int = 0
    handle: Handle | None = None


@dataclass
class Slot:
    """The home of the gradients of one run: one parameter, or several that one product serves.

    weight, grad: views of the flat buffers, matrices [rows, in] or vectors. uses: deposits in a
    microbatch, of all the chunks that this rank holds. pending: deposits that are still to come.
    """

    names: tuple[str, ...]
    weight: Tensor
    grad: Tensor
    uses: int
    bucket: Bucket
    buffers: Buffers
    fresh: bool = True
    pending: int = 0

    def add_product(self, grads_out: Sequence[Tensor], x: Tensor) -> None:
        """grad += grad_out^T x, for the rows of each output; the first deposit of a step writes
        instead of adding, so that no zeroing is needed.
        """
        rows = self.grad.split([grad_out.shape[1] for grad_out in grads_out])
        for grad, grad_out in zip(rows, grads_out, strict=True):
            if grad.dtype != x.dtype:
                self._put(grad, grad_out.t() @ x)
            elif self.fresh:
                torch.mm(grad_out.t(), x, out=grad)
            else:
                grad.addmm_(grad_out.t(), x)
        self._deposited()

    def add(self, grad: Tensor) -> None:
        """grad += a tensor of its own shape."""
        self._put(self.grad, grad)
        self._deposited()

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """grad[index] += rows, repeated indices summed."""
        if self.fresh:
            self.grad.zero_()
        self.grad.index_add_(0, index, rows.to(self.grad.dtype))
        self._deposited()

    def _put(self, grad: Tensor, value: Tensor) -> None:
        if self.fresh:
            grad.copy_(value)
        else:
            grad.add_(value)

    def _deposited(self) -> None:
        self.fresh = False
        self.pending -= 1
        if self.pending == 0:
            self.bucket.pending -= 1
            self.buffers.advance()


@dataclass
class Buffers:
    """Parameters and main gradients of all the chunks of a rank. Made by `lay_out`.

    tied: names that another pipeline rank holds too; their gradients are summed with that one's.
    """

    mesh: Mesh
    params: Tensor
    grads: Tensor
    entries: dict[str, Entry]
    group: Group
    tied: tuple[str, ...] = ()
    buckets: list[Bucket] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    started: int = 0

    def param(self, name: str) -> Tensor:
        """The local slice of a parameter, a view."""
        return self._view(self.params, name)

    def grad(self, name: str) -> Tensor:
        """The local slice of its main gradient, a view."""
        return self._view(self.grads, name)

    def _view(self, flat: Tensor, name: str) -> Tensor:
        entry = self.entries[name]
        return flat[entry.start : entry.stop].view(entry.shape)

    def begin_step(self, microbatches: int) -> None:
        """Forget the gradients of the last step; each bucket is reduced after its parameters' last
        deposit in so many microbatches. With 0 nothing is reduced before `finish`.
        """
        self.started = 0
        for bucket in self.buckets:
            bucket.pending = 0
        for slot in self.slots:
            slot.fresh, slot.pending = True, slot.uses * microbatches
            slot.bucket.pending += 1

    def advance(self) -> None:
        """Start the sums of buckets that are complete, in order.

        Collectives meet by their order alone, and replicas may complete buckets in different
        orders (or some not at all): none overtakes another.
        """
        while self.started < len(self.buckets) and self.buckets[self.started].pending == 0:
            self._reduce_next()

    def _reduce_next(self) -> None:
        self.started += 1
        self.reduce(self.buckets[self.started - 1])

    def reduce(self, bucket: Bucket) -> None:
        """Start the bucket's sum over the replicas; issues one all-reduce."""
        bucket.handle = self.mesh.seam.all_reduce(
            self.grads[bucket.start : bucket.stop], self.group, "gradients"
        )

    def settle(self) -> None:
        """A parameter that got no gradient in this step has the gradient zero."""
        for slot in self.slots:
            if slot.fresh:
                slot.grad.zero_()
                slot.fresh = False

    def finish(self) -> None:
        """Every gradient complete: late buckets, then waits, then tied weights, then the sums of
        `grad_sum`.

        Parameters without a gradient count as zero, so every rank issues the same collectives.
        """
        self.settle()
        while self.started < len(self.buckets):
            self._reduce_next()
        for bucket in self.buckets:
            assert bucket.handle is not None
            bucket.handle.wait()
            bucket.handle = None
        if self.tied:
            self._sum("embedding", list(self.tied))
        for axis, names in self._partial():
            self._sum(axis, names)

    def _partial(self) -> Iterator[tuple[str, list[str]]]:
        axes = sorted({axis for entry in self.entries.values() for axis in entry.spec.grad_sum})
        for axis in axes:
            yield (
                axis,
                [name for name, entry in self.entries.items() if axis in entry.spec.grad_sum],
            )

    def _sum(self, axis: str, names: list[str]) -> None:
        """One all-reduce for all gradients of which this rank has a part over `axis`."""
        group = self.mesh.group(axis)
        if group.size == 1:
            return
        flat = torch.cat([self.grad(name).flatten() for name in names])
        self.mesh.seam.all_reduce(flat, group, "gradients").wait()
        start = 0
        for name in names:
            grad = self.grad(name)
            grad.copy_(flat[start : start + grad.numel()].view_as(grad))
            start += grad.numel()


@dataclass(frozen=True)
class Hold:
    """One parameter that a rank holds. uses: deposits of its gradient in a microbatch. family:
    parameters share a bucket only with others of their family.
    """

    spec: ParamSpec
    uses: int = 1
    family: int = 0


def lay_out(
    holds: Sequence[Hold],
    fused: Sequence[tuple[str, ...]],
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    tied: tuple[str, ...] = (),
) -> Buffers:
    """Allocate the buffers of the parameters `holds` (in order of use) on the mesh's device.

    Runs lie in reverse order of use, as backward completes them; a run is one parameter or a
    `fused` tuple, whose members lie side by side. Main gradients are in max(fp32, dtype).
    """
    by_name = {hold.spec.name: hold for hold in holds}
    runs = _runs(list(by_name), fused)
    axis_ranks = mesh.axis_ranks()
    entries: dict[str, Entry] = {}
    spans, end = [], 0
    for names in reversed(runs):
        start = end = -(-end // _ALIGN) * _ALIGN
        for name in names:
            spec = by_name[name].spec
            entries[name] = Entry(spec, end, spec.local_shape(axis_ranks))
            end = entries[name].stop
        spans.append((names, start, end))
    wide = torch.promote_types(dtype, torch.float32)
    buffers = Buffers(
        mesh=mesh,
        params=torch.zeros(end, dtype=dtype, device=mesh.device),
        grads=torch.zeros(end, dtype=wide, device=mesh.device),
        entries=entries,
        group=mesh.group("dp_cp"),
        tied=tied,
    )
    family = None
    for names, start, stop in spans:
        hold = by_name[names[0]]
        room = bucket_bytes // wide.itemsize if hold.family == family else 0
        family = hold.family
        buffers.slots.append(_slot(buffers, names, start, stop, room, hold.uses))
    return buffers


def _runs(names: list[str], fused: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    home = {name: members for members in fused for name in members}
    runs: list[tuple[str, ...]] = []
    for name in names:
        members = home.get(name, (name,))
        if members[0] == name:
            runs.append(members)
    return runs


def _bucket(buffers: Buffers, start: int, stop: int, room: int) -> Bucket:
    """The bucket that takes the run: the open one while it has room, else a new one."""
    last = buffers.buckets[-1] if buffers.buckets else None
    if last is None or stop - last.start > room:
        last = Bucket(start, stop)
        buffers.buckets.append(last)
    last.stop = stop
    return last


def _slot(
    buffers: Buffers, names: tuple[str, ...], start: int, stop: int, room: int, uses: int
) -> Slot:
    shape = (-1, *buffers.entries[names[0]].shape[1:])
    return Slot(
        names=names,
        weight=buffers.params[start:stop].view(shape),
        grad=buffers.grads[start:stop].view(shape),
        uses=uses,
        bucket=_bucket(buffers, start, stop, room),
        buffers=buffers,
    )
