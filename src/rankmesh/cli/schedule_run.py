"""The body of `rankmesh schedule`: a pipeline schedule checked, timed and drawn.

Owns what is printed; orders, figures and pictures come from `schedule`. It must not import torch.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rankmesh.errors import PlanError, UserError
from rankmesh.schedule import (
    CHUNKS,
    IDLE,
    Costs,
    Schedule,
    Timeline,
    build_schedule,
    check_schedule,
    draw_svg,
    draw_text,
    read_schedule,
    simulate,
    with_communication,
)

# Each stage and microbatch has up to three actions: more than this would only fill memory.
MOST = 1 << 17
# The other schedules stand beside it up to here: building all of them takes some seconds.
COMPARED = 1 << 13
# No cost is smaller; a share of one may be.
LEAST_COST = 1e-100
# Output that no terminal shows has this width.
PLAIN_WIDTH = 100
STYLES = {"F": "black on bright_blue", "B": "black on green", "I": "black on yellow",
          "W": "black on magenta"}  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Prints the schedule; returns 0. Raises PlanError for what cannot be."""
    costs = _costs(args.costs)
    if args.file is None:
        name = args.schedule or "1f1b"
        schedule = _built(args, name, costs)
    else:
        name, schedule = args.file, _read(args)
    stages, microbatches = _size(schedule)
    # As it is, with the communication that a file may have brought, and with ours.
    check_schedule(schedule, stages, microbatches)
    check_schedule(with_communication(schedule), stages, microbatches)
    timeline = simulate(schedule, costs)
    held = max(timeline.peak_held)
    if args.memory is not None and not held <= args.memory:
        raise PlanError(f"{name} holds {held} activations on a rank, --memory is {args.memory:g}")
    chunks = -(-stages // len(schedule))
    title = f"{name}: {len(schedule)} ranks, {chunks} chunk(s) each, {microbatches} microbatches"
    if args.svg is not None:
        _write(args.svg, draw_svg(timeline, title=title))
    if args.json:
        print(json.dumps({"schedule": name, **timeline.to_dict()}))
    else:
        _print(title, name, timeline, costs, (len(schedule), chunks, microbatches))
    return 0


def _costs(text: str) -> Costs:
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (3, 4):
        raise PlanError(f"--costs {text!r}: three or four numbers are needed, F,I,W or F,I,W,SEND")
    return Costs(*numbers)


def _built(args: argparse.Namespace, name: str, costs: Costs) -> Schedule:
    for option in ("pp", "microbatches"):
        if getattr(args, option) is None:
            raise PlanError(f"--{option} is needed, a whole number of at least 1 (or --file FILE)")
    chunks = args.chunks if args.chunks is not None else CHUNKS[name] or 2
    if args.pp * chunks * args.microbatches > MOST:
        raise PlanError(
            f"--pp {args.pp} * --chunks {chunks} * --microbatches {args.microbatches}: at most "
            f"{MOST:,} are drawn"
        )
    return build_schedule(name, args.pp, chunks, args.microbatches, costs, args.memory)


def _read(args: argparse.Namespace) -> Schedule:
    if args.schedule is not None:
        raise PlanError(f"--schedule {args.schedule} and --file {args.file}: one of them is needed")
    schedule = read_schedule(args.file)
    stages, microbatches = _size(schedule)
    if stages * microbatches > MOST:
        raise PlanError(
            f"{args.file}: {stages} stages * {microbatches} microbatches; at most {MOST:,} are "
            "drawn"
        )
    ranks = len(schedule)
    given = {"pp": ranks, "microbatches": microbatches, "chunks": -(-stages // ranks)}
    for option, found in given.items():
        asked = getattr(args, option)
        if asked not in (None, found):
            raise PlanError(f"{args.file}: --{option} {asked}, but the file has {found}")
    return schedule


def _size(schedule: Schedule) -> tuple[int, int]:
    """Stages and microbatches of a schedule, as the numbers in it say."""
    actions = [action for rank in schedule for action in rank]
    return 1 + max(a.stage for a in actions), 1 + max(a.microbatch for a in actions)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="ascii", errors="xmlcharrefreplace")
    except OSError as error:
        raise UserError(f"--svg {path} cannot be written: {error.strerror}") from None


def _print(
    title: str, name: str, timeline: Timeline, costs: Costs, size: tuple[int, int, int]
) -> None:
    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else PLAIN_WIDTH, highlight=False, markup=False)
    console.print(title, soft_wrap=True)
    console.print(
        f"costs: F {costs.f:g}, I {costs.i:g}, W {costs.w:g}, transfer {costs.send:g}; idle "
        "time shows as dashes\n",
        soft_wrap=True,
    )
    for line in draw_text(timeline, console.width).splitlines():
        console.print(_coloured(line) if terminal else line, soft_wrap=True)
    console.print(_rank_table(timeline))
    # Figures cut to "0..." would say nothing: a narrow terminal breaks the lines instead.
    wide = Console(width=max(console.width, PLAIN_WIDTH), highlight=False, markup=False)
    wide.print(_comparison(name, timeline, costs, size))
    console.print(
        "bubble: idle share of the makespan, all ranks (what a step pays); bubble_stage: of the "
        "longest rank's own window;\nbubble_over_ideal: (makespan - work) / work; live, live w: "
        "the largest peaks of a rank, in whole microbatches",
        soft_wrap=True,
    )


def _coloured(line: str) -> Text:
    """A line of `draw_text` with each action on the colour of its kind."""
    row = re.sub(r"^rank \d+ +", "", line)
    text = Text(line.removesuffix(row))
    for piece in re.findall(rf"{IDLE}+|[^{IDLE}][^a-zA-Z~{IDLE}]*", row):
        text.append(piece, STYLES.get(piece[0].upper(), "dim"))
    return text


def _rank_table(timeline: Timeline) -> Table:
    """Live activations of one chunk, a row a rank."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("rank", "peak_live (F to B or I)", "peak_live_w (I to W)"):
        table.add_column(column, justify="right")
    for rank, figures in enumerate(zip(timeline.peak_live, timeline.peak_live_w, strict=True)):
        table.add_row(str(rank), *map(str, figures))
    return table


def _comparison(name: str, timeline: Timeline, costs: Costs, size: tuple[int, int, int]) -> Table:
    """The three figures of this schedule and of the others, a rank having the same work in each.

    Times are in the unit of `costs`; where chunks differ, a stage costs in proportion.
    """
    ranks, chunks, microbatches = size
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("schedule")
    for column in (
        "chunks", "bubble", "bubble_stage", "bubble_over_ideal", "makespan", "live", "live w",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    _add(table, f"{Path(name).name} *", chunks, timeline)
    small = ranks * chunks * microbatches <= COMPARED
    for other, fixed in CHUNKS.items():
        if other == name or not small:
            continue
        count = fixed or max(chunks, 2)
        share = chunks / count
        f, i, w = (max(cost * share, LEAST_COST) for cost in (costs.f, costs.i, costs.w))
        scaled = Costs(f, i, w, costs.send)
        schedule = build_schedule(other, ranks, count, microbatches)
        _add(table, other, count, simulate(schedule, scaled))
    return table


def _add(table: Table, name: str, chunks: int, timeline: Timeline) -> None:
    figures = (timeline.bubble, timeline.bubble_stage, timeline.bubble_over_ideal)
    live, live_w = max(timeline.peak_live) / chunks, max(timeline.peak_live_w) / chunks
    table.add_row(
        name, str(chunks), *(f"{figure:.4f}" for figure in figures), f"{timeline.makespan:g}",
        f"{live:g}", f"{live_w:g}",
    )  # fmt: skip
