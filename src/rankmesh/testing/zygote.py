"""The zygote behind `spawn.Pool`: reads a job a line from stdin, forks its ranks, answers a line on
stdout.

It imports torch and the package once and starts no thread, so that forking stays safe.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

# torch.optim loads this on first use, at two seconds a process: loaded here, all forks share it.
import torch._dynamo  # noqa: F401

from rankmesh.testing.worker import run_worker

_GRACE_S = 3.0


def _fork(job: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    log = os.open(f"{job['folder']}/rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    code = run_worker(job, rank)
    sys.stdout.flush()
    sys.stderr.flush()
    # Gloo's threads may be blocked on a peer that failed: leave without joining them.
    os._exit(code)


def _wait(pids: dict[int, int], timeout: float) -> str | None:
    """None when all ranks ended well, else the reason. Always leaves no child behind."""
    deadline = time.monotonic() + timeout
    reason = None
    parent = os.getppid()
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = pids.pop(pid)
            if status and reason is None:
                reason = f"rank {rank} ended with {_ending(status)}"
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        elif time.monotonic() > deadline or os.getppid() != parent:
            # Whoever asked may have been killed: then nobody waits for the ranks any more.
            reason = (
                reason or f"no end within {timeout:g} s: ranks {sorted(pids.values())} still ran"
            )
            for left in pids:
                os.kill(left, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.002)
    return reason


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return f"exit code {os.WEXITSTATUS(status)}"


def main() -> None:
    """Serve jobs until stdin ends."""
    sys.path.insert(0, str(Path.cwd()))
    for line in sys.stdin:
        job = json.loads(line)
        pids = {_fork(job, rank): rank for rank in range(job["world_size"])}
        reason = _wait(pids, job["timeout"])
        print(json.dumps({"ok": reason is None, "error": reason}), flush=True)
    # Nothing is left to tidy up, and Python takes seconds to take so many modules apart.
    os._exit(0)


if __name__ == "__main__":
    main()
