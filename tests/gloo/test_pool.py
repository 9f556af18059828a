"""The pool of worker processes: failures, time-outs, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankmesh.testing.spawn import Pool, WorkerError
from rankmesh.testing.worker import Worker

HERE = "tests.gloo.test_pool"


def rank_of(worker: Worker) -> int:
    return worker.rank


def fail_on_one(worker: Worker) -> None:
    if worker.rank == 1:
        raise ValueError("the first to fail")
    time.sleep(30)


def sleep(worker: Worker, marks: str) -> None:
    Path(marks, str(worker.rank)).write_text(str(os.getpid()))
    time.sleep(60)


def test_results_come_in_rank_order(pool: Pool) -> None:
    assert pool.run(f"{HERE}:rank_of", 3) == [0, 1, 2]


def test_a_failure_is_told_and_ends_the_others(pool: Pool) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 ended with exit code 1") as caught:
        pool.run(f"{HERE}:fail_on_one", 3)
    assert "the first to fail" in str(caught.value) and time.monotonic() - began < 20


def test_a_time_out_is_told(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"no end within 1 s: ranks \[0, 1\] still ran"):
        pool.run(f"{HERE}:sleep", 2, timeout=1.0, marks=str(tmp_path))


def test_a_killed_owner_leaves_no_ranks(tmp_path: Path) -> None:
    script = (
        "from rankmesh.testing.spawn import Pool;"
        f"Pool().run({f'{HERE}:sleep'!r}, 2, marks={str(tmp_path)!r})"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.2)
    ranks = [int(path.read_text()) for path in tmp_path.iterdir()]
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    while any(map(alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(ranks) == 2 and not any(map(alive, ranks))


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
