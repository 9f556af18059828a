"""Scripts of users that call `rankmesh.train`: started by torchrun, or with a group of their own.

`python -m tests.gloo.python_jobs MODE FOLDER [RANK]`; what a rank finds goes to FOLDER/rank-N.json.
No test lives here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import rankmesh as rm
from rankmesh.comm.joined import this_launch
from rankmesh.obs.metrics import StepMetrics

OWN_WORLD = 2


def note(folder: Path, rank: int, **found: object) -> None:
    (folder / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def script(folder: Path) -> None:
    """Two runs, one after the other, in a script that torchrun started."""
    first = rm.train(folder / "config.toml", ["parallel.tp=2", f"log.run_dir={folder / 'first'}"])
    between = dist.is_initialized()
    second = rm.train(folder / "config.toml", [f"log.run_dir={folder / 'second'}"])
    note(
        folder,
        int(os.environ["RANK"]),
        tp=first.losses,
        dp=second.losses,
        evals=second.eval_losses[6],
        group_left=between or dist.is_initialized(),
    )


def own(folder: Path, rank: int) -> None:
    """A process group that the script made, without any variable of a launcher."""
    assert "RANK" not in os.environ
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=OWN_WORLD
    )
    place = this_launch()
    assert (place.rank, place.local_rank, place.local_world_size) == (rank, rank, OWN_WORLD)
    losses = []
    for mesh in ("parallel.tp=2", "parallel.dp=2"):
        changes = [mesh, f"log.run_dir={folder / mesh}"]
        losses.append(rm.train(folder / "config.toml", changes).losses)
    total = torch.ones(1)
    dist.all_reduce(total)
    note(folder, rank, tp=losses[0], dp=losses[1], total=total.item())
    dist.destroy_process_group()


def fail(folder: Path) -> None:
    """Rank 1 fails in code of the user's; the others are in the middle of a step."""
    rank = int(os.environ["RANK"])

    def stop(metrics: StepMetrics) -> None:
        if rank == 1 and metrics.step == 3:
            raise ZeroDivisionError("a mistake of rank 1")

    try:
        rm.train(folder / "config.toml", on_step=stop)
    except Exception as error:
        note(folder, rank, kind=type(error).__name__, text=str(error), at=time.time())
        raise


def main(words: list[str]) -> None:
    mode, folder = words[0], Path(words[1])
    if mode == "own":
        own(folder, int(words[2]))
    else:
        {"script": script, "fail": fail}[mode](folder)


if __name__ == "__main__":
    main(sys.argv[1:])
