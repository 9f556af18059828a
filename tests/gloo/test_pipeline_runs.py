"""Whole runs over pipelines: losses, evaluation, checkpoints, schedules from files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rankmesh.checkpoint.shelf import step_folder
from rankmesh.checkpoint.weights import Weights
from rankmesh.obs.metrics import read_metrics
from rankmesh.obs.rundir import metrics_path
from rankmesh.testing.spawn import Pool
from tests import runs

JOBS = "tests.gloo.resume_jobs"
CHANGES = [
    "model.num_layers=5", "model.tie_embeddings=true", "model.dropout=0.1",
    "optimizer.clip_grad=0.5", "train.dtype=fp64", "train.eval_every=3", "train.microbatch_size=1",
    "train.resume=auto",
]  # fmt: skip
PIPELINE = ["parallel.pp=2", "parallel.schedule=interleaved", "parallel.num_chunks=2"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_config(tmp_path_factory.mktemp("pipeline"))


def job(pool: Pool, config: Path, name: str, ranks: int, more: Sequence[str]) -> Path:
    overrides = [*CHANGES, *more, f"log.run_dir={config.parent / name}"]
    pool.run(f"{JOBS}:run", ranks, timeout=120, config=str(config), overrides=overrides)
    return config.parent / name


@pytest.fixture(scope="module")
def straight(pool: Pool, config: Path) -> Path:
    """Six steps over two pipeline ranks of two chunks."""
    return job(pool, config, "straight", 2, PIPELINE)


def test_every_figure_is_that_of_one_process(pool: Pool, config: Path, straight: Path) -> None:
    """Loss, norm and evaluation as written by rank 0, which holds no head (field report P17)."""
    alone = job(pool, config, "alone", 1, [])
    for name in ("loss", "grad_norm"):
        ours, theirs = runs.figures(straight, name), runs.figures(alone, name)
        assert len(ours) == 6 and ours == pytest.approx(theirs, rel=1e-9)
    ours, theirs = (
        [row["eval_loss"] for row in read_metrics(metrics_path(folder)) if "eval_loss" in row]
        for folder in (straight, alone)
    )
    assert len(ours) == 2 and ours == pytest.approx(theirs, rel=1e-9)


def test_a_stopped_pipeline_ends_as_an_unbroken_one(
    pool: Pool, config: Path, straight: Path
) -> None:
    """Bit for bit: losses, weights, moments."""
    job(pool, config, "broken", 2, [*PIPELINE, "train.steps=2"])
    broken = job(pool, config, "broken", 2, [*PIPELINE, "train.steps=6"])
    assert runs.figures(broken, "loss") == runs.figures(straight, "loss")
    ours, theirs = (runs.contents(step_folder(folder, 6)) for folder in (broken, straight))
    assert ours == theirs


def test_a_tied_table_is_written_once(straight: Path) -> None:
    """Both ranks write, and the files hold the model once."""
    manifest = Weights(step_folder(straight, 6)).manifest
    assert len(manifest.files) == 2
    assert "embed.weight" in manifest.tensors and "head.weight" not in manifest.tensors


def test_a_schedule_of_ones_own(pool: Pool, config: Path) -> None:
    """GPipe with backward in another order, from a file; the numbers stay what they are."""
    path = config.parent / "own.txt"
    order = [*range(6)]
    forward = [" ".join(f"F{stage}.{m}" for m in order) for stage in range(2)]
    backward = [" ".join(f"B{stage}.{m}" for m in (5, 0, 1, 2, 4, 3)) for stage in range(2)]
    path.write_text("\n".join(map(" ".join, zip(forward, backward, strict=True))) + "\n")
    more = ["parallel.pp=2", "train.steps=3"]
    own = job(pool, config, "own", 2, [*more, f"parallel.schedule_file={path}"])
    named = job(pool, config, "named", 2, more)
    assert runs.figures(own, "loss") == pytest.approx(runs.figures(named, "loss"), rel=1e-12)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("F0.0 B0.0\n", "1 lines of actions; needed is one a rank, pp 2"),
        ("F1.0 B1.0\nF0.0 B0.0\n", "F1.0 stands on pipeline rank 0; parallel.schedule and"),
        ("F0.0 B0.0\nF1.0 B1.0\n", "stage 0, microbatch 1: found F 0"),
        ("F0.0 B0.0\nX\n", "'X' is no action"),
    ],
)
def test_a_schedule_that_cannot_be(config: Path, text: str, says: str) -> None:
    path = config.parent / "wrong.txt"
    path.write_text(text)
    ran = subprocess.run(
        [sys.executable, "-m", "rankmesh", "train", str(config), "parallel.pp=2",
         f"parallel.schedule_file={path}", f"log.run_dir={config.parent / 'wrong'}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 2 and len(ran.stderr.splitlines()) == 1
    assert says in ran.stderr


@pytest.mark.slow
def test_verify_over_a_pipeline(config: Path) -> None:
    """The command that proves a user's own config does so for pipelines."""
    ran = subprocess.run(
        [sys.executable, "-m", "rankmesh", "verify", str(config), "parallel.pp=2",
         "parallel.tp=2", "model.tie_embeddings=true", "parallel.schedule=zb-h1"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
