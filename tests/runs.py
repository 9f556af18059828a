"""Tiny runs for tests of the loop and of the command: token files, configs, a run in this process.

Everything is made in a folder of the test. No test lives here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rankmesh.comm.mesh import single_mesh
from rankmesh.config.load import load_config
from rankmesh.data.indexed import TokenWriter
from rankmesh.train.build import Job, prepare_job
from rankmesh.train.run import Run, assemble

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
