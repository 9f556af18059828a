"""The body of `rankmesh trace`: ranks merged into one file, a step drawn, its bubble compared.

Owns which steps are compared with which, and what is printed; times come from `report`, pictures
from `schedule`. It must not import torch.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from rankmesh.config.load import load_config
from rankmesh.errors import PlanError, UserError
from rankmesh.obs.jsonfile import write_text
from rankmesh.obs.rundir import read_launches
from rankmesh.obs.tracefile import (
    RankTrace,
    chrome_text,
    read_trace,
    trace_files,
    trace_folder,
)
from rankmesh.obs.tracemerge import aligned
from rankmesh.report.timeline import costs_of, measured, order_of, simulated
from rankmesh.schedule import Timeline, check_schedule, draw_svg, draw_text
from rankmesh.theory.bubble import textbook_bubble
from rankmesh.topology.plan import ParallelPlan
from rankmesh.topology.ranks import coordinate, rank_of

# Output that no terminal shows has this width.
PLAIN_WIDTH = 100


@dataclass(frozen=True)
class Attempt:
    """The traces of one launch on one clock, by rank; missing: ranks that left none. schedule: by
    name, or the file of the user's own.
    """

    number: int
    plan: ParallelPlan
    schedule: str
    traces: Mapping[int, RankTrace]
    missing: tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """Timelines of the compared steps, measured and simulated; costs_from: the steps whose times
    the simulation took, where there are any before those compared.
    """

    measured: Mapping[int, Timeline]
    simulated: Mapping[int, Timeline]
    costs_from: tuple[int, ...]
    textbook: float | None

    @property
    def drawn(self) -> int:
        """The step whose bubble is the median; of an even number the lower one."""
        order = sorted(self.measured, key=lambda step: self.measured[step].bubble)
        return order[(len(order) - 1) // 2]


def run(args: argparse.Namespace) -> int:
    """Returns 0. Raises UserError for what was not traced."""
    attempt = load_attempt(args.run_dir, args.attempt)
    replica = _replica(attempt, {axis: getattr(args, axis) for axis in ("dp", "tp", "cp")})
    chosen = _chosen(args, _common_steps(replica))
    found = compare(replica, attempt, chosen)
    merged = _merge(args.run_dir, attempt)
    plan, step = attempt.plan, found.drawn
    drawn = found.measured[step]
    title = (
        f"step {step}, {attempt.schedule}: {plan.pp} pipeline ranks, {plan.num_chunks} chunk(s) "
        f"each, {_microbatches(drawn)} microbatches, {drawn.makespan:.1f} ms"
    )
    if args.svg is not None:
        _write_svg(args.svg, draw_svg(drawn, title=f"{title} (times in ms)"))
    if args.json:
        print(json.dumps(_object(attempt, found, merged)))
    else:
        _print(title, attempt, found, merged)
    return 0


def bubble_line(run_dir: Path) -> str:
    """The bubble of the later half of the traced steps, in a line: measured, simulated from the
    earlier half, and as textbooks have it. Raises UserError for what was not traced.
    """
    attempt = load_attempt(run_dir, None)
    replica = _replica(attempt, dict.fromkeys(("dp", "tp", "cp"), 0))
    steps = _common_steps(replica)
    found = compare(replica, attempt, steps[len(steps) // 2 :])
    shown = []
    for name, timelines in (("measured", found.measured), ("simulated", found.simulated)):
        if figures := _spread(timelines):
            least, most = figures["least"], figures["most"]
            shown.append(f"{name} {figures['median']:.3f} ({least:.3f} to {most:.3f})")
    if found.textbook is not None:
        shown.append(f"textbook {found.textbook:.3f}")
    return f"bubble, {attempt.schedule}: {', '.join(shown)}"


def load_attempt(run_dir: Path, number: int | None) -> Attempt:
    """Every trace of an attempt, the newest traced one by default. Raises UserError."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such run directory")
    files = trace_files(run_dir)
    number = max(files) if number is None else number
    if number not in files:
        raise UserError(f"--attempt {number}: traced are {', '.join(map(str, sorted(files)))}")
    launches = {launch["attempt"]: launch for launch in read_launches(run_dir)}
    if number not in launches:
        raise UserError(f"{run_dir / 'ranks.json'}: has no attempt {number}")
    launch = launches[number]
    plan = ParallelPlan(**launch["plan"])
    traces = [read_trace(path) for rank, path in files[number].items() if rank < plan.world_size]
    hosts = {place["rank"]: place["host"] for place in launch["ranks"]}
    found = {trace.rank: trace for trace in aligned(traces, hosts)}
    missing = tuple(rank for rank in range(plan.world_size) if rank not in found)
    return Attempt(number, plan, _schedule(run_dir / launch["config"], plan), found, missing)


def _schedule(config: Path, plan: ParallelPlan) -> str:
    """What a launch ran, by its config; a folder without one was made by hand."""
    own = load_config(config).parallel.schedule_file if config.exists() else None
    return plan.schedule if own is None else own


def compare(replica: Sequence[RankTrace], attempt: Attempt, chosen: Sequence[int]) -> Comparison:
    """The chosen steps, measured and simulated from all the steps traced before them. replica: its
    pipeline ranks in order.
    """
    earlier = tuple(step for step in _common_steps(replica) if step < chosen[0])
    timelines = {step: _measured(replica, attempt.plan, step) for step in chosen}
    simulations = {}
    if earlier:
        costs = costs_of([_measured(replica, attempt.plan, step) for step in earlier])
        simulations = {step: simulated(found, costs) for step, found in timelines.items()}
    microbatches = _microbatches(timelines[chosen[0]])
    plan = attempt.plan
    textbook = textbook_bubble(attempt.schedule, plan.pp, plan.num_chunks, microbatches)
    return Comparison(timelines, simulations, earlier, textbook)


def _measured(replica: Sequence[RankTrace], plan: ParallelPlan, step: int) -> Timeline:
    """The timeline of a step, whose actions must make a schedule of the plan."""
    timeline = measured(replica, step)
    try:
        check_schedule(order_of(timeline), plan.num_stages, _microbatches(timeline))
    except PlanError as error:
        raise UserError(f"step {step}: what was traced is no schedule: {error}") from None
    return timeline


def _common_steps(replica: Sequence[RankTrace]) -> list[int]:
    """Steps that all ranks recorded, ascending."""
    return sorted(set.intersection(*(set(trace.steps) for trace in replica)))


def _microbatches(timeline: Timeline) -> int:
    return 1 + max(span.microbatch for spans in timeline.ranks for span in spans)


def _replica(attempt: Attempt, place: Mapping[str, int]) -> list[RankTrace]:
    """The pipeline ranks at the dp, tp and cp that was asked for."""
    plan = attempt.plan
    for axis, index in place.items():
        if not 0 <= index < plan.size(axis):
            raise PlanError(f"--{axis} {index}: allowed are 0 to {plan.size(axis) - 1}")
    ranks = [rank_of(plan, pp=pp, **place) for pp in range(plan.pp)]
    for rank in ranks:
        if rank in attempt.missing:
            raise UserError(f"attempt {attempt.number}: rank {rank} left no trace")
    return [attempt.traces[rank] for rank in ranks]


def _chosen(args: argparse.Namespace, steps: Sequence[int]) -> list[int]:
    """The steps to compare, of those that were traced."""
    if not steps:
        raise UserError(f"{args.run_dir}: no step was traced on all ranks")
    if args.step is None and args.steps is None:
        return list(steps[len(steps) // 2 :])
    option = f"--step {args.step}" if args.steps is None else f"--steps {args.steps}"
    bounds = re.fullmatch(r"(\d+):(\d+)", args.steps or f"{args.step}:{args.step}")
    if bounds is None:
        raise UserError(f"{option}: two step numbers A:B are needed")
    first, last = int(bounds[1]), int(bounds[2])
    chosen = [step for step in steps if first <= step <= last]
    if not chosen:
        raise UserError(f"{option}: not traced; traced are steps {_numbers(steps)}")
    return chosen


def _numbers(steps: Sequence[int]) -> str:
    """`5`, `3 to 22`, or `3 to 22 (18 of them)` where some between are missing."""
    if len(steps) == 1:
        return str(steps[0])
    whole = len(steps) == steps[-1] - steps[0] + 1
    return f"{steps[0]} to {steps[-1]}" + ("" if whole else f" ({len(steps)} of them)")


def _merge(run_dir: Path, attempt: Attempt) -> Path:
    """Write merged.json."""
    names = {}
    for rank in attempt.traces:
        place = coordinate(attempt.plan, rank)
        where = " ".join(
            f"{axis} {getattr(place, axis)}"
            for axis in attempt.plan.order
            if attempt.plan.size(axis) > 1
        )
        names[rank] = f"rank {rank}" + (f" ({where})" if where else "")
    path = trace_folder(run_dir) / "merged.json"
    write_text(path, chrome_text({"attempt": attempt.number}, attempt.traces.values(), names))
    return path


def _write_svg(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="ascii", errors="xmlcharrefreplace")
    except OSError as error:
        raise UserError(f"--svg {path} cannot be written: {error.strerror}") from None


def _spread(timelines: Mapping[int, Timeline]) -> dict[str, float] | None:
    """Median, least and most bubble over steps; None of none."""
    bubbles = [timeline.bubble for timeline in timelines.values()]
    if not bubbles:
        return None
    return {"median": median(bubbles), "least": min(bubbles), "most": max(bubbles)}


def _object(attempt: Attempt, found: Comparison, merged: Path) -> dict[str, Any]:
    return {
        "attempt": attempt.number,
        "schedule": attempt.schedule,
        "plan": attempt.plan.to_dict(),
        "steps": list(found.measured),
        "costs_from": list(found.costs_from),
        "bubble": {
            "measured": _spread(found.measured),
            "simulated": _spread(found.simulated),
            "textbook": found.textbook,
        },
        "by_step": {step: timeline.bubble for step, timeline in found.measured.items()},
        "step": found.drawn,
        "timeline_ms": found.measured[found.drawn].to_dict(),
        "missing_ranks": list(attempt.missing),
        "merged": str(merged),
    }


def _print(title: str, attempt: Attempt, found: Comparison, merged: Path) -> None:
    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else PLAIN_WIDTH, highlight=False, markup=False)
    console.print(f"{title}; rows are pipeline ranks, idle time shows as dashes\n", soft_wrap=True)
    console.print(draw_text(found.measured[found.drawn], console.width), soft_wrap=True)
    console.print(_table(found))
    if found.costs_from:
        steps = "step" if len(found.costs_from) == 1 else "steps"
        console.print(f"simulated: from times of {steps} {_numbers(found.costs_from)}")
    else:
        console.print(f"simulated: needs a traced step before step {min(found.measured)}")
    if attempt.missing:
        console.print(f"left no trace: ranks {', '.join(map(str, attempt.missing))}")
    console.print(f"all ranks, for ui.perfetto.dev: {merged}", soft_wrap=True)


def _table(found: Comparison) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("bubble")
    for column in ("steps", "median", "least", "most"):
        table.add_column(column, justify="right")
    for name, timelines in (("measured", found.measured), ("simulated", found.simulated)):
        figures = _spread(timelines) or {}
        cells = [f"{figures[key]:.4f}" if figures else "-" for key in ("median", "least", "most")]
        table.add_row(name, _numbers(list(timelines)) if timelines else "-", *cells)
    textbook = "-" if found.textbook is None else f"{found.textbook:.4f}"
    table.add_row("textbook", "-", textbook, "", "")
    return table
