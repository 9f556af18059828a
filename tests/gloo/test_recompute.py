"""Recomputation on a mesh: against the single process, and bit for bit against itself without."""

from __future__ import annotations

from typing import Any

import pytest

from rankmesh.testing.spawn import Pool
from tests.gloo.test_parity import ADAMW, DROPOUT, SGD, check

pytestmark = pytest.mark.slow

SCHEDULES = [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)]
MIXED = {"recompute": "selective", "recompute_modules": ["core", "norm", "activation"]}
SPLIT = {"recompute": "selective", "recompute_modules": ["attention", "mlp", "norm"]}
MODES: list[dict[str, Any]] = [
    {"recompute": "full"},
    {"recompute": "full", "recompute_layers": [1]},
    MIXED,
]


@pytest.mark.parametrize("mode", MODES, ids=["full", "one layer", "selective"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_pipelines(pool: Pool, schedule: str, chunks: int, tp: int, mode: dict[str, Any]) -> None:
    """Field report R01: loss, norm, gradients and weights of the single process, dropout on."""
    assert check(
        pool, tp, 1, 2, family="gpt2" if chunks == 2 else "llama", optimizer=ADAMW,
        model=DROPOUT | {"num_layers": 4 * chunks - 1},
        parallel={"schedule": schedule, "num_chunks": chunks, **mode},
    )  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "olmo2"])
@pytest.mark.parametrize("mode", [MODES[0], SPLIT], ids=["full", "selective"])
def test_families(pool: Pool, family: str, mode: dict[str, Any]) -> None:
    """tp 4 with 2 KV heads, norms of queries and keys, norms after branches."""
    assert check(
        pool, 4, 1, 1, family=family, optimizer=SGD, model=DROPOUT,
        parallel=mode,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_the_same_bits(pool: Pool, schedule: str, chunks: int, dtype: str) -> None:
    """tp 2 x pp 2, full recomputation and a mix of modules."""
    for mode in ({"recompute": "full"}, MIXED):
        found = pool.run(
            "tests.gloo.recompute_jobs:bits", 4, timeout=90, tp=2, pp=2, family="llama",
            model=DROPOUT | {"num_layers": 4}, dtype=dtype,
            parallel={"schedule": schedule, "num_chunks": chunks, **mode},
        )  # fmt: skip
        assert len(found) == 4 and min(found) > 10
