"""The budgets of the suite: their file is whole, and a broken budget is noticed."""

import pytest

from tests import budgets


def test_the_file_names_every_rung_and_tier() -> None:
    """A rung without a minimum could vanish; the gpu rung is empty without a device."""
    limits = budgets.load()
    assert set(limits["minimum_tests"]) == set(budgets.RUNGS) - {"gpu"}
    assert set(limits["maximum_seconds"]) == {"fast", "slow"}
    assert sum(limits["maximum_seconds"].values()) <= 40 * 60


def test_a_rung_that_lost_tests_is_named() -> None:
    """One test fewer than the minimum is enough."""
    assert budgets.missing_tests({"pure": 9}, {"pure": 10}) == [
        "pure: 9 tests, at least 10 are required"
    ]
    assert not budgets.missing_tests({"pure": 10}, {"pure": 10})


def test_a_slow_tier_is_named() -> None:
    """Seconds beyond the maximum are reported with both figures."""
    assert budgets.overruns({"fast": 901.0}, {"fast": 900}) == [
        "fast tier: 901 s, at most 900 s are allowed"
    ]
    assert not budgets.overruns({"fast": 899.0}, {"fast": 900})


def test_the_watch_is_a_plugin() -> None:
    """Pytest can take it and ask it: what `make test` relies on."""
    manager = pytest.PytestPluginManager()
    watch = budgets.BudgetWatch(budgets.load())
    manager.register(watch, "budget-watch")
    assert manager.has_plugin("budget-watch")
    assert manager.subset_hook_caller("pytest_collection_modifyitems", {watch}) is not None
