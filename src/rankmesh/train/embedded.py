"""Training inside a process that is not ours: a script, a notebook, a worker of Ray.

Owns what differs from a rank that we started: no argument is parsed, no signal handled, a process
group that exists is used and left standing, and an error is raised rather than ending the process.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rankmesh.comm.failure import Lifeline
from rankmesh.comm.joined import this_launch
from rankmesh.config.load import load_config
from rankmesh.config.schema import RunConfig
from rankmesh.errors import MeshError
from rankmesh.obs.metrics import StepMetrics
from rankmesh.train.result import RunResult
from rankmesh.train.session import train as train_rank


def train(
    config: str | PathLike[str] | Mapping[str, Any] | RunConfig,
    overrides: Sequence[str] = (),
    on_step: Callable[[StepMetrics], object] | None = None,
) -> RunResult:
    """See `rankmesh.train`."""
    loaded = load_config(config, overrides)
    kept = dist.is_initialized()
    launch = this_launch()
    lifeline = Lifeline(launch, socket.gethostname())
    seen: list[int] = []
    eval_losses: dict[int, float] = {}

    def listen(metrics: StepMetrics) -> None:
        seen.append(metrics.step)
        if metrics.eval_loss is not None:
            eval_losses[metrics.step] = metrics.eval_loss
        if on_step is not None:
            on_step(metrics)

    try:
        result = train_rank(loaded, launch, lifeline, listen)
        lifeline.await_all()
    except BaseException as error:
        first = lifeline.tell(error)
        if first.rank != launch.rank:
            raise MeshError(first.line) from error
        raise
    if not kept and dist.is_initialized():
        dist.destroy_process_group()
    lifeline.part()
    if result.valid_loss is not None:
        # A run without a step to train evaluates all the same.
        eval_losses.setdefault(loaded.train.steps, result.valid_loss)
    return RunResult(
        losses=result.losses,
        eval_losses=eval_losses,
        test_loss=result.test_loss,
        first_step=seen[0] if seen else loaded.train.steps + 1,
        run_dir=Path(loaded.log.run_dir),
        checkpoint=result.checkpoint,
    )
