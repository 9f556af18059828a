"""A pool of worker processes for tests over Gloo.

Owns a zygote: a process that has imported torch once and forks the workers of each job, so that a
job starts in milliseconds and always from a clean state. Jobs and results travel as JSON. It knows
nothing of what a job does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class WorkerError(AssertionError):
    """A job of the pool failed; the text holds the first failing rank's traceback."""


class Pool:
    """Runs `module:function` on several forked ranks. Use as a context manager, or call close().

    A target has the signature `target(worker: rankmesh.testing.worker.Worker, **kwargs)` and
    returns something that JSON can carry.
    """

    def __init__(self, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rankmesh.testing.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=env,
        )

    def run(
        self, target: str, world_size: int, *, timeout: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Results of `target` on every rank, in rank order. Raises WorkerError on failure or time-
        out.
        """
        with tempfile.TemporaryDirectory(prefix="rankmesh-job-") as folder:
            reply = self._ask(target, world_size, timeout, folder, kwargs)
            if not reply["ok"]:
                raise WorkerError(
                    f"{target} on {world_size} ranks: {reply['error']}\n{_logs(Path(folder))}"
                )
            files = [Path(folder) / f"result-{rank}.json" for rank in range(world_size)]
            return [json.loads(file.read_text()) for file in files]

    def fail(
        self, target: str, world_size: int, *, timeout: float = 60.0, **kwargs: Any
    ) -> tuple[str, str]:
        """For jobs that must fail: (reason, all ranks' output). Raises WorkerError where it
        succeeds.
        """
        with tempfile.TemporaryDirectory(prefix="rankmesh-job-") as folder:
            reply = self._ask(target, world_size, timeout, folder, kwargs)
            if reply["ok"]:
                raise WorkerError(f"{target} on {world_size} ranks was expected to fail")
            return str(reply["error"]), _logs(Path(folder))

    def _ask(
        self, target: str, world_size: int, timeout: float, folder: str, kwargs: Any
    ) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        job = {
            "target": target,
            "world_size": world_size,
            "timeout": timeout,
            "folder": folder,
            "kwargs": kwargs,
        }
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError("the zygote ended")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """End the zygote."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)
        self._process.stdout.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _logs(folder: Path) -> str:
    """The output of every rank, the earliest failure first."""
    texts = []
    failed = sorted(folder.glob("failed-*"), key=lambda path: path.stat().st_mtime_ns)
    first = [path.name.removeprefix("failed-") for path in failed]
    logs = sorted(folder.glob("rank-*.log"), key=lambda path: _place(path, first))
    for path in logs:
        text = path.read_text(errors="replace")
        texts.append(f"--- {path.stem}\n{text[-4000:]}")
    return "\n".join(texts)


def _place(path: Path, first: list[str]) -> tuple[int, str]:
    rank = path.stem.removeprefix("rank-")
    return (first.index(rank) if rank in first else len(first), path.name)
