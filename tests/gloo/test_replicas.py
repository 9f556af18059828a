"""`train.check_replicas_every`: one flipped bit on one rank is found and named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rankmesh.testing.spawn import Pool
from tests import runs


@pytest.mark.parametrize(
    ("sizes", "zero", "what", "says"),
    [
        ((1, 2, 1), 0, "layers.1.mlp.up.weight", "layers.1.mlp.up.weight over dp_cp"),
        ((2, 1, 1), 0, "norm.weight", "norm.weight over tp"),
        ((1, 1, 2), 0, "embed.weight", "embed.weight over embedding"),
        ((1, 2, 1), 0, "norm.weight.m", "norm.weight.m over dp_cp"),
        ((1, 2, 1), 1, "layers.0.attn.q.weight", "layers.0.attn.q.weight over dp_cp"),
    ],
)
def test_one_bit(pool: Pool, sizes: tuple[int, int, int], zero: int, what: str, says: str) -> None:
    """Step, tensor, axis, ranks and hosts; the same on both ranks."""
    tp, dp, pp = sizes
    found = pool.run(
        "tests.gloo.zero_jobs:flipped_bit", 2, tp=tp, dp=dp, pp=pp, zero=zero, what=what
    )
    for line in found:
        assert line.startswith("step 2: ") and says in line
        assert "replicas of one slice differ: rank 0 (" in line and "rank 1 (" in line


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [["parallel.dp=2"], ["parallel.tp=2", "parallel.pp=2"]])
def test_a_sound_run_passes(mesh: list[str], tmp_path: Path) -> None:
    """Through the command, after every step."""
    config = runs.write_config(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-m", "rankmesh", "train", str(config), *mesh, "train.steps=3",
         "train.check_replicas_every=1", "optimizer.name=adamw"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
