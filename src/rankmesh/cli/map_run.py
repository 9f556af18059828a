"""The body of `rankmesh map`: who stands where in any world, and who talks to whom, without
starting a process.

Owns the tables and the JSON of the command; the facts come from `topology`. It must not import
torch.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from rankmesh.cli.map import FULL_TABLE
from rankmesh.errors import PlanError
from rankmesh.topology import (
    DENSE_AXES,
    GROUP_NAMES,
    Coordinate,
    ParallelPlan,
    block_hosts,
    coordinate,
    coordinates,
    crossing_groups,
    cyclic_hosts,
    group_of,
    group_rows,
    kv_replicas,
    mending_axes,
    mending_order,
)

# Rows shown of a table that is longer than FULL_TABLE.
FIRST_ROWS = 16
# Lists of ranks longer than this are cut in the middle.
LONG_LIST = 8
# A map lists every rank: beyond this it would only fill the memory.
MOST_RANKS = 1 << 24
EXPERT_AXES = ("etp", "ep", "edp")
EXPERT_GROUPS = (*EXPERT_AXES, "expert_shard", "expert_shard_rep")
TITLES = {"tp": "TP", "cp": "CP", "dp": "DP", "pp": "PP", "ep": "EP", "edp": "EDP"}


def run(args: argparse.Namespace) -> int:
    """Prints the map; returns 0. Raises PlanError for what does not tile or name a host."""
    if args.world_size > MOST_RANKS:
        raise PlanError(f"--world-size {args.world_size}: at most {MOST_RANKS:,} are mapped")
    plan = ParallelPlan.for_world(
        args.world_size,
        tp=args.tp, cp=args.cp, dp=args.dp, pp=args.pp, ep=args.ep, etp=args.etp,
        cp_ulysses=args.cp_ulysses, zero_group=args.zero_group, order=_order(args.order),
    )  # fmt: skip
    if args.kv_heads is not None and args.kv_heads < 1:
        raise PlanError(f"--kv-heads {args.kv_heads}: a whole number of at least 1 is needed")
    replicas = kv_replicas(plan.tp, args.kv_heads) if args.kv_heads else 1
    hosts = _hosts(args.ranks_per_host, args.placement, plan.world_size)
    if args.rank is not None:
        answer = rank_answer(plan, args.rank, hosts)
        print(json.dumps(answer) if args.json else "\n".join(rank_lines(answer)))
    elif args.json:
        print(json.dumps(map_object(plan, hosts, replicas)))
    else:
        _print_map(plan, hosts, replicas, show_all=args.all)
    return 0


def map_object(plan: ParallelPlan, hosts: Sequence[str], replicas: int = 1) -> dict[str, Any]:
    """The whole map as plain values: coordinates by rank, every group by name, hosts if known."""
    columns = {axis: values.tolist() for axis, values in coordinates(plan).items()}
    rows = zip(*columns.values(), strict=True)
    places: list[dict[str, Any]] = [
        {"rank": rank, **dict(zip(columns, row, strict=True))} for rank, row in enumerate(rows)
    ]
    for place, host in zip(places, hosts, strict=False):
        place["host"] = host
    return {
        "world_size": plan.world_size,
        "plan": {**plan.to_dict(), "edp": plan.edp},
        "coordinates": places,
        "groups": {
            name: group_rows(plan, name, kv_replicas=replicas).tolist() for name in GROUP_NAMES
        },
        "warnings": [warning] if (warning := crossing_warning(plan, hosts)) else [],
    }


def crossing_warning(plan: ParallelPlan, hosts: Sequence[str]) -> dict[str, Any] | None:
    """What to say of tp groups that cross hosts, and what mends it; None where none does."""
    crossing = crossing_groups(plan, hosts) if hosts else ()
    if not crossing:
        return None
    mending = mending_order(plan, hosts)
    axes = mending_axes(plan, hosts)
    return {
        "axis": "tp",
        "crossing": [list(group) for group in crossing],
        "of": plan.world_size // plan.tp,
        "mending_axes": None if axes is None else list(axes),
        "mending_order": list(mending.order),
        "still_crossing": [list(group) for group in mending.still_crossing],
    }


def rank_answer(plan: ParallelPlan, rank: int, hosts: Sequence[str]) -> dict[str, Any]:
    """The five answers about one rank: device, TP peers, stages, DP peers, random streams."""
    place = coordinate(plan, rank)
    stages = group_of(plan, "pp", rank)
    on_host = [peer for peer, host in enumerate(hosts) if host == hosts[rank]] if hosts else []
    return {
        "rank": rank,
        "coordinate": asdict(place),
        "host": hosts[rank] if hosts else None,
        "local_rank": on_host.index(rank) if hosts else None,
        "tp_peers": _others(group_of(plan, "tp", rank), rank),
        "stage": place.pp,
        "previous_stage": stages[place.pp - 1] if place.pp else None,
        "next_stage": stages[place.pp + 1] if place.pp + 1 < plan.pp else None,
        "dp_peers": _others(group_of(plan, "dp", rank), rank),
        "random_shared": {
            "initial_values": _others(group_of(plan, "dp_cp", rank), rank),
            "dropout": _others(group_of(plan, "tp", rank), rank),
        },
    }


def rank_lines(answer: dict[str, Any]) -> list[str]:
    """`rank_answer` as the five lines that a person reads."""
    place, shared = answer["coordinate"], answer["random_shared"]
    local = answer["local_rank"]
    device = (
        "its LOCAL_RANK's GPU, or the CPU (--ranks-per-host shows which)"
        if local is None
        else f"cuda:{local} of {answer['host']}, or its CPU (local rank {local})"
    )
    neighbours = " and ".join(
        f"{word} {'none' if peer is None else f'rank {peer}'}"
        for word, peer in (
            ("previous", answer["previous_stage"]),
            ("next", answer["next_stage"]),
        )
    )
    return [
        f"device    {device}",
        f"tp peers  {_peers(answer['tp_peers'])} (tp rank {place['tp']})",
        f"stages    {neighbours} (this is stage {answer['stage']})",
        f"dp peers  {_peers(answer['dp_peers'])} (dp rank {place['dp']})",
        f"random    shared: initial values with {_peers(shared['initial_values'])}, dropout masks "
        f"with {_peers(shared['dropout'])}; private: its own slice of the weights (against tp and "
        "pp), its own samples (against dp)",
    ]


def _has_experts(plan: ParallelPlan) -> bool:
    """Whether the expert view is worth showing."""
    return plan.ep * plan.etp > 1


def _order(text: str | None) -> tuple[str, ...]:
    """Axis names from "tp,cp,dp,pp" or "tp-cp-dp-pp"; the usual order where none is given."""
    if text is None:
        return DENSE_AXES
    return tuple(word for word in re.split(r"[\s,-]+", text) if word)


def _hosts(text: str | None, placement: str, world_size: int) -> tuple[str, ...]:
    """Host of each rank, or () where nothing was said about hosts."""
    if text is None:
        return ()
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise PlanError(f"--ranks-per-host {text!r}: whole numbers of at least 1 are needed")
    counts = [int(word) for word in words]
    if len(counts) == 1:
        whole, rest = divmod(world_size, counts[0])
        counts = [counts[0]] * whole + [rest] * bool(rest)
    if sum(counts) != world_size:
        raise PlanError(
            f"--ranks-per-host {text}: the hosts hold {sum(counts)} ranks, --world-size is "
            f"{world_size}"
        )
    return block_hosts(counts) if placement == "block" else cyclic_hosts(counts)


def _others(group: Sequence[int], rank: int) -> list[int]:
    return [peer for peer in group if peer != rank]


def _peers(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_short(ranks)}" if ranks else "no rank"


def _short(ranks: Sequence[int]) -> str:
    """[0,1,2,3], cut in the middle when long."""
    if len(ranks) <= LONG_LIST:
        return f"[{','.join(map(str, ranks))}]"
    return f"[{','.join(map(str, ranks[:3]))},...,{ranks[-1]}]"


def _print_map(plan: ParallelPlan, hosts: Sequence[str], replicas: int, *, show_all: bool) -> None:
    # Redirected output has no width of its own, and tables must not be wrapped for it.
    width = None if sys.stdout.isatty() else 200
    console = Console(width=width, highlight=False, markup=False)
    sizes = " x ".join(f"{axis} {plan.size(axis)}" for axis in DENSE_AXES)
    console.print(
        f"{plan.world_size} ranks = {sizes}; order, fastest first: {', '.join(plan.order)}"
    )
    if _has_experts(plan):
        sizes = " x ".join(f"{axis} {plan.size(axis)}" for axis in EXPERT_AXES)
        console.print(f"expert view of a stage's {plan.size('stage')} ranks = {sizes}")
    console.print(_rank_table(plan, hosts, show_all=show_all))
    console.print(_group_table(plan, hosts, replicas))
    for line in warning_lines(plan, hosts):
        console.print(line, soft_wrap=True)


def _rank_table(plan: ParallelPlan, hosts: Sequence[str], *, show_all: bool) -> Table:
    """A row a rank: coordinate, and its group along each axis that is split."""
    expert = _has_experts(plan)
    axes = [f.name for f in fields(Coordinate) if f.name in DENSE_AXES or expert]
    split = [axis for axis in TITLES if plan.size(axis) > 1 and (axis in DENSE_AXES or expert)]
    shown = plan.world_size if show_all or plan.world_size <= FULL_TABLE else FIRST_ROWS
    rest = plan.world_size - shown
    caption = f"{rest:,} more ranks; --all shows them, --rank R one of them" if rest else None
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    for title in ("rank", *(["host"] if hosts else []), *axes):
        table.add_column(title, justify="left" if title == "host" else "right")
    for axis in split:
        table.add_column(f"{TITLES[axis]} group")
    for rank in range(shown):
        place = asdict(coordinate(plan, rank))
        host = [hosts[rank]] if hosts else []
        lists = [_short(group_of(plan, axis, rank)) for axis in split]
        table.add_row(str(rank), *host, *(str(place[axis]) for axis in axes), *lists)
    return table


def _group_table(plan: ParallelPlan, hosts: Sequence[str], replicas: int) -> Table:
    """A row for each kind of group with several ranks; names with the same groups share one."""
    names: dict[bytes, list[str]] = {}
    rows = {}
    for name in GROUP_NAMES:
        groups = group_rows(plan, name, kv_replicas=replicas)
        if groups.shape[1] > 1 and (_has_experts(plan) or name not in EXPERT_GROUPS):
            key = groups.tobytes() + bytes(str(groups.shape), "ascii")
            names.setdefault(key, []).append(name)
            rows[key] = groups
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("groups")
    for title in ("number", "ranks each", *(["across hosts"] if hosts else [])):
        table.add_column(title, justify="right")
    table.add_column("first")
    for key, groups in rows.items():
        name = names[key][0]
        across = []
        if hosts:
            across = [str(len(crossing_groups(plan, hosts, name, kv_replicas=replicas)))]
        table.add_row(
            ", ".join(names[key]),
            str(len(groups)),
            str(groups.shape[1]),
            *across,
            _short(groups[0].tolist()),
        )
    return table


def warning_lines(plan: ParallelPlan, hosts: Sequence[str]) -> list[str]:
    """`crossing_warning` as lines for a person; none where all is well."""
    warning = crossing_warning(plan, hosts)
    if warning is None:
        return []
    shown = ", ".join(
        f"{_short(group)} on {'+'.join(dict.fromkeys(hosts[rank] for rank in group))}"
        for group in warning["crossing"][:4]
    )
    more = ", ..." if len(warning["crossing"]) > 4 else ""
    count = f"{len(warning['crossing'])} of {warning['of']}"
    lines = [f"warning: {count} tp groups cross hosts: {shown}{more}"]
    if warning["mending_axes"]:
        lines.append(
            f"  mended by another order of the axes: --order {','.join(warning['mending_axes'])}"
        )
    order, still = warning["mending_order"], len(warning["still_crossing"])
    if still < len(warning["crossing"]):
        anew = "mended by numbering the processes anew, today's ranks in the order"
        end = f"; {still} tp group(s) still cross: hosts lack the ranks" if still else ""
        lines.append(f"  {anew} {_short_order(order)}{end}")
    elif not warning["mending_axes"]:
        lines.append("  no order mends it: no host has room for another whole tp group")
    return lines


def _short_order(order: Sequence[int]) -> str:
    head = " ".join(map(str, order[:32]))
    return head if len(order) <= 32 else f"{head} ... (whole with --json)"
