"""Theory and ledger agree, collective by collective: two independent accounts of one step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rankmesh.comm.mesh import fake_mesh
from rankmesh.config import load_config
from rankmesh.data.loader import Microbatch
from rankmesh.specs.placement import kv_replicas
from rankmesh.specs.presets import preset
from rankmesh.theory.comm import Bucket, StepShape, step_collectives
from rankmesh.topology.plan import ParallelPlan
from rankmesh.train.run import Run, assemble, fresh_values
from rankmesh.train.step import train_step

LENGTH, ROWS = 16, 2
CASES: list[tuple[str, int, int, int, float, dict[str, Any]]] = [
    ("llama-tiny", 2, 2, 2, 0.0, {}),
    ("llama-tiny", 4, 2, 1, 0.1, {}),
    ("gpt2-tiny", 2, 2, 3, 0.0, {}),
    ("gpt2-tiny", 4, 1, 2, 0.1, {}),
    ("llama-tiny", 1, 4, 2, 0.0, {}),
    ("llama-tiny", 2, 3, 2, 0.0, {"tie_embeddings": True}),
    ("qwen2-tiny", 4, 1, 2, 0.0, {}),
    ("qwen3-tiny", 4, 2, 2, 0.0, {}),
    ("gemma2-tiny", 2, 2, 2, 0.1, {}),
    ("gemma3-tiny", 2, 2, 2, 0.0, {}),
    ("olmo2-tiny", 2, 2, 2, 0.0, {}),
    ("olmo2-tiny", 4, 1, 2, 0.0, {"num_kv_heads": 2}),
    ("phi3-tiny", 2, 1, 2, 0.0, {"tie_embeddings": True}),
]


def buckets_of(run: Run) -> tuple[Bucket, ...]:
    slots = run.chunk.buffers.slots
    return tuple(
        Bucket(
            bucket.stop - bucket.start,
            tuple(n for s in slots if s.bucket is bucket for n in s.names),
        )
        for bucket in run.chunk.buffers.buckets
    )


@pytest.mark.parametrize("bucket_mb", [0.0001, 0.03, 0.2, 32])
@pytest.mark.parametrize(("name", "tp", "dp", "microbatches", "smoothing", "changes"), CASES)
def test_the_ledger_of_a_step_is_the_list_of_theory(
    name: str,
    tp: int,
    dp: int,
    microbatches: int,
    smoothing: float,
    changes: dict[str, Any],
    bucket_mb: float,
) -> None:
    spec, plan = preset(name, **changes), ParallelPlan(tp=tp, dp=dp)
    config = load_config(
        None,
        [
            f"train.global_batch_size={dp * microbatches * ROWS}",
            f"train.microbatch_size={ROWS}",
            f"train.label_smoothing={smoothing}",
            f"parallel.bucket_mb={bucket_mb}",
        ],
    )
    mesh = fake_mesh(plan, 0, kv_replicas=kv_replicas(spec, plan))
    run = assemble(config, spec, mesh, fresh_values(0))
    tokens = torch.randint(0, spec.vocab_size, (ROWS, LENGTH))
    train_step(run, 1, [Microbatch(tokens, tokens.roll(-1, 1), torch.arange(ROWS))] * microbatches)
    shape = StepShape(
        tokens=ROWS * LENGTH,
        microbatches=microbatches,
        dtype_bytes=4,
        buckets=buckets_of(run),
        label_smoothing=bool(smoothing),
    )
    recorded = [dataclasses.astuple(event) for event in mesh.seam.ledger.events]
    expected = [dataclasses.astuple(one) for one in step_collectives(spec, plan, shape)]
    assert len(recorded) > 0 and recorded == expected
