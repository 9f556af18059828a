"""Whole runs inside worker processes, and ways in which they die while they save. No test here."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rankmesh.checkpoint import tensorfile
from rankmesh.comm.environ import Launch
from rankmesh.comm.exchange import Store
from rankmesh.comm.failure import Lifeline
from rankmesh.config.load import load_config
from rankmesh.data.loader import Loader, Microbatch
from rankmesh.testing.worker import Worker
from rankmesh.train import loop, save
from rankmesh.train.session import train


class _Loose(Lifeline):
    """The pool ends the other ranks of a job itself."""

    def attach(self, store: Store) -> None:
        """No thread that waits for the others' failures."""


def run(worker: Worker, *, config: str, overrides: Sequence[str]) -> list[int]:
    """A whole run as this rank; returns the sample numbers that the rank was fed, in order."""
    worker.start()
    launch = Launch(
        launcher="none",
        rank=worker.rank,
        world_size=worker.world_size,
        local_rank=worker.rank,
        local_world_size=worker.world_size,
        master_addr="localhost",
        master_port=0,
    )
    fed: list[int] = []
    plain = Loader.at

    def at(self: Loader, consumed: int) -> list[Microbatch]:
        batches = plain(self, consumed)
        if self.end is None:
            fed.extend(int(k) for batch in batches for k in batch.samples if k >= 0)
        return batches

    Loader.at = at  # type: ignore[method-assign]
    train(load_config(config, overrides), launch, _Loose(launch, "here"))
    return fed


def count(worker: Worker, *, step: int, **given: Any) -> int:
    """How many moments the save of `step` has on this rank: points at which it may be cut off."""
    seen = [0]

    def note() -> None:
        seen[0] += 1

    _watch(step, note)
    run(worker, **given)
    return seen[0]


def die(worker: Worker, *, step: int, moment: int, rank: int, alone: bool, **given: Any) -> None:
    """SIGKILL just before `moment` of the save of `step` on `rank`; of this rank alone, or all."""
    (worker.folder / f"pid-{worker.rank}").write_text(str(os.getpid()))
    left = [moment]

    def note() -> None:
        left[0] -= 1
        if left[0]:
            return
        others = [r for r in range(worker.world_size) if r != rank and not alone]
        for pid in [int((worker.folder / f"pid-{r}").read_text()) for r in others]:
            os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    if worker.rank == rank:
        _watch(step, note)
    run(worker, **given)


def full_disk(worker: Worker, *, step: int, rank: int, **given: Any) -> None:
    """The disk is full for `rank` while it writes the save of `step`."""

    def note() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if worker.rank == rank:
        _watch(step, note)
    run(worker, **given)


def _watch(step: int, note: Callable[[], None]) -> None:
    """Call `note` before each write, sync, rename and removal of the save of `step`."""
    active = [False]

    def when_active() -> None:
        if active[0]:
            note()

    for owner, name in ((tensorfile, "_raw"), (os, "fsync"), (Path, "rename"), (shutil, "rmtree")):
        _before(owner, name, when_active)
    plain = save.save_checkpoint

    def save_checkpoint(*args: Any, **kwargs: Any) -> str:
        active[0] = kwargs["step"] == step
        line = plain(*args, **kwargs)
        active[0] = False
        return line

    loop.save_checkpoint = save_checkpoint


def _before(owner: Any, name: str, action: Callable[[], None]) -> None:
    plain = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        action()
        return plain(*args, **kwargs)

    setattr(owner, name, wrapped)
