"""Sequence parallelism: slices of the stream compute what the whole does."""

from __future__ import annotations

from typing import Any

import pytest

from rankmesh.testing.spawn import Pool
from tests.gloo.test_parity import ADAMW, DROPOUT, SGD, check
from tests.tiny import FAMILIES

ON = {"sequence_parallel": True}


def prove(pool: Pool, *sizes: int, parallel: dict[str, Any] | None = None, **given: Any) -> None:
    """The mesh against the single process; sizes: tp, dp, pp."""
    assert check(pool, *sizes, parallel=ON | (parallel or {}), **given)


@pytest.mark.parametrize("regather", [True, False])
@pytest.mark.parametrize(
    ("tp", "dp", "pp"), [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)]
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_meshes(pool: Pool, family: str, tp: int, dp: int, pp: int, regather: bool) -> None:
    """Slices that begin within a sample: 2 rows of 10 tokens over 4 ranks. Dropout draws the mask
    of the single process; norms, row biases and positions are summed over tp (field reports T01,
    T02).
    """
    prove(
        pool, tp, dp, pp, family=family, optimizer=ADAMW, model=DROPOUT, seq_len=10,
        parallel={"sequence_regather": regather},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("llama", "gpt2")])
def test_families(pool: Pool, family: str) -> None:
    """Fewer KV heads than tp, norms of heads and around branches, tied tables."""
    prove(pool, 4, 1, 1, family=family, optimizer=SGD, model=DROPOUT, seq_len=12)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)]
)
def test_schedules(pool: Pool, schedule: str, chunks: int) -> None:
    """Slices travel between stages; W gathers what I left."""
    prove(
        pool, 2, 1, 2, family="gpt2", optimizer=SGD, seq_len=11,
        model=DROPOUT | {"num_layers": 2 * chunks + 1},
        parallel={"schedule": schedule, "num_chunks": chunks},
    )  # fmt: skip


@pytest.mark.parametrize("mask", ["none", "rows", "all"])
def test_masked_labels(pool: Pool, mask: str) -> None:
    prove(pool, 2, 2, 1, family="llama", optimizer=SGD, mask=mask, seq_len=10)


def test_one_tensor_rank(pool: Pool) -> None:
    """With tp 1 the switch changes nothing."""
    prove(pool, 1, 2, 1, family="llama", optimizer=SGD)
