"""Jobs of the recomputation tests; they run inside worker processes."""

from __future__ import annotations

from typing import Any

import torch

from rankmesh.testing.worker import Worker
from rankmesh.train.step import train_step
from tests import tiny
from tests.gloo.field_jobs import start_run


def bits(
    worker: Worker,
    family: str,
    model: dict[str, Any],
    parallel: dict[str, Any],
    dtype: str,
    **axes: int,
) -> int:
    """Two steps without and with recomputation; every gradient and loss equal. Returns how many
    gradients were compared.
    """
    spec = getattr(tiny, family)(**model)
    found = []
    for mode in ({"recompute": "none"}, parallel):
        options = {
            "parallel": parallel | {"recompute_layers": None, "recompute_modules": ["core"]} | mode,
            "train": {"dtype": dtype, "global_batch_size": 6, "microbatch_size": 2},
        }
        run = start_run(worker, spec, **axes, **options)
        made = tiny.batches(steps=2, global_batch=6, seq_len=9, vocab=spec.vocab_size)
        losses = [
            train_step(run, n, tiny.microbatches(batch, run.batch, 0)).loss
            for n, batch in enumerate(made, start=1)
        ]
        grads = {name: run.buffers.grad(name).clone() for name in run.buffers.entries}
        found.append((losses, grads))
    (losses, plain), (others, again) = found
    assert losses == others
    for name, gradient in plain.items():
        assert torch.equal(gradient, again[name]), name
    return len(plain)
