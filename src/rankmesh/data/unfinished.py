"""The folder of a job that is not finished: its parts, and a journal that says how far they reach.

Owns the lock, the journal, and the answer to "may this job go on where that one stopped?". It must
not know how documents are read or encoded.

`.NAME.unfinished` lies beside PREFIX, whose last part NAME is. lock: held by the kernel for the
job's process. job.json: settings and inputs. journal.jsonl: a Tally a line, written after the parts
that it counts are on disk. ids, lengths: the parts.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rankmesh.data.indexed import Tokens
from rankmesh.data.inputs import Input
from rankmesh.data.meta import TokenMeta
from rankmesh.data.tally import Tally
from rankmesh.data.writer import TokenParts
from rankmesh.errors import DataError

_VERSION = 1


class Unfinished:
    """The folder of the job that writes `prefix`, made and locked. Raises DataError where another
    process holds it.
    """

    def __init__(self, prefix: str | Path) -> None:
        path = Path(prefix)
        self.folder = path.with_name(f".{path.name}.unfinished")
        self._lock = _locked(self.folder, prefix)
        self._journal: BinaryIO | None = None
        self._parts: TokenParts | None = None
        self.num_records = 0

    def resume(
        self, settings: Mapping[str, Any], inputs: Sequence[Input], dtype: np.dtype[Any]
    ) -> Tally:
        """Opens the parts where an interrupted job with the same settings left off, else empty.

        Inputs may have changed, come or gone behind the last record that counts nothing of them.
        """
        files = [[str(one.path), one.kind, one.size, one.mtime_ns] for one in inputs]
        tally, end = Tally(), 0
        same = self._same_inputs(settings, files)
        for record, stop in self._records():
            position = record.position
            # A record in an input, or at its end, counts something of it.
            if position.input + (position.offset > 0 or position.number > 0) > same:
                break
            tally, end = record, stop
            self.num_records += 1
        try:
            self._parts = TokenParts(self.folder, dtype, tally.documents, tally.tokens)
        except DataError:
            # Parts shorter than the journal says: from a disk that lost them. All over again.
            tally, end, self.num_records = Tally(), 0, 0
            self._parts = TokenParts(self.folder, dtype)
        self._journal = (self.folder / "journal.jsonl").open("ab")
        self._journal.truncate(end)
        job = {"format_version": _VERSION, "settings": dict(settings), "inputs": files}
        _write(self.folder / "job.json", json.dumps(job))
        return tally

    def append(self, ids: Tokens, lengths: Any) -> None:
        """Adds documents; see `TokenParts.append`."""
        assert self._parts is not None
        self._parts.append(ids, lengths)

    def record(self, tally: Tally) -> None:
        """Makes all that was appended durable: an interrupted job goes on from here."""
        assert self._parts is not None and self._journal is not None
        self._parts.sync()
        self._journal.write(json.dumps(tally.to_fields()).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self.num_records += 1

    def publish(self, prefix: str | Path, meta: TokenMeta) -> None:
        """Puts the token file in place and removes the folder."""
        assert self._parts is not None
        self._parts.publish(prefix, meta)
        self.remove()

    def remove(self) -> None:
        """Forgets the job."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Gives the folder up and leaves it where it is; closing twice is fine."""
        if self._parts is not None:
            self._parts.close()
        if self._journal is not None:
            self._journal.close()
        self._lock.close()

    def _same_inputs(self, settings: Mapping[str, Any], files: list[list[Any]]) -> int:
        """How many leading inputs are those of the job in the folder; -1 if it is another job."""
        try:
            job = json.loads((self.folder / "job.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return -1
        if job.get("format_version") != _VERSION or job.get("settings") != dict(settings):
            return -1
        pairs = list(zip(job["inputs"], files, strict=False))
        return next((i for i, (old, new) in enumerate(pairs) if old != new), len(pairs))

    def _records(self) -> Iterator[tuple[Tally, int]]:
        """The records of the journal and where each ends; a last one that was cut off is none."""
        try:
            content = (self.folder / "journal.jsonl").read_bytes()
        except OSError:
            return
        end = 0
        for line in content.splitlines(keepends=True):
            end += len(line)
            try:
                yield Tally.from_fields(json.loads(line)), end
            except (ValueError, TypeError, KeyError):
                return


def _locked(folder: Path, prefix: str | Path) -> BinaryIO:
    """The open lock of the folder. The kernel drops it with the process: no stale one remains."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = (folder / "lock").open("ab")
        except FileNotFoundError:
            # The job that held it has just removed the folder.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise DataError(f"{prefix}: another `prepare` is writing it ({folder})") from None
        if _is_open_at(lock, folder / "lock"):
            return lock
        lock.close()


def _is_open_at(stream: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _write(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    with new.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, path)
