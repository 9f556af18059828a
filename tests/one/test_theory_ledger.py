"""Theory and ledger agree, collective by collective: two independent accounts of one step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rankmesh.comm.mesh import fake_mesh
from rankmesh.config import load_config
from rankmesh.config.schema import RunConfig
from rankmesh.data.loader import Microbatch
from rankmesh.specs.model import ModelSpec
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


SELECTIVE = {"recompute": "selective"}
PIPELINES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama-tiny", {"pp": 2, "tp": 2, "dp": 2}, {"num_layers": 3}),
    ("gpt2-tiny", {"pp": 3, "dp": 2}, {"num_layers": 5}),
    ("qwen3-tiny", {"pp": 2, "tp": 4, "schedule": "gpipe"}, {}),
    (
        "gemma2-tiny",
        {"pp": 2, "dp": 2, "num_chunks": 2, "schedule": "interleaved"},
        {"num_layers": 4},
    ),
    (
        "gpt2-tiny",
        {"pp": 1, "tp": 2, "num_chunks": 2, "schedule": "interleaved"},
        {"num_layers": 4},
    ),
    ("gpt2-tiny", {"pp": 2, "tp": 2, "schedule": "zb-h1"}, {}),
    ("olmo2-tiny", {"pp": 2, "dp": 2, "schedule": "zb-h2"}, {"tie_embeddings": True}),
    ("gpt2-tiny", {"pp": 2, "dp": 2, "num_chunks": 2, "schedule": "zb-v"}, {"num_layers": 4}),
    ("llama-tiny", {"pp": 2, "tp": 2, "layout": (2, 0)}, {}),
    ("llama-tiny", {"tp": 2, "dp": 2, "sequence_parallel": True}, {"num_layers": 3}),
    ("gpt2-tiny", {"tp": 4, "sequence_parallel": True, "sequence_regather": False}, {}),
    ("llama-tiny", {"dp": 4, "zero": 1}, {}),
    ("llama-tiny", {"dp": 4, "tp": 4, "zero": 1, "zero_group": 2, "sequence_parallel": True}, {}),
    ("gpt2-tiny", {"dp": 3, "pp": 2, "zero": 1}, {}),
    ("qwen3-tiny", {"dp": 2, "tp": 4, "zero": 1}, {}),
    ("llama-tiny", {"dp": 4, "zero": 2}, {}),
    ("llama-tiny", {"dp": 4, "tp": 2, "zero": 2, "zero_group": 2}, {"tie_embeddings": True}),
    ("gpt2-tiny", {"dp": 2, "pp": 2, "zero": 2, "schedule": "zb-h1"}, {"num_layers": 3}),
    (
        "gpt2-tiny",
        {"dp": 2, "pp": 2, "zero": 2, "num_chunks": 2, "schedule": "zb-v"},
        {"num_layers": 4},
    ),
    (
        "qwen2-tiny",
        {"dp": 2, "pp": 2, "zero": 2, "num_chunks": 2, "schedule": "interleaved"},
        {"num_layers": 4},
    ),
    ("qwen3-tiny", {"tp": 2, "pp": 2, "schedule": "zb-h1", "sequence_parallel": True}, {}),
    ("olmo2-tiny", {"tp": 4, "dp": 2, "sequence_parallel": True}, {"num_kv_heads": 2}),
    (
        "gpt2-tiny",
        {"tp": 2, "pp": 2, "num_chunks": 2, "schedule": "zb-v", "sequence_parallel": True},
        {"num_layers": 4},
    ),
    ("llama-tiny", {"tp": 2, "dp": 2, "recompute": "full"}, {}),
    ("llama-tiny", {"tp": 2, "recompute": "full", "sequence_parallel": True}, {}),
    (
        "olmo2-tiny",
        {"tp": 2, "dp": 2, "zero": 2, "recompute": "full", "sequence_parallel": True},
        {},
    ),
    (
        "gemma2-tiny",
        {"tp": 2, "pp": 2, "schedule": "zb-h1", **SELECTIVE, "sequence_parallel": True,
         "recompute_modules": ("attention", "mlp")},
        {},
    ),
    ("gemma2-tiny", {"pp": 2, "tp": 2, "recompute": "full"}, {}),
    ("olmo2-tiny", {"pp": 2, "tp": 2, "schedule": "zb-h1", "recompute": "full"}, {}),
    ("gpt2-tiny", {"pp": 2, "tp": 2, "dp": 2, **SELECTIVE, "recompute_modules": ("norm",)}, {}),
    ("olmo2-tiny", {"pp": 2, "tp": 2, **SELECTIVE, "recompute_modules": ("attention", "mlp")}, {}),
    ("qwen3-tiny", {"pp": 2, "tp": 4, "num_chunks": 2, "schedule": "interleaved", **SELECTIVE},
     {"num_layers": 4}),
    (
        "gpt2-tiny",
        {"pp": 2, "tp": 2, "num_chunks": 2, "schedule": "zb-v", "recompute": "full",
         "recompute_layers": (1, 0)},
        {"num_layers": 8},
    ),
]  # fmt: skip


def buckets_of(run: Run) -> tuple[Bucket, ...]:
    slots, entries = run.buffers.slots, run.buffers.entries
    return tuple(
        Bucket(
            bucket.stop - bucket.start,
            tuple(n for s in slots if s.bucket is bucket for n in s.names),
            tuple(
                (entries[n].start - bucket.start, entries[n].stop - bucket.start)
                for s in slots
                if s.bucket is bucket
                for n in s.names
            ),
        )
        for bucket in run.buffers.buckets
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
    recorded, expected = both_accounts(config, spec, plan, 0, microbatches)
    assert len(recorded) > 0 and recorded == expected


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize(("name", "fields", "changes"), PIPELINES)
def test_the_ledger_of_a_pipeline(
    name: str, fields: dict[str, Any], changes: dict[str, Any], microbatches: int
) -> None:
    """On every pipeline rank. Receives start early, so their order is compared apart."""
    spec, plan = preset(name, **changes), ParallelPlan(**fields)
    config = load_config(
        None,
        [
            f"train.global_batch_size={plan.dp * microbatches * ROWS}",
            f"train.microbatch_size={ROWS}",
            "parallel.bucket_mb=0.03",
        ],
    )
    for pp_rank in range(plan.pp):
        recorded, expected = both_accounts(config, spec, plan, pp_rank, microbatches)
        for receive in (True, False):
            ours, theirs = (
                [event for event in events if (event[0] == "receive") == receive]
                for events in (recorded, expected)
            )
            assert ours == theirs
        assert len(recorded) > 2


def both_accounts(
    config: RunConfig, spec: ModelSpec, plan: ParallelPlan, pp_rank: int, microbatches: int
) -> tuple[list[Any], list[Any]]:
    """What the first rank of a pipeline rank records in a step, and what theory expects of it."""
    rank = pp_rank * plan.tp * plan.dp
    mesh = fake_mesh(plan, rank, kv_replicas=kv_replicas(spec, plan))
    run = assemble(config, spec, mesh, fresh_values(0))
    run.hops.checked = False
    tokens = torch.randint(0, spec.vocab_size, (ROWS, LENGTH))
    train_step(run, 1, [Microbatch(tokens, tokens.roll(-1, 1), torch.arange(ROWS))] * microbatches)
    shape = StepShape(
        tokens=ROWS * LENGTH,
        microbatches=microbatches,
        dtype_bytes=4,
        buckets=buckets_of(run),
        label_smoothing=bool(config.train.label_smoothing),
    )
    recorded = [dataclasses.astuple(event) for event in mesh.seam.ledger.events]
    expected = step_collectives(spec, plan, shape, pp_rank=pp_rank)
    return recorded, [dataclasses.astuple(one) for one in expected]
