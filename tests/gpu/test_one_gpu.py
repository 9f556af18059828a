"""One GPU against the oracle on the CPU: the same step, through the CUDA path. Run with `pytest -m
gpu`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rankmesh import models
from rankmesh.comm.mesh import single_mesh
from rankmesh.specs.placement import param_table
from rankmesh.testing.oracle import Recipe, load_values, run_oracle
from rankmesh.topology.plan import ParallelPlan
from rankmesh.train.run import assemble, fresh_values
from rankmesh.train.step import train_step
from tests import tiny

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_step_on_one_gpu_equals_the_oracle(family: str) -> None:
    """Losses, norms and weights of three AdamW steps in fp64, dropout on."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    spec = getattr(tiny, family)(dropout=0.1, attention_dropout=0.1)
    optimizer = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.5}
    config = tiny.config(optimizer=optimizer)
    mesh = replace(single_mesh(), device=torch.device("cuda", 0))
    run = assemble(config, spec, mesh, fresh_values(5))
    batches = tiny.batches(steps=3, global_batch=7, seq_len=11, vocab=spec.vocab_size)
    whole = models.build(spec, device="cpu", dtype=torch.float64)
    start = {
        one.name: fresh_values(5)(one, tuple(slice(0, n) for n in one.shape))
        for one in param_table(spec, ParallelPlan())
    }
    load_values(whole, start)
    recipe = Recipe("adamw", [0.01] * 3, weight_decay=0.1, clip_grad=0.5, seed=5)
    expected = run_oracle(whole, batches, recipe)
    for number, batch in enumerate(batches, start=1):
        result = train_step(run, number, tiny.microbatches(batch, run.batch, 0))
        assert result.loss == pytest.approx(expected.losses[number - 1], rel=1e-9)
        assert result.grad_norm == pytest.approx(expected.norms[number - 1], rel=1e-9)
    for name in run.buffers.entries:
        ours = run.buffers.param(name).cpu()
        torch.testing.assert_close(ours, expected.weights[name], rtol=1e-8, atol=1e-9)
