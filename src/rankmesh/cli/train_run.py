"""The body of `rankmesh train`: starts the ranks, or is one of them."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from rankmesh.comm.bootstrap import run_rank
from rankmesh.comm.environ import alone, read_launch
from rankmesh.comm.failure import Lifeline
from rankmesh.config.load import load_config
from rankmesh.config.resolve import world_size_of
from rankmesh.config.schema import RunConfig
from rankmesh.errors import UserError
from rankmesh.obs.rundir import log_folder, note_failure
from rankmesh.train.build import prepare_job
from rankmesh.train.launch import launch as start_ranks
from rankmesh.train.session import open_run_dir, train


def run(args: argparse.Namespace) -> int:
    """Returns the exit code of the run."""
    launch = read_launch()
    if launch is None:
        return _start(args, load_config(args.config, args.overrides))

    def body(lifeline: Lifeline) -> int:
        train(load_config(args.config, args.overrides), launch, lifeline)
        return 0

    return run_rank(launch, body)


def _start(args: argparse.Namespace, config: RunConfig) -> int:
    """Check all that can be checked without peers, then start the ranks; a single one runs right
    here.
    """
    nproc = args.nproc if args.nproc is not None else default_ranks(config)
    if nproc < 1:
        raise UserError(f"--nproc {nproc}: a whole number of at least 1 is needed")
    prepare_job(config, nproc)
    if nproc == 1:
        train(config, alone(), Lifeline(alone(), ""))
        return 0
    # Refused here rather than by rank 0, whose start takes seconds; rank 0 takes the lock again.
    open_run_dir(config).close()
    run_dir = Path(config.log.run_dir)
    return start_ranks(
        ["train", str(args.config), *args.overrides],
        nproc,
        log_folder(run_dir),
        on_failure=lambda text: note_failure(run_dir, text),
    )


def default_ranks(config: RunConfig) -> int:
    """Ranks to start where nobody said: the plan's on CPUs, the visible GPUs elsewhere."""
    visible = torch.cuda.device_count() if config.train.device != "cpu" else 0
    return visible or world_size_of(config.parallel)
