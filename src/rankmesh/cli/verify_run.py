"""The body of `rankmesh verify`: starts the ranks, or is one of them, and prints the table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from rankmesh.cli.train_run import default_ranks
from rankmesh.cli.verification import LIMITS, Difference, merge, verify
from rankmesh.comm.bootstrap import run_rank, start
from rankmesh.comm.environ import Launch, alone, read_launch
from rankmesh.comm.exchange import consult
from rankmesh.comm.failure import Lifeline
from rankmesh.config.load import load_config
from rankmesh.config.schema import RunConfig
from rankmesh.errors import RankmeshError, UserError
from rankmesh.train.build import prepare_job
from rankmesh.train.launch import launch as start_ranks
from rankmesh.train.run import assemble
from rankmesh.train.session import start_options

_PATIENCE_S = 3600.0


def run(args: argparse.Namespace) -> int:
    """Returns 0 where the mesh computes what one process computes."""
    if args.steps < 1:
        raise UserError(f"--steps {args.steps}: a whole number of at least 1 is needed")
    config = _exact(load_config(args.config, args.overrides), args.own_dtype)
    launch = read_launch()
    if launch is not None:
        return run_rank(launch, lambda lifeline: _rank(args, config, launch, lifeline))
    nproc = args.nproc if args.nproc is not None else default_ranks(config)
    if nproc < 1:
        raise UserError(f"--nproc {nproc}: a whole number of at least 1 is needed")
    prepare_job(config, nproc)
    if nproc == 1:
        return _rank(args, config, alone(), Lifeline(alone(), ""))
    words = ["verify", str(args.config), *args.overrides, "--steps", str(args.steps)]
    words += ["--own-dtype"] if args.own_dtype else []
    return start_ranks([*words, *(["--json"] if args.json else [])], nproc, announce=not args.json)


def _exact(config: RunConfig, own_dtype: bool) -> RunConfig:
    """The config in fp64. In fp32 Adam turns the rounding of a gradient near zero into a whole
    step, unless eps is well above that rounding.
    """
    # Both sides start afresh: the single process knows no optimizer state of ours.
    config = replace(config, train=replace(config.train, resume="no"))
    if not own_dtype:
        return replace(config, train=replace(config.train, dtype="fp64"))
    if config.train.dtype not in LIMITS:
        # Where rounding is as large as an update, no difference says anything.
        raise UserError(
            f"--own-dtype: train.dtype is {config.train.dtype}; allowed: {', '.join(LIMITS)}"
        )
    return replace(config, optimizer=replace(config.optimizer, eps=max(config.optimizer.eps, 1e-4)))


def _rank(args: argparse.Namespace, config: RunConfig, launch: Launch, lifeline: Lifeline) -> int:
    job = prepare_job(config, launch.world_size)
    startup = start(job.plan, launch, lifeline=lifeline, options=start_options(job))
    mine = verify(assemble(config, job.spec, startup.mesh, job.source), job, args.steps)

    def judge(records: Mapping[int, Any], absent: Sequence[int]) -> list[dict[str, Any]]:
        per_rank = [[Difference(**row) for row in rows] for rows in records.values()]
        return [asdict(row) for row in merge(per_rank)]

    verdict = consult(
        startup.store,
        "verify",
        rank=launch.rank,
        world_size=launch.world_size,
        record=[asdict(row) for row in mine],
        judge=judge,
        limit_s=_PATIENCE_S,
    )
    rows = [Difference(**row) for row in verdict]
    if launch.rank == 0:
        _show(rows, args, launch.world_size)
    wrong = [row for row in rows if not row.fine]
    if wrong:
        worst = max(wrong, key=lambda row: row.relative)
        raise RankmeshError(
            f"verify: the mesh differs from one process: {worst.quantity} of {worst.where} by "
            f"{worst.relative:.1e}, allowed {worst.limit:.0e}"
        )
    return 0


def _show(rows: Sequence[Difference], args: argparse.Namespace, world_size: int) -> None:
    if args.json:
        print(
            json.dumps(
                {
                    "steps": args.steps,
                    "world_size": world_size,
                    "differences": [asdict(r) for r in rows],
                }
            )
        )
        return
    table = Table(title=f"{args.steps} steps on {world_size} ranks against one process")
    for heading in ("quantity", "largest relative difference", "allowed", "at"):
        table.add_column(heading)
    for row in rows:
        style = "" if row.fine else "bold red"
        table.add_row(
            row.quantity, f"{row.relative:.1e}", f"{row.limit:.0e}", row.where, style=style
        )
    Console().print(table)
