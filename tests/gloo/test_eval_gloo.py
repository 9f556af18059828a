"""`rankmesh eval` on meshes: the figures of one process, started by itself or by torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rankmesh as rm
from tests import runs

WORDS = ["--seq-len", "12", "--device", "cpu", "--json"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run, and a set of 7 samples and an end."""
    folder = tmp_path_factory.mktemp("eval")
    rm.train(runs.write_config(folder))
    runs.token_file(folder / "tokens", 7 * 12 + 6, seed=3)
    return folder


def evaluate(folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> dict[str, Any]:
    command = [sys.executable, *(launcher or ("-m", "rankmesh")), "eval", str(folder / "run")]
    command += [*WORDS, *words, "--data", str(folder / "tokens"), str(folder / "valid")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return evaluate(folder)


@pytest.mark.parametrize(
    ("mesh", "world_size"),
    [
        (("--tp", "2"), 2),
        (("--nproc", "2", "--microbatch-size", "3"), 2),
        pytest.param(("--tp", "2", "--dp", "2"), 4, marks=pytest.mark.slow),
        pytest.param(("--nproc", "3", "--microbatch-size", "1"), 3, marks=pytest.mark.slow),
    ],
    ids=["tp 2", "dp 2", "tp 2 x dp 2", "dp 3"],
)
def test_any_mesh_gives_the_figures_of_one_process(
    mesh: tuple[str, ...], world_size: int, folder: Path, alone: dict[str, Any]
) -> None:
    """To 1e-6, on sets that neither the batch nor the replicas divide."""
    found = evaluate(folder, *mesh)
    assert found["world_size"] == world_size
    assert len(found["sets"]) == 2
    for row, expected in zip(found["sets"], alone["sets"], strict=True):
        assert row["targets"] == expected["targets"]
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.slow
def test_it_joins_ranks_that_are_there(folder: Path, alone: dict[str, Any]) -> None:
    """Under torchrun; rank 0 alone prints."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
    found = evaluate(folder, "--tp", "2", launcher=(*torchrun, "rankmesh"))
    assert found["world_size"] == 2
    assert found["sets"][0]["loss"] == pytest.approx(alone["sets"][0]["loss"], rel=1e-6)
