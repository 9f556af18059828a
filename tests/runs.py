"""Tiny runs for tests of the loop and of the command: token files, configs, a run in this process.

Everything is made in a folder of the test. No test lives here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rankmesh.checkpoint.manifest import read_manifest
from rankmesh.comm.environ import alone
from rankmesh.comm.failure import Lifeline
from rankmesh.comm.mesh import single_mesh
from rankmesh.config.load import load_config
from rankmesh.data.writer import TokenWriter
from rankmesh.obs.metrics import read_metrics
from rankmesh.obs.rundir import log_folder, metrics_path
from rankmesh.train.build import Job, prepare_job
from rankmesh.train.loop import Result
from rankmesh.train.run import Run, assemble
from rankmesh.train.session import train

VOCAB = 257
SEQ_LEN = 12

CONFIG = """
[model]
family = "llama"
num_layers = 2
hidden_size = 24
num_heads = 4
num_kv_heads = 2
ffn_size = 37
vocab_size = 257
max_seq_len = 32
init_std = 0.2
[parallel]
bucket_mb = 0.01
[data]
train = ["{folder}/train"]
valid = ["{folder}/valid"]
seq_len = 12
tokenizer = "bytes"
[optimizer]
lr = 1e-2
schedule = "constant"
[train]
steps = 6
global_batch_size = 6
microbatch_size = 2
eval_steps = 2
device = "cpu"
[log]
run_dir = "{folder}/run"
"""


def token_file(prefix: Path, num_tokens: int, seed: int = 0) -> Path:
    """A token file of random bytes."""
    tokens = np.random.default_rng(seed).integers(0, VOCAB - 1, num_tokens)
    with TokenWriter(prefix, VOCAB) as writer:
        writer.add(tokens)
        writer.commit()
    return prefix


def write_config(folder: Path) -> Path:
    """A config with its data: 40 samples to train on, 9 to evaluate."""
    token_file(folder / "train", 40 * SEQ_LEN + 1, seed=1)
    token_file(folder / "valid", 9 * SEQ_LEN + 1, seed=2)
    path = folder / "config.toml"
    path.write_text(CONFIG.format(folder=folder), encoding="ascii")
    return path


def single_run(path: Path, overrides: Sequence[str] = ()) -> tuple[Run, Job]:
    """The run of a config on one rank, in this process, and what it was made from."""
    config = load_config(path, overrides)
    job = prepare_job(config, 1)
    return assemble(config, job.spec, single_mesh(), job.source), job


def train_alone(path: Path, overrides: Sequence[str] = ()) -> Result:
    """A whole run on one rank, in this process: run folder, start-up, loop, end."""
    return train(load_config(path, overrides), alone(), Lifeline(alone(), ""))


def go(
    config: Path, name: str, steps: int, overrides: Sequence[str] = (), resume: str = "auto"
) -> Path:
    """Train up to `steps` in the run folder `name`; returns that folder."""
    folder = config.parent / name
    given = [f"log.run_dir={folder}", f"train.steps={steps}", f"train.resume={resume}"]
    train_alone(config, [*overrides, *given])
    return folder


def said(folder: Path) -> str:
    """What the run's log holds."""
    return (log_folder(folder) / "rank-00000.log").read_text()


def figures(run_dir: Path, name: str) -> dict[int, float]:
    """Step -> a figure of it, of the latest attempt that made the step."""
    return {record["step"]: record[name] for record in read_metrics(metrics_path(run_dir))}


def contents(checkpoint: Path) -> dict[str, list[tuple[tuple[int, ...], str]]]:
    """Tensor -> offset and sha256 of each piece: equal where checkpoints are equal bit for bit."""
    return {
        name: [(piece.offset, piece.sha256) for piece in entry.pieces]
        for name, entry in read_manifest(checkpoint).tensors.items()
    }
