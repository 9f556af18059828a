"""`python -m tests.prove`: runs the suite with full counts and writes docs/proof.md, dated.

Owns that page. It must not know any test: what a test wants on the page it records with pytest's
`record_property("largest_difference", x)`.
"""

import argparse
import os
import platform
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rankmesh.version import describe
from tests import budgets

PAGE = budgets.TESTS.parent / "docs" / "proof.md"
RECORDED = "largest_difference"


@dataclass
class Tally:
    """A pytest plugin: what passed, failed and was skipped on each rung, and what was recorded."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    differences: list[tuple[float, str]] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a test once: its call, or the set-up or teardown that did not pass."""
        if report.when != "call" and report.passed:
            return
        rung = report.nodeid.split("/")[1]
        self.outcomes.setdefault(rung, Counter())[report.outcome] += 1
        self.differences += [
            (float(str(value)), report.nodeid)
            for name, value in report.user_properties
            if name == RECORDED
        ]


def _table(tally: Tally) -> list[str]:
    lines = ["| rung | passed | failed | skipped |", "|---|---|---|---|"]
    for rung in budgets.RUNGS:
        counts = tally.outcomes.get(rung, Counter())
        lines.append(f"| {rung} | {counts['passed']} | {counts['failed']} | {counts['skipped']} |")
    return lines


def _differences(tally: Tally) -> list[str]:
    if not tally.differences:
        return []
    worst = sorted(tally.differences, reverse=True)[:20]
    return [
        "",
        "Largest differences between a mesh and the oracle, relative to the tensor's largest "
        "value (the tests' own bounds apply):",
        "",
        "| difference | test |",
        "|---|---|",
        *(f"| {value:.1e} | `{test}` |" for value, test in worst),
    ]


def page(tally: Tally, seconds: float, seed: str, green: bool) -> str:
    """The text of docs/proof.md."""
    cores = len(os.sched_getaffinity(0))
    machine = f"{platform.system()} {platform.machine()}, {cores} cores"
    return "\n".join(
        [
            "# Proof",
            "",
            "Written by `make prove`: the suite with full counts. Do not edit.",
            "",
            f"- result: {'every test passed' if green else 'FAILED'}",
            f"- date: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            f"- code: {describe()}",
            f"- machine: {machine}, Python {platform.python_version()}",
            f"- hypothesis seed: {seed}",
            f"- time: {seconds / 60:.0f} minutes",
            "",
            *_table(tally),
            *_differences(tally),
            "",
        ]
    )


def main() -> int:
    """Runs the suite; the page is written whether it passed or not. Returns pytest's exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.prove", description=main.__doc__)
    parser.add_argument("--seed", default="0", help="hypothesis seed")
    parser.add_argument("--out", type=Path, default=PAGE, help="where the page goes")
    args, others = parser.parse_known_args()
    tally = Tally()
    start = time.monotonic()
    words = ["--prove", f"--hypothesis-seed={args.seed}", "--timeout=3600", *others]
    code = int(pytest.main(words, plugins=[tally]))
    text = page(tally, time.monotonic() - start, args.seed, code == 0)
    args.out.write_text(text, encoding="ascii")
    print(f"written: {args.out}")
    return code


if __name__ == "__main__":
    sys.exit(main())
