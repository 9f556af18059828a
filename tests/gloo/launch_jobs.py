"""One rank of the launch tests: `python -m tests.gloo.launch_jobs MODE ...`, as `rankmesh` is run.

As `parent MODE` it is the process that starts the ranks, so that a test can signal it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from rankmesh.comm.bootstrap import Options, Startup, run_rank, start
from rankmesh.comm.environ import Launch, read_launch
from rankmesh.comm.failure import Lifeline
from rankmesh.comm.links import Limits
from rankmesh.errors import UserError
from rankmesh.topology.plan import ParallelPlan
from rankmesh.train.launch import launch as start_ranks

MODULE = "tests.gloo.launch_jobs"
LIMITS = Limits(arrive_s=60.0, rounds=2, message_bytes=1 << 12)


def join(launch: Launch, lifeline: Lifeline) -> Startup:
    """A start over dp."""
    options = Options(device="cpu", limits=LIMITS)
    return start(ParallelPlan(dp=launch.world_size), launch, lifeline=lifeline, options=options)


def busy(seconds: float) -> None:
    """Computes, without a look at any peer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(64, 64) @ torch.ones(64, 64)


def stay(rank: int) -> None:
    """Ways in which the other ranks do not notice: a collective, a sleep, a computation."""
    if rank % 2 == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    elif rank == 2:
        time.sleep(300)
    else:
        busy(300)


def fine(launch: Launch, lifeline: Lifeline, folder: str) -> int:
    """A run that ends well: every rank speaks, rank 0 alone is heard."""
    mesh = join(launch, lifeline).mesh
    total = torch.tensor([float(launch.rank + 1)])
    mesh.seam.all_reduce(total, mesh.group("world"), "test").wait()
    (Path(folder) / f"sum-{launch.rank}").write_text(f"{total.item():g} {torch.get_num_threads()}")
    print(f"rank {launch.rank} speaks", flush=True)
    return 0


def raises(launch: Launch, lifeline: Lifeline, folder: str) -> int:
    """Rank 1 raises while the others do not look."""
    join(launch, lifeline)
    if launch.rank == 1:
        time.sleep(0.5)
        (Path(folder) / "raised").write_text(repr(time.time()))
        raise ValueError("boom on one\nwith a second line")
    stay(launch.rank)
    return 0


def raises_first(launch: Launch, lifeline: Lifeline, folder: str) -> int:
    """Rank 1 raises at once, all others wait for it in a collective."""
    join(launch, lifeline)
    if launch.rank == 1:
        raise ValueError("boom on one")
    dist.all_reduce(torch.ones(1))
    return 0


def refuses(launch: Launch, lifeline: Lifeline, folder: str) -> int:
    """Rank 1 finds that the user is wrong, before the rendezvous; the others wait there."""
    if launch.rank == 1:
        raise UserError("data.train /nowhere: no such file on this host")
    join(launch, lifeline)
    return 0


def killed(launch: Launch, lifeline: Lifeline, folder: str) -> int:
    """Rank 1 is gone without a word."""
    join(launch, lifeline)
    if launch.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    stay(launch.rank)
    return 0


def leaves(launch: Launch, lifeline: Lifeline, folder: str) -> int:
    """Rank 1 ends without a record, as a library might make it."""
    join(launch, lifeline)
    if launch.rank == 1:
        print("something about a library", file=sys.stderr, flush=True)
        os._exit(7)
    stay(launch.rank)
    return 0


def waits(launch: Launch, lifeline: Lifeline, folder: str) -> int:
    """All ranks run on, each with a process of its own that nobody waits for."""
    join(launch, lifeline)
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    (Path(folder) / f"ready-{launch.rank}").touch()
    time.sleep(300)
    return 0


def quiet(launch: Launch, lifeline: Lifeline, folder: str) -> int:
    """All ranks run on, deaf to signals, and nobody tells them that the launcher is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    join(launch, lifeline)
    (Path(folder) / f"ready-{launch.rank}").touch()
    time.sleep(300)
    return 0


def stubborn(launch: Launch, lifeline: Lifeline, folder: str) -> int:
    """As `waits`, but no signal ends it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return waits(launch, lifeline, folder)


def main(words: list[str]) -> int:
    """Runs one mode as a rank, or starts ranks that do."""
    if words[0] == "parent":
        nproc, grace_s, *rest = words[1:]
        return start_ranks(rest, int(nproc), module=MODULE, grace_s=float(grace_s))
    mode, folder = words
    launch = read_launch()
    assert launch is not None
    return run_rank(launch, lambda lifeline: globals()[mode](launch, lifeline, folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
