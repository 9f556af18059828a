"""Owns what all tests share: tiers and their order, hypothesis profiles, options of the suite.

It must not import torch: the rules and most of the pure rung run without it.
"""

import os
from collections.abc import Iterable

import hypothesis
import pytest

from tests import budgets

# One thread a process: the suite starts up to eight processes on two cores. Set before torch is
# first imported, and inherited by everything that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The machine is shared and slow at times: no deadline. A test that needs another number of
# examples multiplies `hypothesis.settings.default.max_examples`, so that `--prove` raises it too.
hypothesis.settings.register_profile("test", max_examples=50, deadline=None, print_blob=True)
hypothesis.settings.register_profile("prove", max_examples=2000, deadline=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of this suite."""
    group = parser.getgroup("rankmesh")
    group.addoption("--prove", action="store_true", help="full counts instead of samples")
    group.addoption("--budgets", action="store_true", help="enforce tests/budgets.toml")


def pytest_configure(config: pytest.Config) -> None:
    """Loads the hypothesis profile and, when asked, the budgets."""
    hypothesis.settings.load_profile("prove" if config.getoption("--prove") else "test")
    if config.getoption("--budgets"):
        config.pluginmanager.register(budgets.BudgetWatch(budgets.load()), "budget-watch")


def _order(item: pytest.Item) -> tuple[bool, int]:
    """Fast before slow; within a tier, the cheaper rungs first."""
    rung = budgets.rung_of(item.path)
    position = budgets.RUNGS.index(rung) if rung in budgets.RUNGS else len(budgets.RUNGS)
    return item.get_closest_marker("slow") is not None, position


def _mark_rungs(items: Iterable[pytest.Item]) -> None:
    """The folders `gloo` and `gpu` give their tests the marker of the same name."""
    for item in items:
        rung = budgets.rung_of(item.path)
        if rung in ("gloo", "gpu"):
            item.add_marker(rung)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks, leaves GPU tests out unless `-m` names them, and orders what remains."""
    _mark_rungs(items)
    if "gpu" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    items.sort(key=_order)


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """True under `--prove`: a test that samples cases runs all of them."""
    return bool(request.config.getoption("--prove"))
