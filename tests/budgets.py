"""Owns the budgets of the suite: how many tests each rung has at least, how long a tier may take.

The figures stand in budgets.toml; `pytest --budgets` enforces them. It must not know any test.
"""

import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
RUNGS = ("rules", "pure", "one", "gloo", "mutants", "gpu")


def load() -> dict[str, dict[str, int]]:
    """budgets.toml: `minimum_tests` by rung, `maximum_seconds` by tier."""
    return tomllib.loads((TESTS / "budgets.toml").read_text(encoding="ascii"))


def rung_of(path: Path) -> str:
    """The folder directly under tests/ in which a test file lies; "" for any other place."""
    parts = path.relative_to(TESTS).parts if path.is_relative_to(TESTS) else ()
    return parts[0] if len(parts) > 1 else ""


def missing_tests(counts: Mapping[str, int], minimum: Mapping[str, int]) -> list[str]:
    """A line for each rung with fewer tests than `minimum` says."""
    return [
        f"{rung}: {counts.get(rung, 0)} tests, at least {least} are required"
        for rung, least in minimum.items()
        if counts.get(rung, 0) < least
    ]


def overruns(seconds: Mapping[str, float], maximum: Mapping[str, float]) -> list[str]:
    """A line for each tier that took longer than `maximum` says."""
    return [
        f"{tier} tier: {seconds[tier]:.0f} s, at most {most} s are allowed"
        for tier, most in maximum.items()
        if seconds.get(tier, 0.0) > most
    ]


# Pluggy keeps its plugins in sets: compared by identity, so that it can be hashed.
@dataclass(eq=False)
class BudgetWatch:
    """A pytest plugin: counts what was collected, adds up what it took, fails a broken budget."""

    budgets: Mapping[str, Mapping[str, int]]
    counts: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    complaints: list[str] = field(default_factory=list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: Iterable[pytest.Item]) -> None:
        """Counts before any other hook leaves items out."""
        self.counts.update(rung_of(item.path) for item in items)
        self.complaints += missing_tests(self.counts, self.budgets["minimum_tests"])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds a phase's duration to its tier."""
        tier = "slow" if "slow" in report.keywords else "fast"
        self.seconds[tier] += report.duration

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Turns a green run with a broken budget into a failed one."""
        self.complaints += overruns(self.seconds, self.budgets["maximum_seconds"])
        if self.complaints and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints counts and seconds, then each broken budget."""
        counts = ", ".join(f"{rung} {self.counts[rung]}" for rung in RUNGS)
        seconds = ", ".join(f"{tier} {spent:.0f} s" for tier, spent in self.seconds.items())
        terminalreporter.write_line(f"budgets: {counts}; {seconds}")
        for complaint in self.complaints:
            terminalreporter.write_line(f"BUDGET BROKEN {complaint}", red=True)
