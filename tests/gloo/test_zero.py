"""ZeRO and 16 bits: sharded state computes and saves what whole state does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rankmesh.checkpoint.shelf import step_folder
from rankmesh.checkpoint.weights import Weights
from rankmesh.testing.spawn import Pool
from tests import runs
from tests.gloo.test_parity import ADAMW, DROPOUT, SGD, check
from tests.tiny import FAMILIES

SEQUENCE = {"sequence_parallel": True}


def prove(pool: Pool, *sizes: int, parallel: dict[str, Any] | None = None, **given: Any) -> None:
    """The mesh against the single process; sizes: tp, dp, pp."""
    assert check(pool, *sizes, parallel={"zero": 1} | (parallel or {}), **given)


@pytest.mark.parametrize(
    ("tp", "dp", "pp"), [(1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (4, 2, 1), (2, 2, 2)]
)
@pytest.mark.parametrize(("family", "zero"), [("llama", 1), ("llama", 2), ("gpt2", 2)])
def test_meshes(pool: Pool, family: str, zero: int, tp: int, dp: int, pp: int) -> None:
    """Parts of parameters, parts that are only padding, tied tables on two stages; the norm counts
    every element once and clipping bites (field report D13).
    """
    prove(pool, tp, dp, pp, family=family, optimizer=ADAMW, model=DROPOUT, parallel={"zero": zero})


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("llama", "gpt2")])
def test_families_in_slices(pool: Pool, family: str) -> None:
    """With sequence parallelism: gradients that are parts over tp, owned in parts over dp."""
    prove(pool, 4, 2, 1, family=family, optimizer=SGD, seq_len=12, parallel=SEQUENCE | {"zero": 2})


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("zero_group", [1, 2, 4])
def test_hybrid_groups(pool: Pool, zero_group: int, zero: int) -> None:
    """Four replicas with four, two and one full sets of state."""
    prove(
        pool, 1, 4, 1, family="llama", optimizer=ADAMW, model={"ffn_size": 5, "num_layers": 1},
        parallel={"zero_group": zero_group, "zero": zero},
    )  # fmt: skip


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)])
def test_schedules(pool: Pool, schedule: str, chunks: int, zero: int) -> None:
    """Chunks that share a table; W long after I."""
    prove(
        pool, 1, 2, 2, family="gpt2", optimizer=ADAMW, model={"num_layers": 2 * chunks + 1},
        parallel={"schedule": schedule, "num_chunks": chunks, "zero": zero},
    )  # fmt: skip


@pytest.mark.parametrize("mask", ["rows", "all"])
def test_masked_labels(pool: Pool, mask: str) -> None:
    prove(pool, 1, 2, 1, family="llama", optimizer=ADAMW, mask=mask)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "olmo2"])
@pytest.mark.parametrize(("dtype", "zero"), [("bf16", 0), ("bf16", 1), ("bf16", 2), ("fp16", 1)])
def test_16_bits(pool: Pool, family: str, dtype: str, zero: int) -> None:
    """16-bit weights and activations against the oracle in fp32. bf16 keeps 8 bits (fp16 11), so an
    operation is off by 2^-9 at most; a gradient is the end of some 20 of them in a row: 20 * 2^-9
    = 4%. gemma3, with norms on both sides of its branches and of heads, has twice as many.
    """
    bound = 0.08 if family == "gemma3" else 0.04
    prove(
        pool, 2, 2, 1, family=family, optimizer=SGD, seq_len=12, rtol=bound, atol=1e-3,
        train={"dtype": dtype}, parallel=SEQUENCE | {"zero": zero},
    )  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_config(tmp_path_factory.mktemp("zero"))


def job(pool: Pool, config: Path, name: str, steps: int, more: list[str]) -> Path:
    overrides = [
        "model.tie_embeddings=true", "model.dropout=0.1", "optimizer.clip_grad=0.5",
        "train.resume=auto", "parallel.dp=2", "parallel.tp=2", f"train.steps={steps}",
        f"log.run_dir={config.parent / name}", *more,
    ]  # fmt: skip
    pool.run("tests.gloo.resume_jobs:run", 4, timeout=120, config=str(config), overrides=overrides)
    return config.parent / name


def test_a_checkpoint_does_not_tell_the_level(pool: Pool, config: Path) -> None:
    """Figures and every bit of weights and moments are those of a run without ZeRO."""
    plain = job(pool, config, "plain", 4, [])
    sharded = job(pool, config, "sharded", 4, ["parallel.zero=1"])
    for name in ("loss", "grad_norm"):
        assert runs.figures(sharded, name) == pytest.approx(runs.figures(plain, name), rel=1e-6)
    shapes = [
        {name: entry.shape for name, entry in Weights(step_folder(one, 4)).manifest.tensors.items()}
        for one in (plain, sharded)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_stopped_run_ends_as_an_unbroken_one(pool: Pool, config: Path, dtype: str) -> None:
    """Bit for bit: what is kept in fp32 is saved in fp32."""
    more = ["parallel.zero=1", f"train.dtype={dtype}"]
    straight = job(pool, config, f"straight-{dtype}", 6, more)
    job(pool, config, f"broken-{dtype}", 2, more)
    broken = job(pool, config, f"broken-{dtype}", 6, more)
    assert runs.figures(broken, "loss") == runs.figures(straight, "loss")
    ours, theirs = (runs.contents(step_folder(folder, 6)) for folder in (broken, straight))
    assert ours == theirs


def test_state_is_shared(pool: Pool) -> None:
    """Each of four replicas keeps a quarter of the moments, with level 2 of the gradients, but for
    padding.
    """
    whole, first, second = (
        pool.run("tests.gloo.zero_jobs:kept_elements", 4, zero=zero) for zero in (0, 1, 2)
    )
    moments, gradients = whole[0]
    for rank in (*first, *second):
        assert rank[0] < 0.3 * moments
    assert sum(rank[0] for rank in first) == sum(rank[0] for rank in second) == moments
    assert all(rank[1] >= gradients for rank in first)
    assert all(rank[1] < 0.3 * gradients for rank in second)


@pytest.mark.parametrize("pp", [1, 2])
def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: Pool, pp: int) -> None:
    """fp16: nothing moves, the scale is halved, the schedule waits; then training goes on. And the
    scale survives a save.
    """
    found = pool.run("tests.gloo.zero_jobs:overflow", 2 * pp, pp=pp)
    assert all(one == found[0] for one in found)
    skipped, scales, rates, still = found[0]
    assert skipped == [False, True, False, False]
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    assert rates == [0.01, 0.02, 0.02, 0.03]
    assert still
