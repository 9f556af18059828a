"""How one rank's failure ends all ranks, and how its text reaches the user once.

Owns the record of the first failure in the rendezvous store, the thread that waits for it on each
rank, and the error file that torch's elastic agent reads. It issues no collective and destroys no
process group: both would wait for peers that may be gone. It knows neither mesh nor model.

The first rank to write the record is the culprit. Its sockets close only when its process ends,
after the record is written, so that a peer's "connection reset" always comes second.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from rankmesh.comm.environ import Launch
from rankmesh.comm.exchange import Store, put_all
from rankmesh.errors import MeshError, RankmeshError
from rankmesh.obs.secrets import mask_text

__all__ = ["Failure", "Lifeline", "first_failure", "leave", "lost_peer"]

# Who sees a dead peer waits this long for that peer's own words, and whoever hears of a failure
# has this long to meet it by itself before its process is ended.
_GRACE_S = 3.0
# A rank that has not yet come when another fails may still be importing: it has this long.
_LATE_S = 30.0
_FIRST, _FOREVER = "failure", timedelta(days=365)
_PEER_PHRASES = (
    "broken pipe",
    "connection closed",
    "connection refused",
    "connection reset",
    "nccl",
    "pair closure",
    "remote process",
    "socket closed",
    "socket timeout",
    "timed out",
)


@dataclass(frozen=True)
class Failure:
    """What ended one rank.

    code: the exit code. time: seconds since the epoch. known: raised on purpose, so that its text
    says enough without a traceback. by_peer: only the loss of another rank. after: the rank that
    failed first, where this one was merely ended with it.
    """

    rank: int
    host: str
    kind: str
    text: str
    code: int
    time: float
    known: bool = False
    by_peer: bool = False
    after: int | None = None
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException, rank: int, host: str) -> Failure:
        """The failure of this process, now, with its traceback."""
        code = error.exit_code if isinstance(error, RankmeshError) else 1
        return cls(
            rank=rank,
            host=host,
            kind=type(error).__name__,
            text=mask_text(" ".join(str(error).split())),
            code=130 if isinstance(error, KeyboardInterrupt) else code,
            time=time.time(),
            known=isinstance(error, RankmeshError | KeyboardInterrupt),
            by_peer=lost_peer(error),
            trace=mask_text("".join(traceback.format_exception(error))),
        )

    @property
    def line(self) -> str:
        """One line for a person: who, and the text."""
        words = [] if self.known and self.text else [self.kind]
        words += [self.text] if self.text else []
        return f"rank {self.rank} ({self.host}): {': '.join(words)}"


def lost_peer(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, says only that another process could not be reached."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and any(phrase in text for phrase in _PEER_PHRASES):
            return True
        error = error.__cause__
    return False


def first_failure(error_files: Mapping[int, Mapping[str, Any]]) -> Failure | None:
    """The culprit among the contents of error files by rank; None where none is in our form."""
    found = [
        Failure(**content["message"]["rankmesh"])
        for content in error_files.values()
        if isinstance(content.get("message"), dict) and "rankmesh" in content["message"]
    ]
    return min(found, key=lambda failure: (failure.by_peer, failure.time), default=None)


class Lifeline:
    """One rank's tie to the others: tells them of its failure, and hears of theirs.

    Without `attach` (before the rendezvous, or in a world of one rank) failures stay its own.
    `logger`, where one is set, takes tracebacks at level DEBUG.
    """

    def __init__(self, launch: Launch, host: str) -> None:
        self._launch = launch
        self._host = host
        self._store: Store | None = None
        self._thread: threading.Thread | None = None
        # The failure of another rank that the thread has heard of.
        self._first: Failure | None = None
        self.logger: logging.Logger | None = None
        # Called once with the first failure's line before this process ends for it.
        self.on_end: Callable[[str], object] | None = None
        self._parted = threading.Event()
        # Main thread and watching thread may both have reason to end the process: one does.
        self._ending = threading.Lock()

    @property
    def store(self) -> Store | None:
        """What `attach` was given, until the orderly end."""
        return self._store

    def attach(self, store: Store) -> None:
        """From here on a failure of any rank ends this process within seconds.

        The thread waits on a connection of its own: a store serves one call at a time.
        """
        if self._launch.world_size == 1:
            return
        self._store = store
        store.add("attached", 1)
        self._thread = threading.Thread(
            target=self._watch, args=(store.clone(),), name="rankmesh-lifeline", daemon=True
        )
        self._thread.start()

    def await_all(self) -> None:
        """Waits until every rank has come here. No time limit: a failure of any ends the wait."""
        if self._store is None:
            return
        try:
            if self._store.add("done", 1) == self._launch.world_size:
                self._store.set("all done", "")
            self._store.wait(["all done"], _FOREVER)
        except RuntimeError as error:
            raise MeshError(f"lost the rendezvous store at the end: {error}") from error

    def part(self) -> None:
        """Orderly end: stops listening. Who keeps the store stays until all have parted."""
        store, self._store = self._store, None
        if store is None:
            return
        self._parted.set()
        try:
            store.set(_end_key(self._launch.rank), "parted")
            if self._thread is not None:
                self._thread.join(_GRACE_S)
            store.add("parted", 1)
            deadline = time.monotonic() + _GRACE_S
            keeps = self._launch.rank == 0 and not self._launch.agent_store
            while keeps and store.add("parted", 0) < self._launch.world_size:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
        except RuntimeError:
            pass  # the store's keeper has ended first; there is nobody left to tell

    def fail(self, error: BaseException) -> NoReturn:
        """Records `error`, tells all ranks and ends this process, without waiting for any peer."""
        failure = self._of(error)
        first = self._first or self._claim(failure)
        if first.rank == failure.rank:
            if not failure.by_peer:
                self._await_ears()
            self._end(failure)
        self._end(self._consequence(first, failure.trace), first)

    def _await_ears(self) -> None:
        """Who keeps the store stays until all have heard; those still starting get more time."""
        store, size = self._store, self._launch.world_size
        if store is None or self._launch.rank != 0 or self._launch.agent_store:
            return
        try:
            patience = _GRACE_S if store.add("attached", 0) == size else _LATE_S
            deadline = time.monotonic() + patience
            while store.add("heard", 0) < size - 1 and time.monotonic() < deadline:
                time.sleep(0.05)
        except RuntimeError:
            pass  # the store is gone: there is nobody left to tell

    def tell(self, error: BaseException) -> Failure:
        """Records `error` and tells all ranks, as `fail` does, but leaves this process running.

        Returns the first failure of all ranks: this one, unless another was earlier. From here on
        no failure ends this process.
        """
        self._parted.set()
        failure = self._of(error)
        first = self._claim(failure)
        self._write(failure)
        store, self._store = self._store, None
        if store is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone, and nobody listens
                store.set(_end_key(self._launch.rank), "parted")
        return first

    def _end(self, failure: Failure, cause: Failure | None = None) -> NoReturn:
        """Writes, speaks and ends the process, whatever hangs meanwhile (a full disk, a pipe)."""
        self._ending.acquire()
        timer = threading.Timer(_GRACE_S, os._exit, args=(failure.code,))
        timer.daemon = True
        timer.start()
        try:
            self._write(failure)
            self._show(failure)
            if self.on_end is not None:
                self.on_end((cause or failure).line)
        finally:
            leave(failure.code)

    def _claim(self, failure: Failure) -> Failure:
        """The first failure of all ranks: this one, unless another rank was earlier."""
        store = self._store
        if store is None:
            return failure
        try:
            store.set_timeout(timedelta(seconds=_GRACE_S))
            deadline = time.monotonic() + (_GRACE_S if failure.by_peer else 0.0)
            while time.monotonic() < deadline and not store.check([_FIRST]):
                time.sleep(0.05)
            mine = json.dumps(asdict(replace(failure, trace="")))
            first = Failure(**json.loads(store.compare_set(_FIRST, "", mine)))
            if first.rank == failure.rank:
                ranks = range(self._launch.world_size)
                put_all(store, {_end_key(rank): mine for rank in ranks if rank != failure.rank})
            return first
        except RuntimeError:
            return failure  # the store is gone: speak for oneself

    def _watch(self, store: Store) -> None:
        """Sleeps on the store until this rank parts, another fails, or the store is lost."""
        key = _end_key(self._launch.rank)
        try:
            store.wait([key], _FOREVER)
            word = store.get(key)
            if word != b"parted":
                self._first = Failure(**json.loads(word))
                store.add("heard", 1)
        except RuntimeError:
            word = b""
        if word == b"parted" or self._parted.wait(_GRACE_S):
            return
        if self._first is not None:
            self._end(self._consequence(self._first, _all_stacks()), self._first)
        address = f"{self._launch.master_addr}:{self._launch.master_port}"
        error = MeshError(f"lost the rendezvous store at {address}: its keeper has ended")
        failure = replace(self._of(error), by_peer=True, trace=_all_stacks())
        # All ranks meet this; the first of those left speaks for them.
        self._end(failure if self._launch.rank <= 1 else replace(failure, after=0))

    def _consequence(self, first: Failure, trace: str) -> Failure:
        """What this rank reports when another failed first: that, and not its text again."""
        error = MeshError(f"ended because rank {first.rank} ({first.host}) failed")
        # torch's agent takes the earliest whole second for the cause.
        moment = max(time.time(), first.time + 1.0)
        mine = self._of(error)
        return replace(mine, time=moment, by_peer=True, after=first.rank, trace=trace)

    def _of(self, error: BaseException) -> Failure:
        return Failure.of(error, self._launch.rank, self._host)

    def _write(self, failure: Failure) -> None:
        """The error file, in the form of torch's elastic agent plus our own record."""
        if self.logger is not None:
            self.logger.debug("%s\n%s", failure.line, failure.trace)
        if self._launch.error_file is None:
            return
        info = {
            "py_callstack": failure.line if failure.known else failure.trace,
            "timestamp": str(int(failure.time)),
        }
        message = {"message": failure.line, "extraInfo": info, "rankmesh": asdict(failure)}
        # The agent may read it at any moment, and half a record would end it: it is there whole or
        # not at all.
        partial = self._launch.error_file.with_suffix(".partial")
        try:
            partial.write_text(json.dumps({"message": message}))
            partial.replace(self._launch.error_file)
        except OSError:
            # On a full disk, say; so it is said here.
            partial.unlink(missing_ok=True)
            print(f"rankmesh: error: {failure.line}", file=sys.stderr)

    def _show(self, failure: Failure) -> None:
        """Speaks on stderr where no agent does it for us; a mere consequence stays silent."""
        if self._launch.error_file is None and failure.after is None:
            trace = "" if failure.known else failure.trace
            print(f"{trace}rankmesh: error: {failure.line}", file=sys.stderr)


def _end_key(rank: int) -> str:
    return f"end/{rank}"


def _all_stacks() -> str:
    """Where every thread of this process stands: the only trace of a rank that was ended."""
    frames = sys._current_frames()
    parts = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is not None and thread is not threading.current_thread():
            parts.append(f"Thread {thread.name}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)


def leave(code: int) -> NoReturn:
    """Ends the process at once. An orderly exit would join threads that wait for dead peers."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # a closed pipe must not keep the process
    logging.shutdown()
    os._exit(code)
