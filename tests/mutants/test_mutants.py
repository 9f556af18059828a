"""Seeded faults, each of which a named check must notice (DESIGN section 9)."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest

from rankmesh.testing.spawn import Pool, WorkerError
from tests.mutants.checks import CHECKS
from tests.mutants.inject import PACKAGE, Edit, Mutant, job, mutants

RUN = "tests.mutants.inject:run"
HARMLESS = Edit(file="optim/norm.py", find="square >= 0", replace="0 <= square")
BROKEN = Edit(file="optim/norm.py", find="import math", replace="import maths")
ALL = mutants()
SLOW = pytest.mark.slow

pytestmark = pytest.mark.gloo


def failure(pool: Pool, edit: Edit, check: str) -> str:
    """The AssertionError with which the first failing rank ended, or "" if it ended otherwise.

    Raises WorkerError where the check passes: the fault survives.
    """
    chosen = CHECKS[check]
    _, logs = pool.fail(RUN, chosen.ranks, **job(edit, chosen.target, chosen.args))
    first = re.split(r"^--- rank-\d+$", logs, flags=re.MULTILINE)[1]
    errors = [line for line in first.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return errors[-1] if errors and errors[-1].startswith("AssertionError: ") else ""


def test_the_list_is_sound() -> None:
    """Names are unique, every edit applies to code as it is now, and what comes out is Python."""
    names = [mutant.id for mutant in ALL]
    assert len(set(names)) == len(names) >= 100
    assert {mutant.check for mutant in ALL} <= set(CHECKS)
    assert not [finding for mutant in ALL for finding in unsound(mutant)]


def unsound(mutant: Mutant) -> list[str]:
    """What is wrong with a mutant's edit."""
    text = (PACKAGE / mutant.edit.file).read_text(encoding="ascii")
    try:
        altered = mutant.edit.apply(text)
    except ValueError as error:
        return [f"{mutant.id}: {error}"]
    same = ast.dump(ast.parse(altered)) == ast.dump(ast.parse(text))
    return [f"{mutant.id}: nothing changes"] if same else []


def test_edits_apply_once() -> None:
    """An edit that fits nowhere, or twice, is refused instead of testing nothing."""
    edit = Edit(file="nn/loss.py", find="a", replace="b")
    for text in ("", "aa"):
        with pytest.raises(ValueError, match="not once"):
            edit.apply(text)
    assert edit.apply("a") == "b"
    assert edit.module == "rankmesh.nn.loss"


def test_a_fault_that_changes_nothing_survives(pool: Pool) -> None:
    """The proof can fail: an edit without effect is not taken for caught."""
    with pytest.raises(WorkerError, match="expected to fail"):
        failure(pool, HARMLESS, "llama")


def test_a_fault_that_breaks_the_code_is_not_caught(pool: Pool) -> None:
    """An import error is no comparison."""
    assert failure(pool, BROKEN, "llama") == ""


def _control(name: str) -> Any:
    fast = any(mutant.fast for mutant in ALL if mutant.check == name)
    return pytest.param(name, marks=() if fast else SLOW)


@pytest.mark.parametrize("name", [_control(name) for name in CHECKS])
def test_sound_code_passes(pool: Pool, name: str) -> None:
    """Every check passes without a fault, run the same way."""
    check = CHECKS[name]
    assert len(pool.run(RUN, check.ranks, **job(None, check.target, check.args))) == check.ranks


def _param(mutant: Mutant) -> Any:
    return pytest.param(mutant, id=mutant.id, marks=() if mutant.fast else SLOW)


@pytest.mark.parametrize("mutant", [_param(mutant) for mutant in ALL])
def test_mutant_is_caught(pool: Pool, mutant: Mutant) -> None:
    """The check ends with the AssertionError that the list names."""
    said = failure(pool, mutant.edit, mutant.check)
    assert re.search(mutant.says, said), f"{mutant.what}: the check said {said!r}"
