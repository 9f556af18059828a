"""Starts the ranks of a run on this machine, and ends them all.

Owns the children's surroundings (logs, threads, signals) and what the user is told of a failure.
The starting itself is torch's elastic launcher; what a rank does is the command's business.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rankmesh.comm import environ
from rankmesh.comm.exchange import span
from rankmesh.comm.failure import first_failure
from rankmesh.errors import RankmeshError, reason
from rankmesh.obs.log import QuietFileHandler

__all__ = ["launch", "threads_per_rank", "torchrun_line"]

_RUN_ID = "TORCHELASTIC_RUN_ID"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Processes that a rank has started may finish their work after it, this long.
_LINGER_S = 2.0


def launch(
    argv: Sequence[str],
    nproc: int,
    log_dir: Path | None = None,
    *,
    grace_s: float = 30.0,
    announce: bool = True,
    module: str = "rankmesh",
    on_failure: Callable[[str], object] | None = None,
) -> int:
    """Runs `python -m MODULE ARGV` on `nproc` local ranks; returns the exit code of the run.

    Rank 0 speaks on the console, the others into a fresh folder in `log_dir` (a temporary one,
    kept after a failure, if None). The port is a free one, so that runs never clash. SIGINT,
    SIGTERM and SIGHUP are passed on to all ranks, which have `grace_s` seconds to end; a second
    one ends them at once. When this returns no process of the run is left. The code of a failure
    is the first failing rank's, and its text goes to stderr in one line; 128 + N after signal N.
    `on_failure` is told the text too, once all ranks have ended: they may not have had the time to
    leave a note.
    """
    folder = _fresh_folder(log_dir)
    records = Path(tempfile.mkdtemp(prefix="rankmesh-records-"))
    if announce:
        line = torchrun_line(argv, nproc, module)
        print(f"starting {nproc} ranks, as would: {line}", file=sys.stderr)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=_RankLogs(folder, records),
        # The other signals are ours, below.
        signals_to_handle="SIGQUIT",
        shutdown_timeout=max(1, round(grace_s)),
    )
    code, text = 1, ""
    try:
        code, text = _run(config, ["-m", module, *argv], nproc, folder)
    finally:
        _end_leftovers(config.run_id, _LINGER_S if code == 0 else 0.0)
        _keep(records, folder)
        if code == 0 and log_dir is None:
            shutil.rmtree(folder, ignore_errors=True)
    if text:
        # A signal is what somebody asked for.
        print(f"rankmesh: {'error: ' if code < 128 else ''}{text}", file=sys.stderr)
        if on_failure is not None:
            on_failure(text)
    return code


def torchrun_line(argv: Sequence[str], nproc: int, module: str = "rankmesh") -> str:
    """The torchrun command that does the same as `launch`."""
    words = ["torchrun", "--standalone", "--nproc-per-node", str(nproc), "-m", module, *argv]
    return shlex.join(words)


def threads_per_rank(nproc: int) -> int:
    """Threads of one rank when `nproc` of them share the cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // nproc)


def _run(config: LaunchConfig, command: Sequence[str], nproc: int, folder: Path) -> tuple[int, str]:
    """Exit code and, where it is not 0, the text for the user."""
    surroundings = {
        "OMP_NUM_THREADS": str(threads_per_rank(nproc)),
        "PYTHONFAULTHANDLER": "1",
        # The C++ side's warnings repeat, per rank, what our own errors say once.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **_loopback(),
    }
    try:
        with environ.defaults(surroundings), _elastic_log(folder), _signals(config.run_id):
            elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        text, code = _explain(error.failures, folder)
        return code, text
    except SignalException as stop:
        return 128 + stop.sigval, f"ended by {stop.sigval.name}"
    return 0, ""


def _keep(records: Path, folder: Path) -> None:
    """Move the ranks' error files beside their logs, as far as the disk has room."""
    with contextlib.suppress(OSError):
        for path in sorted(records.iterdir()):
            shutil.copyfile(path, folder / path.name)
    shutil.rmtree(records, ignore_errors=True)


class _RankLogs(LogsSpecs):
    """Where each rank's streams and its error file go; rank 0 keeps the console.

    The error files have a folder of their own, on the disk of the system's temporary files: the
    disk of the logs may be full, and that be the error.
    """

    def __init__(self, folder: Path, records: Path) -> None:
        super().__init__(log_dir=str(folder))
        self._folder = folder
        self._records = records

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of one attempt; sets the variable that tells a rank its error file."""
        errors = {rank: str(self._records / f"rank-{rank:05}.error.json") for rank in envs}
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = errors[rank]
        return LogsDest(
            stdouts={rank: _stream(self._folder, rank, "out") for rank in envs},
            stderrs={rank: _stream(self._folder, rank, "err") for rank in envs},
            error_files=errors,
        )


def _stream(folder: Path, rank: int, kind: str) -> str:
    """The file of a rank's stream; "" for the console."""
    return str(folder / f"rank-{rank:05}.{kind}") if rank else ""


def _fresh_folder(log_dir: Path | None) -> Path:
    """A folder for this launch's streams; an earlier launch's is never written again."""
    if log_dir is None:
        return Path(tempfile.mkdtemp(prefix="rankmesh-"))
    number = 1
    while True:
        folder = log_dir / f"launch-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise RankmeshError(f"{folder}: cannot be made: {reason(error)}") from error
        else:
            return folder


def _loopback() -> dict[str, str]:
    """Makes Gloo use the loopback device, where it would go by the name of the host.

    That name may belong to a device that is filtered, or to none.
    """
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


@contextlib.contextmanager
def _elastic_log(folder: Path) -> Iterator[None]:
    """Turns the launcher's own log, many lines a failure, into a file."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler = QuietFileHandler(folder / "launcher.log", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(handler)
        handler.close()


@contextlib.contextmanager
def _signals(run_id: str) -> Iterator[None]:
    """The first signal makes torch's agent pass it on and wait; a second one kills the ranks."""
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1:
            _kill(run_id)
            return
        name = signal.Signals(number)
        raise SignalException(f"signal {name.name}", sigval=name)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (*_SIGNALS, signal.SIGQUIT)}
    for number in _SIGNALS:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explain(failures: Mapping[int, ProcessFailure], folder: Path) -> tuple[str, int]:
    """One line about the rank that failed first, and the exit code of the run.

    In this order: an error that a rank has recorded, a rank ended by a signal, a rank that ended
    without a record; only then a rank that lost another.
    """
    first = first_failure({rank: one.error_file_data for rank, one in failures.items()})
    if first is not None and not first.by_peer:
        if first.known:
            return first.line, first.code
        trace = folder / f"rank-{first.rank:05}.traceback"
        try:
            trace.write_text(first.trace)
        except OSError as error:
            return f"{first.line} (no traceback in {trace}: {reason(error)})", first.code
        return f"{first.line} (traceback: {trace})", first.code
    mute = {
        rank: one
        for rank, one in failures.items()
        # SIGTERM is what the agent ends the others with; a record has a file.
        if one.exitcode != -signal.SIGTERM and not Path(one.error_file).is_file()
    }
    killed = [rank for rank, one in mute.items() if one.exitcode == -signal.SIGKILL]
    if first is not None and "timed out" in first.line.lower() and len(killed) == len(mute):
        # Who does not answer any more is killed by the agent, long after the others gave up.
        silent = f"; {span(killed)} did not answer and was killed" if killed else ""
        return f"{first.line}{silent}", first.code
    if mute:
        rank = min(mute, key=lambda rank: (mute[rank].exitcode > 0, mute[rank].timestamp, rank))
        return f"rank {rank} {_ending(rank, mute[rank].exitcode, folder)}; logs: {folder}", (
            2 if mute[rank].exitcode == 2 else 1
        )
    # Of ranks that all ended by SIGTERM the agent names first the one that it did not end itself.
    ended = f"rank {next(iter(failures))} was ended by SIGTERM, from outside"
    return f"{ended if first is None else first.line}; logs: {folder}", 1


def _ending(rank: int, code: int, folder: Path) -> str:
    """How a rank ended that has left no record: its signal, or its code and last words."""
    if code < 0:
        hint = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"
    path = folder / _stream(folder, rank, "err")
    lines = path.read_text(errors="replace").split("\n") if path.is_file() else []
    said = [line.strip() for line in lines if line.strip()]
    return f"ended with exit code {code}" + (f": {said[-1]}" if said else "")


def _processes(run_id: str) -> list[int]:
    """Every other process of the run, known by the environment it was started with.

    Ranks have sessions of their own, and what they start may outlive them, so that neither the
    parent nor the session finds all. Empty where the system has no /proc.
    """
    mark = f"{_RUN_ID}={run_id}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # A zombie has no environment left, and is not found.
            marked = mark in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has just ended, or is not ours
        if marked and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def _kill(run_id: str) -> None:
    for process in _processes(run_id):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def _end_leftovers(run_id: str, patience_s: float) -> None:
    """Waits for what the ranks have left behind, then kills it."""
    deadline = time.monotonic() + patience_s
    while _processes(run_id) and time.monotonic() < deadline:
        time.sleep(0.05)
    _kill(run_id)
