"""The body of `rankmesh eval`: starts the ranks, or is one of them, and prints the scores.

Owns the order and the print. What a score is, is said in evaluation.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rankmesh.checkpoint.source import WeightSource, open_weights
from rankmesh.cli.eval import AXES
from rankmesh.cli.evaluation import Score, TokenSet, evaluate_set, open_set
from rankmesh.comm.bootstrap import Options, run_rank, start
from rankmesh.comm.environ import Launch, alone, read_launch
from rankmesh.comm.failure import Lifeline
from rankmesh.comm.identity import digest
from rankmesh.config.schema import OptimizerConfig, RunConfig, TrainConfig
from rankmesh.data.agree import check_same_tokenizer, named, of_files
from rankmesh.errors import UserError
from rankmesh.obs.jsonfile import encode
from rankmesh.specs.placement import kv_replicas, param_table
from rankmesh.topology.params import ParamSpec, Slices
from rankmesh.topology.plan import ParallelPlan
from rankmesh.topology.release import check_release
from rankmesh.train.launch import launch as start_ranks
from rankmesh.train.run import assemble

_LONGEST = 2048


@dataclass(frozen=True)
class Ready:
    """A checked evaluation of one world: what is left needs peers."""

    weights: WeightSource
    plan: ParallelPlan
    sets: tuple[TokenSet, ...]


def run(args: argparse.Namespace) -> int:
    """Prints the scores; returns 0. Raises UserError for weights, data or a mesh in error."""
    launch = read_launch()
    if launch is not None:
        return run_rank(launch, partial(_rank, args, launch))
    nproc = args.nproc if args.nproc is not None else _default_ranks(args)
    if nproc < 1:
        raise UserError(f"--nproc {nproc}: a whole number of at least 1 is needed")
    if nproc == 1:
        return _rank(args, alone(), Lifeline(alone(), ""))
    _ready(args, nproc)
    return start_ranks(["eval", *_words(args)], nproc, announce=not args.json)


def _default_ranks(args: argparse.Namespace) -> int:
    visible = torch.cuda.device_count() if args.device != "cpu" else 0
    return visible or args.tp * args.cp * args.pp * (args.dp or 1)


def _words(args: argparse.Namespace) -> list[str]:
    """The command line that these arguments stand for."""
    words = [str(args.checkpoint)]
    for name in (*AXES, "seq_len", "samples", "microbatch_size", "dtype", "device"):
        if getattr(args, name) is not None:
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    words += ["--any-tokenizer"] if args.any_tokenizer else []
    return [*words, *(["--json"] if args.json else []), "--data", *args.data]


def _ready(args: argparse.Namespace, world_size: int) -> Ready:
    for name in ("seq_len", "samples", "microbatch_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} {value}: a whole number of at least 1 is needed")
    weights = open_weights(args.checkpoint)
    spec = weights.spec
    plan = ParallelPlan.for_world(world_size, **{axis: getattr(args, axis) for axis in AXES})
    check_release(plan)
    param_table(spec, plan)
    seq_len = args.seq_len if args.seq_len is not None else min(spec.max_seq_len, _LONGEST)
    if seq_len > spec.max_seq_len:
        raise UserError(f"--seq-len {seq_len}: the model takes at most {spec.max_seq_len}")
    sets = [open_set(prefix, seq_len, spec.vocab_size, args.samples) for prefix in args.data]
    if not args.any_tokenizer:
        found = named(str(weights.folder), weights.tokenizer)
        remedy = "where that is meant, give --any-tokenizer"
        check_same_tokenizer([*found, *of_files(part.file for part in sets)], remedy)
    return Ready(weights, plan, tuple(sets))


def _rank(args: argparse.Namespace, launch: Launch, lifeline: Lifeline) -> int:
    ready = _ready(args, launch.world_size)
    weights, plan, spec = ready.weights, ready.plan, ready.weights.spec
    seen = [spec.to_dict(), [part.file.num_tokens for part in ready.sets]]
    options = Options(
        device=args.device,
        agree={"options": digest(_words(args)), "files": digest(seen)},
        kv_replicas=kv_replicas(spec, plan),
        tied_embeddings=spec.tie_embeddings,
    )
    startup = start(plan, launch, lifeline=lifeline, options=options)

    def loaded(param: ParamSpec, slices: Slices) -> Tensor:
        return weights.slice(param.name, slices)

    config = RunConfig(
        # No state of an optimizer is kept for an evaluation.
        optimizer=OptimizerConfig(name="sgd", min_lr=0.0),
        train=TrainConfig(
            global_batch_size=args.microbatch_size * plan.dp,
            microbatch_size=args.microbatch_size,
            dtype=args.dtype,
        ),
    )
    whole = assemble(config, spec, startup.mesh, loaded)
    scores = [evaluate_set(whole, part) for part in ready.sets]
    if launch.rank == 0:
        _show(args, ready, scores)
    return 0


def _show(args: argparse.Namespace, ready: Ready, scores: Sequence[Score]) -> None:
    step = ready.weights.step
    if args.json:
        rows: list[dict[str, Any]] = [
            {**asdict(one), "perplexity": one.perplexity, "bits_per_byte": one.bits_per_byte}
            for one in scores
        ]
        found = {"checkpoint": str(ready.weights.folder), "step": step, "sets": rows}
        found |= {"seq_len": ready.sets[0].seq_len, "world_size": ready.plan.world_size}
        print(encode(found))
        return
    ranks = "1 rank" if ready.plan.world_size == 1 else f"{ready.plan.world_size} ranks"
    # Folders of Hugging Face say nothing of steps.
    made = f", step {step}" if step else ""
    table = Table(title=f"{ready.weights.folder}{made}, {ranks}")
    for heading in ("data", "targets", "loss", "perplexity", "bits/byte"):
        table.add_column(heading, justify="left" if heading == "data" else "right")
    for one in scores:
        bits = "-" if one.bits_per_byte is None else f"{one.bits_per_byte:.4f}"
        perplexity = f"{one.perplexity:,.2f}"
        table.add_row(one.data, f"{one.targets:,}", f"{one.loss:.4f}", perplexity, bits)
    Console().print(table)
