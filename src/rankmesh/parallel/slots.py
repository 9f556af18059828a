"""Where gradients are deposited: slots of products, in buckets that are reduced together.

Owns the deposit and a bucket's memory. When a bucket is reduced the buffers decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankmesh.comm.seam import Handle
from rankmesh.topology.params import ParamSpec


@dataclass
class Bucket:
    """A stretch [start, stop) of the rank's parameters whose gradients one collective reduces.

    stage: the chunk whose backward completes it. pending: its slots that wait for a deposit.
    memory: the gradients; where only their sum is kept (ZeRO 2) they have none between a reduction
    and the next deposit. total: what a reduction under way brings in.
    """

    start: int
    stop: int
    stage: int = 0
    slots: list[Slot] = field(default_factory=list)
    pending: int = 0
    memory: Tensor | None = None
    total: Tensor | None = None
    handle: Handle | None = None
    reduced: bool = False

    def close(self, unit: int) -> int:
        """Pad the length to a multiple of `unit`; returns where the next one may start."""
        self.stop = self.start + -(-(self.stop - self.start) // unit) * unit
        return self.stop

    def gradients(self, like: Tensor) -> Tensor:
        """Its memory, made where there is none."""
        if self.memory is None:
            self.memory = torch.zeros(self.stop - self.start, dtype=like.dtype, device=like.device)
        return self.memory

    def count(self) -> None:
        """Find out anew how many slots wait."""
        self.pending = sum(slot.pending > 0 for slot in self.slots)


@dataclass(frozen=True)
class Entry:
    """One logical parameter as held here: its place in the flat buffers and its local shape."""

    spec: ParamSpec
    start: int
    shape: tuple[int, ...]
    bucket: Bucket

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """The elements [start, stop) of the flat buffers that this rank owns of a parameter; grad: the
    view of their main gradients.
    """

    name: str
    entry: Entry
    start: int
    stop: int
    grad: Tensor

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def place(self) -> int:
        """Of the first one among all main gradients that this rank keeps."""
        return int(self.grad.storage_offset())

    @property
    def offset(self) -> int:
        """Of the first one in the flattened local slice."""
        return self.start - self.entry.start


@dataclass
class Slot:
    """The home of the gradients of one run: one parameter, or several that one product serves.

    weight: a view of the parameters, a matrix [rows, in] or a vector; [start, stop) its place.
    like: a tensor of the gradients' type. uses: deposits in a microbatch, of all the chunks that
    this rank holds. pending: deposits that are still to come. full: called when the bucket waits
    for no slot.
    """

    names: tuple[str, ...]
    weight: Tensor
    start: int
    stop: int
    like: Tensor
    uses: int
    bucket: Bucket
    full: Callable[[Bucket], None]
    fresh: bool = True
    pending: int = 0

    @property
    def grad(self) -> Tensor:
        """Of the shape of `weight`, a view of the bucket's memory."""
        first = self.bucket.start
        memory = self.bucket.gradients(self.like)
        return memory[self.start - first : self.stop - first].view(self.weight.shape)

    def add_product(self, grads_out: Sequence[Tensor], x: Tensor) -> None:
        """grad += grad_out^T x, for the rows of each output; the first deposit writes instead of
        adding, so that no zeroing is needed.
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
        grad = self.grad
        if self.fresh:
            grad.zero_()
        grad.index_add_(0, index, rows.to(grad.dtype))
        self._deposited()

    def settle(self) -> None:
        """Without a deposit the gradient is zero."""
        if self.fresh:
            self.grad.zero_()
            self.fresh = False

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
            self.full(self.bucket)
