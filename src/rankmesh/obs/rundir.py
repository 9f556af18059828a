"""The folder of a run: who owns it, and the files that describe the run.

Owns the lock, config.toml, ranks.json and status.json. It knows nothing of what the run computes.

- config.toml: the resolved config, as text that is handed in; config-2.toml and so on where a later
  attempt came with another one
- ranks.json: {"format_version", "launches": [{"attempt", "started_at", "world_size", "plan",
  "ranks", "config", "first_step", "resumed_from"}]}; a rank is {"rank", "host", "device", "pid",
  "coordinate"}
- status.json: {"format_version", "state", "step", "total_steps", "started_at", "updated_at",
  "host", "pid", "error"}; state is "running", "failed" or "done"; step is the last finished
  one; error is one line or null
- metrics.jsonl: one object a step of each attempt (metrics.py)
- log/: rank-00000.log and so on (log.py)
- lock: held, by the kernel, for as long as the run lives
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TextIO

from rankmesh.errors import UserError, reason
from rankmesh.obs.jsonfile import read_json, write_json, write_last_words, write_text
from rankmesh.obs.secrets import mask_text

State = Literal["running", "failed", "done"]

# What only a run writes: a folder with one of these has been used.
_TRACES = ("config.toml", "ranks.json", "status.json", "metrics.jsonl")


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One rank of a launch. device: an identity that two processes cannot share unknowingly."""

    rank: int
    host: str
    device: str
    pid: int
    coordinate: Mapping[str, int]


def config_path(run_dir: Path) -> Path:
    """The resolved config of a run."""
    return run_dir / "config.toml"


def metrics_path(run_dir: Path) -> Path:
    """The metrics of a run, one step a line."""
    return run_dir / "metrics.jsonl"


def log_folder(run_dir: Path) -> Path:
    """Where each rank of a run has its log file."""
    return run_dir / "log"


def now() -> str:
    """The time in UTC, to the second, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class RunDir:
    """A folder that belongs to this process until `close`. Made by one rank; the others only read
    paths.

    total_steps: for status.json. again: the folder may have been used, by attempts of the same run;
    what they wrote stays. Raises UserError where another run holds the folder, where it has been
    used by a run before that finished a step, or where it cannot be made.
    """

    def __init__(self, path: Path, total_steps: int, *, again: bool = False) -> None:
        self.path = path
        self._total_steps = total_steps
        self._started_at = now()
        self._lock = _locked(path)
        try:
            if not again:
                _refuse_used(path)
            _make_log_folder(path)
        except BaseException:
            self._lock.close()
            raise

    @property
    def attempt(self) -> int:
        """Number of the launch that comes next, from 1."""
        return len(_launches(self.path)) + 1

    def write_config(self, text: str) -> str:
        """Write config.toml, or beside earlier ones that differ config-2.toml and so on; returns
        the name."""
        number, path = 1, config_path(self.path)
        while path.exists():
            if path.read_text(encoding="utf-8") == text:
                return path.name
            number += 1
            path = self.path / f"config-{number}.toml"
        write_text(path, text)
        return path.name

    def add_launch(
        self,
        plan: Mapping[str, object],
        ranks: Sequence[RankRecord],
        *,
        config: str = "config.toml",
        first_step: int = 1,
        resumed_from: str | None = None,
    ) -> None:
        """Add one launch to ranks.json: the plan as plain values, every rank of the world, the file
        of its config, the first step that it makes, the checkpoint that it comes from."""
        launch = {
            "attempt": self.attempt,
            "started_at": self._started_at,
            "world_size": len(ranks),
            "plan": plan,
            "ranks": [vars(record) for record in ranks],
            "config": config,
            "first_step": first_step,
            "resumed_from": resumed_from,
        }
        write_json(self.path / "ranks.json", {"launches": [*_launches(self.path), launch]})

    def set_status(self, state: State, step: int, error: str | None = None) -> None:
        """Write status.json; `step` is the last finished one, `error` the reason of a failure.

        Raises RankmeshError where it cannot, unless the state is "failed": that has a reason
        already.
        """
        fields = {
            "state": state,
            "step": step,
            "total_steps": self._total_steps,
            "started_at": self._started_at,
            "updated_at": now(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "error": None if error is None else _one_line(error),
        }
        write = write_last_words if state == "failed" else write_json
        write(self.path / "status.json", fields)

    def close(self) -> None:
        """Give the folder up; closing twice is fine."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_status(run_dir: Path) -> dict[str, Any]:
    """status.json. Raises UserError."""
    return read_json(run_dir / "status.json")


def note_failure(run_dir: Path, error: str) -> None:
    """Mark a run as failed, for whoever outlives its ranks and knows why they ended: a rank that
    was killed leaves no note, and its peers know only that they lost it. Changes no other state,
    and nothing where no run has begun.
    """
    path = run_dir / "status.json"
    if not path.exists():
        return
    status = read_json(path)
    if status["state"] in ("running", "failed"):
        changes = {"state": "failed", "updated_at": now(), "error": _one_line(error)}
        write_last_words(path, {**status, **changes})


def read_launches(run_dir: Path) -> list[dict[str, Any]]:
    """The launches in ranks.json, oldest first. Raises UserError."""
    launches: list[dict[str, Any]] = read_json(run_dir / "ranks.json")["launches"]
    return launches


def _one_line(error: str) -> str:
    return mask_text(" ".join(error.split()))


def _launches(run_dir: Path) -> list[dict[str, Any]]:
    """The launches so far; [] before the first."""
    return read_launches(run_dir) if (run_dir / "ranks.json").exists() else []


def _locked(path: Path) -> TextIO:
    """The open lock file. The kernel drops the lock with the process, so no stale one can
    remain.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"log.run_dir {path}: cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = " ".join(lock.read().split()) or "another process"
        lock.close()
        raise UserError(
            f"log.run_dir {path}: in use by {holder}; choose another folder or wait for its end"
        ) from None
    except OSError as error:
        lock.close()
        raise UserError(f"log.run_dir {path}: cannot be locked: {error.strerror}") from error
    with contextlib.suppress(OSError):  # on a full disk: the lock holds without its holder's name
        os.ftruncate(lock.fileno(), 0)
        words = f"process {os.getpid()} on {socket.gethostname()} since {now()}\n"
        os.write(lock.fileno(), words.encode())  # unbuffered: nothing is left for `close` to write
    return lock


def _make_log_folder(path: Path) -> None:
    try:
        log_folder(path).mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"log.run_dir {path}: cannot be written: {reason(error)}") from error


def _nothing_done(path: Path) -> bool:
    """Whether the run there ended before its first step, as for a wrong key: it may start anew."""
    if not (path / "status.json").exists() or (path / "checkpoints").exists():
        return False
    metrics = metrics_path(path)
    return read_status(path)["step"] == 0 and not (metrics.exists() and metrics.stat().st_size)


def _refuse_used(path: Path) -> None:
    if not any((path / name).exists() for name in _TRACES) or _nothing_done(path):
        return
    state = read_status(path)["state"] if (path / "status.json").exists() else "running"
    # The lock was free, so a run that calls itself running has died.
    was = {"running": "was interrupted"}.get(state, f"is {state}")
    raise UserError(
        f"log.run_dir {path}: holds a run that {was}; train.resume=auto goes on with it, else "
        "choose another folder"
    )
