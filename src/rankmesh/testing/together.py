"""Several ranks as threads of one process: collectives with real values in milliseconds.

Owns a transport behind the seam whose ranks meet at a barrier. It knows no torch.distributed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Queue
from typing import TypeVar

import torch
from torch import Tensor

from rankmesh.comm.seam import Group, Hop, Ledger, Seam

T = TypeVar("T")
_TIMEOUT_S = 20.0


class _Table:
    """Where the ranks lay down their tensors, and the barrier that they pass before and after
    reading.
    """

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_S)
        self.tensors: list[Tensor | None] = [None] * size
        # From one rank to another, in order.
        self.mail: list[list[Queue[Tensor]]] = [[Queue() for _ in range(size)] for _ in range(size)]


@dataclass
class _Coming:
    """A message that is read when it is waited for."""

    mail: Queue[Tensor]
    tensor: Tensor

    def wait(self) -> None:
        """Raises queue.Empty where it does not come."""
        self.tensor.copy_(self.mail.get(timeout=_TIMEOUT_S))


class ThreadTransport:
    """One rank's end of the table. Every group must be the whole set of threads."""

    def __init__(self, table: _Table) -> None:
        self._table = table

    def _exchange(self, tensor: Tensor, group: Group) -> Tensor:
        """[P, *shape]: every rank's tensor, in rank order."""
        self._table.tensors[group.index] = tensor.detach().clone()
        self._table.barrier.wait()
        held = [tensor for tensor in self._table.tensors if tensor is not None]
        stacked = torch.stack(held)
        self._table.barrier.wait()
        return stacked

    def all_reduce(self, tensor: Tensor, group: Group, op: str) -> None:
        """In place."""
        stacked = self._exchange(tensor, group)
        result = stacked.sum(dim=0) if op == "sum" else getattr(stacked, op)(dim=0).values
        tensor.copy_(result)

    def all_gather(self, out: Tensor, tensor: Tensor, group: Group) -> None:
        out.copy_(self._exchange(tensor, group).view_as(out))

    def reduce_scatter(self, out: Tensor, tensor: Tensor, group: Group) -> None:
        """The sum's part of this rank."""
        total = self._exchange(tensor, group).sum(dim=0)
        out.copy_(total.view(group.size, -1)[group.index].view_as(out))

    def broadcast(self, tensor: Tensor, group: Group, source: int) -> None:
        tensor.copy_(self._exchange(tensor, group)[source])

    def hops(self, hops: Sequence[Hop], group: Group) -> list[_Coming | None]:
        """What is sent is laid down at once, so that senders never wait."""
        works: list[_Coming | None] = []
        for hop in hops:
            if hop.op == "send":
                self._table.mail[group.index][hop.peer].put(hop.tensor.detach().clone())
                works.append(None)
            else:
                works.append(_Coming(self._table.mail[hop.peer][group.index], hop.tensor))
        return works


def run_together(size: int, rank_main: Callable[[Seam, Group], T], *, name: str = "tp") -> list[T]:
    """Run `rank_main(seam, group)` on `size` threads, one a rank; results in rank order.

    Raises the first rank's error; ranks that wait for it give up.
    """
    table = _Table(size)

    def main(rank: int) -> T:
        seam = Seam(ThreadTransport(table), Ledger(keep_events=True))
        try:
            return rank_main(seam, Group(name, tuple(range(size)), rank))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(main, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
