"""`rankmesh verify`: the proof for a user's own config, from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rankmesh.cli.verification import Difference, Differences, merge, verify
from rankmesh.comm.mesh import single_mesh
from rankmesh.config import load_config
from rankmesh.data.writer import TokenWriter
from rankmesh.train.build import prepare_job
from rankmesh.train.run import assemble
from tests.tiny import gpt2

CONFIG = """
[model]
family = "llama"
num_layers = 1
hidden_size = 16
num_heads = 4
num_kv_heads = 2
ffn_size = 21
vocab_size = 31
max_seq_len = 16
[parallel]
tp = 2
[data]
train = ["{folder}/tokens"]
seq_len = 9
[train]
global_batch_size = 3
microbatch_size = 2
device = "cpu"
[log]
run_dir = "{folder}/run"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    with TokenWriter(tmp_path / "tokens", 31) as writer:
        for _ in range(20):
            writer.add(generator.integers(0, 31, 17).tolist())
        writer.commit()
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rankmesh", "verify", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_a_mesh_of_two_equals_one_process(config: Path) -> None:
    """JSON for machines, exit code 0, nothing written."""
    before = sorted(config.parent.iterdir())
    done = run(str(config), "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["world_size"] == 2 and report["steps"] == 2
    quantities = {row["quantity"]: row["relative"] for row in report["differences"]}
    assert set(quantities) == {"loss", "gradient norm", "gradient", "weight"}
    assert max(quantities.values()) < 1e-9
    assert sorted(config.parent.iterdir()) == before


def test_bad_input_is_one_line(config: Path) -> None:
    done = run(str(config), "train.stepps=2")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "did you mean" in done.stderr and "Traceback" not in done.stderr
    done = run(str(config), "--steps", "0")
    assert done.returncode == 2 and "--steps 0" in done.stderr
    done = run(str(config), "--own-dtype", "train.dtype=bf16")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "train.dtype is bf16; allowed: fp64, fp32" in done.stderr


def test_a_difference_is_found(config: Path) -> None:
    """A run that updates with another learning rate than its config says does not pass."""
    loaded = load_config(config, ["parallel.tp=1", "train.dtype=fp64"])
    job = prepare_job(loaded, 1)
    run = assemble(loaded, job.spec, single_mesh(), job.source)
    assert all(row.fine for row in verify(run, job, 2))
    changed = assemble(loaded, job.spec, single_mesh(), job.source)
    step = changed.optimizer.step
    changed.optimizer.step = lambda lr: step(lr * 1.01)  # type: ignore[method-assign]
    rows = {row.quantity: row for row in verify(changed, job, 2)}
    assert not rows["weight"].fine and not rows["loss"].fine and rows["gradient"].fine


def test_nan_is_never_fine() -> None:
    found = Differences(1e-9)
    found.number("loss", "step 1", float("nan"), 1.0)
    found.number("loss", "step 2", 1.0, 1.0)
    (row,) = found.worst.values()
    assert not row.fine
    assert not merge([[Difference("loss", "step 1", 0.0, 1e-9)], [row]])[0].fine


def test_adamw_and_keys_without_effect(config: Path) -> None:
    """GPT-2's key biases have no gradient but rounding; AdamW must not blow that up in fp64."""
    spec = gpt2(vocab_size=31)
    words = [f"model.{key}={json.dumps(value)}" for key, value in spec.to_dict().items() if value]
    loaded = load_config(config, [*words, "parallel.tp=1", "train.dtype=fp64"])
    job = prepare_job(loaded, 1)
    assert all(
        row.fine for row in verify(assemble(loaded, job.spec, single_mesh(), job.source), job, 3)
    )
