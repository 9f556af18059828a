"""`rankmesh compare`: the first step and metric at which two runs differ.

Owns which figures belong to the training itself, and the print. It must not import torch.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rankmesh.errors import UserError
from rankmesh.obs.jsonfile import encode
from rankmesh.obs.metrics import read_metrics
from rankmesh.obs.rundir import metrics_path

# What a run is made of (times, memory, bytes) rather than what it learns. Every figure whose name
# ends in _s is a time or a rate.
IGNORED = ("format_version", "step", "attempt", "mfu", "peak_memory_bytes", "comm_bytes")
FIRST = ("loss", "grad_norm", "lr", "tokens")


@dataclass(frozen=True)
class Difference:
    """One figure of one step, in run A and in run B; None where a run has none."""

    metric: str
    a: Any
    b: Any
    relative: float


@dataclass
class Comparison:
    """Steps seen, metrics compared, the largest relative difference, and the first step that
    differs beyond the tolerance, with all its differences.
    """

    steps: int = 0
    metrics: tuple[str, ...] = ()
    largest: float = 0.0
    step: int | None = None
    differences: tuple[Difference, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.epilog = (
        "Compares every figure that both runs log for a step but times, rates, memory and bytes. "
        "Of a step that was run twice (a resume) the last one counts. Ends with 1 where the runs "
        "differ, which includes a step or a figure that only one of them has."
    )
    parser.add_argument("run_a", metavar="RUN_A", type=Path, help="a run directory")
    parser.add_argument("run_b", metavar="RUN_B", type=Path, help="another one")
    parser.add_argument(
        "--rtol",
        type=float,
        default=0.0,
        metavar="R",
        help="relative difference that counts as equal (default: 0)",
    )
    parser.add_argument("--only", nargs="+", metavar="METRIC", help="compare these figures alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Returns 0 for equal runs, 1 for others. Raises UserError where one has no metrics."""
    if not 0 <= args.rtol < math.inf:
        raise UserError(f"--rtol {args.rtol}: a number of at least 0 is needed")
    found = compare(_steps(args.run_a), _steps(args.run_b), args.rtol, args.only)
    if args.json:
        shown = {"equal": found.step is None, "steps": found.steps, "metrics": found.metrics}
        first = None
        if found.step is not None:
            rows = [asdict(one) for one in found.differences]
            first = {"step": found.step, "differences": rows}
        print(encode({**shown, "largest_relative": found.largest, "first": first}))
    else:
        print("\n".join(_lines(found, args)))
    return int(found.step is not None)


def compare(
    a: Mapping[int, Mapping[str, Any]],
    b: Mapping[int, Mapping[str, Any]],
    rtol: float,
    only: Sequence[str] | None = None,
) -> Comparison:
    """Compares two runs step by step, up to the first step that differs by more than `rtol`.

    a, b: step -> record of metrics.jsonl. Raises UserError where `only` names what neither has.
    """
    names = _names([*a.values(), *b.values()], only)
    found = Comparison(metrics=tuple(names))
    for step in sorted({*a, *b}):
        rows = [_difference(name, a.get(step, {}), b.get(step, {})) for name in names]
        found.steps += 1
        beyond = [row for row in rows if row.relative > rtol]
        found.largest = max([found.largest, *(row.relative for row in rows)])
        if beyond:
            found.step, found.differences = step, tuple(beyond)
            return found
    return found


def _steps(path: Path) -> dict[int, dict[str, Any]]:
    """step -> record; the last one of a step that was run again."""
    if not path.exists():
        raise UserError(f"{path}: no such run directory")
    file = metrics_path(path) if path.is_dir() else path
    if not file.exists():
        raise UserError(f"{path}: no run directory: it has no {file.name}")
    records = read_metrics(file)
    if not records:
        raise UserError(f"{path}: no step has been logged; there is nothing to compare")
    return {int(record["step"]): record for record in records}


def _names(records: Sequence[Mapping[str, Any]], only: Sequence[str] | None) -> list[str]:
    """The figures to compare, those that everybody knows first."""
    present = dict.fromkeys(name for record in records for name in record)
    if only is not None:
        for name in only:
            if name not in present:
                raise UserError(f"--only {name}: logged are {', '.join(present)}")
        return list(only)
    kept = [name for name in present if name not in IGNORED and not _is_time(name)]
    return [
        *(name for name in FIRST if name in kept),
        *(name for name in kept if name not in FIRST),
    ]


def _is_time(name: str) -> bool:
    return name.partition(".")[0].endswith("_s")


def _difference(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Difference:
    one, other = a.get(name), b.get(name)
    return Difference(name, one, other, _relative(one, other))


def _relative(a: Any, b: Any) -> float:
    """|a - b| of the larger one; infinite where only one is there, or is a finite number."""
    if a == b or (_is_nan(a) and _is_nan(b)):
        return 0.0
    if not (_is_number(a) and _is_number(b)) or not math.isfinite(a - b):
        return math.inf
    return float(abs(a - b) / max(abs(a), abs(b)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _lines(found: Comparison, args: argparse.Namespace) -> list[str]:
    names = ", ".join(found.metrics)
    if found.step is None:
        within = f", largest relative difference {found.largest:.1e}" if found.largest else ""
        steps = "1 step" if found.steps == 1 else f"{found.steps} steps"
        return [f"equal: {steps}, {names}{within}"]
    first = found.differences[0]
    lines = [
        f"first difference: step {found.step}, {first.metric}",
        f"  A {args.run_a}, B {args.run_b}; {found.steps - 1} steps before are equal",
        f"  {'metric':<14}{'A':>24}{'B':>24}{'relative':>10}",
    ]
    for one in found.differences:
        relative = "-" if math.isinf(one.relative) else f"{one.relative:.1e}"
        lines.append(f"  {one.metric:<14}{_shown(one.a):>24}{_shown(one.b):>24}{relative:>10}")
    return lines


def _shown(value: Any) -> str:
    return "missing" if value is None else str(value)
