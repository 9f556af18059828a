"""Flat buffers: the parameters of a rank in one piece of memory, their main gradients in another.

Owns which elements a rank keeps and updates, and the start of each bucket's reduction as soon as
its last gradient has come. It knows no layer, no schedule and no optimizer; `p.grad` stays None.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankmesh.comm.mesh import Mesh
from rankmesh.comm.seam import Group
from rankmesh.parallel.slots import Bucket, Entry, Piece, Slot


@dataclass
class Buffers:
    """Parameters and main gradients of all the chunks of a rank. Made by `placing.lay_out`.

    grads: all main gradients, or with ZeRO 2 those owned. shard: the ranks that share the state,
    each owning its part of every bucket; one rank alone without ZeRO. copies: the ranks that own
    the same elements. tied: names that another pipeline rank holds too; their gradients are summed
    with that one's. pieces: what this rank owns of each parameter, by name; a parameter lies in one
    bucket, so that it has one piece at most. main: what the optimizer updates, the same elements in
    max(fp32, dtype): views of `params` where that is wide enough.

    Sums of the replicas: without ZeRO 2 each bucket is reduced once a step, after the last deposit
    in it; with ZeRO 2 in every microbatch, and its memory is given back.
    """

    mesh: Mesh
    params: Tensor
    grads: Tensor
    entries: dict[str, Entry]
    buckets: list[Bucket]
    shard: Group
    copies: Group
    tied: tuple[str, ...] = ()
    slots: list[Slot] = field(default_factory=list)
    pieces: dict[str, Piece] = field(default_factory=dict)
    main: dict[str, Tensor] = field(default_factory=dict)
    reducing: bool = False

    @property
    def each_microbatch(self) -> bool:
        """ZeRO 2: gradients are kept as owned sums alone."""
        return self.mesh.plan.zero >= 2

    def own(self, bucket: Bucket) -> tuple[int, int]:
        """This rank's part of a bucket, in the parameters."""
        size = (bucket.stop - bucket.start) // self.shard.size
        start = bucket.start + self.shard.index * size
        return start, start + size

    def own_grad(self, bucket: Bucket) -> Tensor:
        """The main gradients of this rank's part of a bucket."""
        start, stop = self.own(bucket)
        place = start if not self.each_microbatch else bucket.start // self.shard.size
        return self.grads[place : place + stop - start]

    def owned(self) -> list[Tensor]:
        """All main gradients that this rank reduces and updates."""
        if self.shard.size == 1 or self.each_microbatch:
            return [self.grads]
        return [self.own_grad(bucket) for bucket in self.buckets]

    def take_possession(self) -> None:
        """Find the piece of each parameter, and make what the optimizer updates of it."""
        for slot in self.slots:
            low, high = self.own(slot.bucket)
            grads = self.own_grad(slot.bucket)
            for name in slot.names:
                entry = self.entries[name]
                start, stop = max(entry.start, low), min(entry.stop, high)
                if start < stop:
                    grad = grads[start - low : stop - low]
                    self.pieces[name] = Piece(name, entry, start, stop, grad)
        pieces = self.pieces.values()
        if self.params.dtype == self.grads.dtype:
            self.main = {one.name: self.params[one.start : one.stop] for one in pieces}
            return
        total = sum(map(len, pieces))
        flat = torch.zeros(total, dtype=self.grads.dtype, device=self.params.device)
        self.main = dict(zip(self.pieces, flat.split([len(one) for one in pieces]), strict=True))

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
        entry = self.entries[name]
        return self.params[entry.start : entry.stop].view(entry.shape)

    def grad(self, name: str) -> Tensor:
        """The local slice of its main gradient, a view: with ZeRO only what is owned of it is a
        sum over replicas.
        """
        entry = self.entries[name]
        first = entry.bucket.start
        memory = entry.bucket.gradients(self.grads)
        return memory[entry.start - first : entry.stop - first].view(entry.shape)

    def begin_step(self, microbatches: int) -> None:
        """Forget the gradients of the last step; buckets are reduced as their parameters' deposits
        in so many microbatches come in. With 0 nothing is reduced before `finish`.
        """
        self.reducing = microbatches > 0
        rounds = 1 if self.each_microbatch else microbatches
        if self.each_microbatch:
            self.grads.zero_()
        for slot in self.slots:
            slot.fresh, slot.pending = True, slot.uses * rounds
        for bucket in self.buckets:
            bucket.reduced = False
            bucket.count()

    def advance(self, bucket: Bucket) -> None:
        """Start the sums of buckets that are complete, in order.

        Collectives meet by their order alone, and replicas may complete buckets in different
        orders (or some not at all): none overtakes another; with ZeRO 2 none of the same chunk.
        """
        for one in self._turn(bucket.stage):
            if one.pending > 0 or not self.reducing:
                return
            self._reduce(one)

    def _turn(self, stage: int) -> Iterator[Bucket]:
        """The buckets that are still to be reduced, in order."""
        for one in self.buckets:
            if not one.reduced and (one.stage == stage or not self.each_microbatch):
                yield one

    def end_of(self, stage: int) -> None:
        """A microbatch's weight gradients of a stage are made: with ZeRO 2 its buckets are reduced,
        complete or not, and wait for the next microbatch.
        """
        if not (self.each_microbatch and self.reducing):
            return
        for bucket in list(self._turn(stage)):
            self._reduce(bucket)
        for bucket in self.buckets:
            if bucket.stage == stage:
                for slot in bucket.slots:
                    slot.pending += slot.uses
                bucket.reduced = False
                bucket.count()

    def _reduce(self, bucket: Bucket) -> None:
        """Start the bucket's sum over the replicas: one all-reduce, or one reduce-scatter into the
        part that this rank owns.
        """
        bucket.reduced = True
        seam, own = self.mesh.seam, self.own_grad(bucket)
        for slot in bucket.slots if self.each_microbatch else ():
            slot.settle()
            slot.fresh = True
        whole = bucket.gradients(self.grads)
        if self.shard.size == 1 and not self.each_microbatch:
            bucket.handle = seam.all_reduce(whole, self.copies, "gradients")
            return
        self._absorb(bucket)
        bucket.total = torch.empty_like(own) if self.each_microbatch else own
        bucket.handle = seam.reduce_scatter(bucket.total, whole, self.shard, "gradients")
        if self.each_microbatch:
            bucket.memory = None

    def _absorb(self, bucket: Bucket) -> None:
        """Wait for the bucket's sum, and with ZeRO 2 add it to those before."""
        if bucket.handle is None:
            return
        bucket.handle.wait()
        if self.each_microbatch:
            assert bucket.total is not None
            self.own_grad(bucket).add_(bucket.total)
        bucket.handle, bucket.total = None, None

    def settle(self) -> None:
        """A parameter that got no gradient in this step has the gradient zero."""
        for slot in self.slots:
            slot.settle()

    def finish(self) -> None:
        """Every gradient complete: late buckets, then waits, then tied weights, then the sums of
        `grad_sum`.

        Parameters without a gradient count as zero, so every rank issues the same collectives.
        """
        if not self.each_microbatch or not self.reducing:
            self.settle()
            for bucket in self.buckets:
                if not bucket.reduced:
                    self._reduce(bucket)
        for bucket in self.buckets:
            self._absorb(bucket)
        self._sum_copies()
        if self.tied:
            self._sum("embedding", list(self.tied))
        axes = sorted({axis for entry in self.entries.values() for axis in entry.spec.grad_sum})
        for axis in axes:
            names = [name for name, one in self.entries.items() if axis in one.spec.grad_sum]
            self._sum(axis, names)

    def _sum_copies(self) -> None:
        """Where several sets of shards exist: one all-reduce a bucket over the owners of a part."""
        if self.shard.size == 1 and not self.each_microbatch:
            return
        handles = [
            self.mesh.seam.all_reduce(self.own_grad(bucket), self.copies, "gradients")
            for bucket in self.buckets
        ]
        for handle in handles:
            handle.wait()

    def _sum(self, axis: str, names: Collection[str]) -> None:
        """One all-reduce for all owned gradients of which this rank has a part over `axis`. Where
        others own other parts, such parameters lie in buckets that look the same on all ranks of
        the axis.
        """
        group = self.mesh.group(axis)
        parts = [one.grad for one in self.pieces.values() if one.name in names]
        if group.size == 1 or not parts:
            return
        flat = torch.cat(parts)
        self.mesh.seam.all_reduce(flat, group, "gradients").wait()
        for part, total in zip(parts, flat.split([len(part) for part in parts]), strict=True):
            part.copy_(total)
