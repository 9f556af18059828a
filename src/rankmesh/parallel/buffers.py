"""Flat buffers: the parameters of a rank in one piece of memory, their main gradients in another.

Owns the layout (runs, buckets), the deposit of gradients and the start of each bucket's reduction
as soon as its last gradient of the step has arrived. It knows no layer, no schedule and no
optimizer; `p.grad` stays None.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankmesh.comm.mesh import Mesh
from rankmesh.comm.seam import Group, Handle
from rankmesh.topology.params import ParamSpec


@dataclass(frozen=True)
class Entry:
    """One logical parameter as held here: its place in the flat buffers and its local shape."""

    spec: ParamSpec
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """The elements [start, stop) of the flat buffers that this rank owns of a parameter."""

    name: str
    entry: Entry
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def offset(self) -> int:
        """Of the first one in the flattened local slice."""
        return self.start - self.entry.start


@dataclass
class Bucket:
    """A stretch of the gradient buffer that one collective reduces."""

    start: int
    stop: int
    pending: int = 0
    handle: Handle | None = None

    def close(self, unit: int) -> int:
        """Pad the length to a multiple of `unit`; returns where the next one may start."""
        self.stop = self.start + -(-(self.stop - self.start) // unit) * unit
        return self.stop


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
    """Parameters and main gradients of all the chunks of a rank. Made by `placing.lay_out`.

    shard: the ranks that share the optimizer state, each owning its part of every bucket; one rank
    alone without ZeRO. copies: the ranks that own the same elements. tied: names that another
    pipeline rank holds too; their gradients are summed with that one's. pieces: what this rank owns
    of each parameter, by name; a parameter lies in one bucket, so that it has one piece at most.
    main: what the optimizer updates, the same elements in max(fp32, dtype): views of `params` where
    that is wide enough.
    """

    mesh: Mesh
    params: Tensor
    grads: Tensor
    entries: dict[str, Entry]
    shard: Group
    copies: Group
    tied: tuple[str, ...] = ()
    buckets: list[Bucket] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    pieces: dict[str, Piece] = field(default_factory=dict)
    main: dict[str, Tensor] = field(default_factory=dict)
    started: int = 0

    def owned(self) -> list[tuple[int, int]]:
        """Stretches of the buffers whose elements this rank reduces and updates."""
        if self.shard.size == 1:
            return [(0, len(self.params))]
        return [self.own(bucket) for bucket in self.buckets]

    def own(self, bucket: Bucket) -> tuple[int, int]:
        """This rank's part of a bucket."""
        size = (bucket.stop - bucket.start) // self.shard.size
        start = bucket.start + self.shard.index * size
        return start, start + size

    def take_possession(self) -> None:
        """Find the piece of each parameter, and make what the optimizer updates of it."""
        for slot in self.slots:
            low, high = (0, len(self.params)) if self.shard.size == 1 else self.own(slot.bucket)
            for name in slot.names:
                entry = self.entries[name]
                start, stop = max(entry.start, low), min(entry.stop, high)
                if start < stop:
                    self.pieces[name] = Piece(name, entry, start, stop)
        pieces = self.pieces.values()
        if self.params.dtype == self.grads.dtype:
            self.main = {one.name: self.params[one.start : one.stop] for one in pieces}
            return
        flat = torch.zeros(sum(map(len, pieces)), dtype=self.grads.dtype, device=self.params.device)
        parts = flat.split([len(one) for one in pieces])
        self.main = dict(zip(self.pieces, parts, strict=True))

    def fill(self, name: str, values: Tensor) -> None:
        """Give a parameter its values, rounded but in `main`."""
        self.param(name).copy_(values)
        if name in self.pieces:
            one = self.pieces[name]
            self.main[name].copy_(values.reshape(-1)[one.offset : one.offset + len(one)])

    def publish(self) -> None:
        """After an update: every rank has all parameters anew. Issues one all-gather a bucket over
        the ranks that share the state.
        """
        if self.params.dtype != self.grads.dtype:
            for one in self.pieces.values():
                self.params[one.start : one.stop].copy_(self.main[one.name])
        if self.shard.size == 1:
            return
        handles = []
        for bucket in self.buckets:
            start, stop = self.own(bucket)
            part = self.params[start:stop].clone()
            whole = self.params[bucket.start : bucket.stop]
            handles.append(self.mesh.seam.all_gather(whole, part, self.shard, "parameters"))
        for handle in handles:
            handle.wait()

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
            slot.bucket.pending += slot.uses > 0

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
        """Start the bucket's sum over the replicas: one all-reduce, or one reduce-scatter into the
        part that this rank owns.
        """
        whole, seam = self.grads[bucket.start : bucket.stop], self.mesh.seam
        if self.shard.size == 1:
            bucket.handle = seam.all_reduce(whole, self.copies, "gradients")
            return
        start, stop = self.own(bucket)
        bucket.handle = seam.reduce_scatter(self.grads[start:stop], whole, self.shard, "gradients")

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
        self._sum_copies()
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

    def _sum_copies(self) -> None:
        """Where several sets of shards exist: one all-reduce a bucket over the owners of a part."""
        if self.shard.size == 1:
            return
        handles = []
        for start, stop in self.owned():
            part = self.grads[start:stop]
            handles.append(self.mesh.seam.all_reduce(part, self.copies, "gradients"))
        for handle in handles:
            handle.wait()

    def _sum(self, axis: str, names: Collection[str]) -> None:
        """One all-reduce for all owned gradients of which this rank has a part over `axis`. Where
        others own other parts, such parameters lie in buckets that look the same on all ranks of
        the axis.
        """
        group = self.mesh.group(axis)
        parts = [
            self.grads[one.start : one.stop] for one in self.pieces.values() if one.name in names
        ]
        if group.size == 1 or not parts:
            return
        flat = torch.cat(parts)
        self.mesh.seam.all_reduce(flat, group, "gradients").wait()
        for part, total in zip(parts, flat.split([len(part) for part in parts]), strict=True):
            part.copy_(total)
