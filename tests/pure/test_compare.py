"""`rankmesh compare`: the first step and metric at which two runs differ."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rankmesh.cli.compare import compare
from rankmesh.cli.main import main
from rankmesh.obs.metrics import MetricsWriter, StepMetrics


def step(number: int, loss: float = 2.0, **rest: object) -> StepMetrics:
    plain = StepMetrics(
        step=number,
        loss=loss / number,
        grad_norm=0.5,
        lr=1e-3,
        tokens=64,
        tokens_per_s=1000.0 + number,
        mfu=None,
        step_time_s=0.064,
        peak_memory_bytes=10**9,
        comm_bytes={"tp": 4096},
        extra={"exposed_s.tp": 0.01},
    )
    return replace(plain, **rest)  # type: ignore[arg-type]


def write(folder: Path, steps: Sequence[StepMetrics], attempt: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    with MetricsWriter(folder / "metrics.jsonl", attempt) as writer:
        for one in steps:
            writer.write(one)
    return folder


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write(tmp_path / "a", [step(number) for number in range(1, 9)])


def run(
    capsys: pytest.CaptureFixture[str], a: Path, b: Path, *words: str
) -> tuple[int, dict[str, object]]:
    code = main(["compare", str(a), str(b), *words, "--json"])
    captured = capsys.readouterr()
    assert not captured.err
    found: dict[str, object] = json.loads(captured.out)
    return code, found


def test_equal_runs(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times, rates, memory, bytes and waiting differ from run to run and mesh to mesh."""
    other = [
        step(n, tokens_per_s=1.0, step_time_s=9.0, peak_memory_bytes=1, mfu=0.4,
             comm_bytes={"dp": 1}, extra={"exposed_s.dp": 3.0})
        for n in range(1, 9)
    ]  # fmt: skip
    b = write(tmp_path / "b", other)
    code, found = run(capsys, plain, b)
    assert code == 0
    assert found == {
        "equal": True,
        "steps": 8,
        "metrics": ["loss", "grad_norm", "lr", "tokens"],
        "largest_relative": 0.0,
        "first": None,
    }
    assert main(["compare", str(plain), str(b)]) == 0
    assert capsys.readouterr().out == "equal: 8 steps, loss, grad_norm, lr, tokens\n"


def test_the_first_difference(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step, metric, both values; what differs later is not the question."""
    changed = [step(n, loss=2.0 if n < 5 else 2.5, lr=1e-3 if n < 6 else 1e-2) for n in range(1, 9)]
    b = write(tmp_path / "b", changed)
    code, found = run(capsys, plain, b)
    assert code == 1 and found["equal"] is False and found["steps"] == 5
    assert found["first"] == {
        "step": 5,
        "differences": [{"metric": "loss", "a": 0.4, "b": 0.5, "relative": pytest.approx(0.2)}],
    }
    assert main(["compare", str(plain), str(b)]) == 1
    assert "first difference: step 5, loss" in capsys.readouterr().out


def test_tolerance(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The relative difference counts, up to and including the tolerance."""
    b = write(tmp_path / "b", [step(n, loss=2.0 * (1 + 1e-7)) for n in range(1, 9)])
    assert run(capsys, plain, b)[0] == 1
    code, found = run(capsys, plain, b, "--rtol", "2e-7")
    assert code == 0 and 0.9e-7 < float(str(found["largest_relative"])) < 1.1e-7
    assert run(capsys, plain, b, "--rtol", "5e-8")[0] == 1
    assert run(capsys, plain, b, "--only", "lr", "tokens")[0] == 0


def test_a_run_that_ends_early(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = write(tmp_path / "b", [step(n) for n in range(1, 6)])
    code, found = run(capsys, plain, b, "--rtol", "0.5")
    assert code == 1
    assert isinstance(found["first"], dict) and found["first"]["step"] == 6
    assert main(["compare", str(plain), str(b)]) == 1
    assert "missing" in capsys.readouterr().out


def test_a_figure_that_only_one_run_has(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An evaluation, say."""
    b = write(tmp_path / "b", [step(n, eval_loss=3.0 if n == 4 else None) for n in range(1, 9)])
    code, found = run(capsys, plain, b)
    assert code == 1 and isinstance(found["first"], dict)
    assert found["first"]["step"] == 4
    assert found["first"]["differences"][0]["metric"] == "eval_loss"


def test_of_a_step_made_twice_the_last_counts(plain: Path, tmp_path: Path) -> None:
    """A run that died after step 6 and went on from step 4 equals one that never stopped."""
    b = write(tmp_path / "b", [*(step(n) for n in range(1, 5)), step(5, 2.2), step(6, 2.3)])
    write(b, [step(n) for n in range(5, 9)], attempt=2)
    assert main(["compare", str(plain), str(b)]) == 0


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (math.nan, 1.0, False),
        (math.inf, -math.inf, False),
        (math.inf, 1.0, False),
        (0.0, -0.0, True),
        (0.0, 1e-300, False),
        (1, 1.0, True),
    ],
)
def test_values_that_are_not_plain(a: float, b: float, equal: bool) -> None:
    """A run that became NaN equals another that did at the same step, and no other."""
    found = compare({1: {"loss": a}}, {1: {"loss": b}}, rtol=0.0)
    assert (found.step is None) is equal
    assert (compare({1: {"loss": b}}, {1: {"loss": a}}, rtol=0.5).step is None) is equal


def test_a_file_will_do(plain: Path) -> None:
    assert main(["compare", str(plain), str(plain / "metrics.jsonl")]) == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["A", "missing"], "no such run"),
        (["A", "folder"], "f: no run directory: it has no metrics.jsonl"),
        (["A", "empty"], "nothing to compare"),
        (["A", "A", "--rtol", "-1"], "--rtol -1"),
        (["A", "A", "--only", "los"], "--only los"),
    ],
)
def test_what_is_wrong_is_one_line(
    words: list[str], text: str, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "empty", [])
    (tmp_path / "f").mkdir()
    places = {"A": str(plain), "missing": str(tmp_path / "m"), "empty": str(tmp_path / "empty")}
    places["folder"] = str(tmp_path / "f")
    assert main(["compare", *(places.get(word, word) for word in words)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and text in error


def test_it_loads_no_torch(plain: Path) -> None:
    code = (
        "import sys; from rankmesh.cli.main import main;"
        "code = main(['compare', *sys.argv[1:]]);"
        "assert code == 0 and not {'torch', 'numpy'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, str(plain), str(plain)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
