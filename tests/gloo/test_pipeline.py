"""Pipelines: every schedule computes what one process computes, in whatever order it runs."""

from __future__ import annotations

from typing import Any

import pytest

from rankmesh.testing.spawn import Pool
from tests.covering import Case, covering
from tests.gloo.test_parity import ADAMW, DROPOUT, SGD, check

CHUNKS = {"interleaved": (1, 2, 3), "zb-v": (2,), "dualpipe-v": (2,)}
VALUES: dict[str, list[Any]] = {
    "schedule": ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"],
    "pp": [2, 3, 4],
    "num_chunks": [1, 2, 3],
    "layers": ["even", "uneven"],
    "microbatches": ["fewer", "equal", "no multiple"],
    "family": ["llama", "gpt2"],  # untied and tied
    "optimizer": ["sgd", "adamw"],
}
COVERED = covering(VALUES, lambda case: case["num_chunks"] in CHUNKS.get(case["schedule"], (1,)))
SCHEDULES_OF_ALL_KINDS = [("1f1b", 1), ("interleaved", 2), ("zb-h2", 1), ("zb-v", 2)]


def prove(pool: Pool, *sizes: int, **kwargs: Any) -> None:
    """The mesh against the single process; sizes: tp, dp, pp."""
    assert check(pool, *sizes, **kwargs)


def prove_case(pool: Pool, case: Case) -> None:
    """One case of the covering list."""
    assert set(case) == set(VALUES)
    pp, chunks = case["pp"], case["num_chunks"]
    batch = {"fewer": max(1, pp - 1), "equal": pp, "no multiple": 2 * pp + 1}[case["microbatches"]]
    model = DROPOUT | {"num_layers": pp * chunks + (case["layers"] == "uneven")}
    prove(
        pool,
        pp=pp,
        family=case["family"],
        model=model,
        optimizer={"sgd": SGD, "adamw": ADAMW}[case["optimizer"]],
        parallel={"schedule": case["schedule"], "num_chunks": chunks},
        train={"global_batch_size": batch, "microbatch_size": 1},
    )


@pytest.mark.parametrize("case", COVERED, ids=lambda case: "-".join(map(str, case.values())))
def test_every_schedule(pool: Pool, case: Case) -> None:
    """Field reports P03, P08, P15, P16, P17: loss, norm, each gradient and each weight, dropout on,
    tied weights on two stages.
    """
    prove_case(pool, case)


@pytest.mark.parametrize(
    ("tp", "dp", "pp"), [(2, 2, 2), (2, 1, 3), (2, 1, 4), (1, 2, 4), (1, 2, 2), (4, 1, 2)]
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_with_tensor_and_data_parallelism(
    pool: Pool, family: str, tp: int, dp: int, pp: int
) -> None:
    """Layers that do not divide, an uneven last microbatch, buckets of both chunks."""
    prove(pool, tp, dp, pp, family=family, optimizer=ADAMW, model=DROPOUT | {"num_layers": pp + 1})


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES_OF_ALL_KINDS)
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "olmo2"])
def test_families_on_a_whole_mesh(pool: Pool, family: str, schedule: str, chunks: int) -> None:
    """dp 2 x tp 2 x pp 2: gradients that are sums over tp, windows, tied tables."""
    prove(
        pool, 2, 2, 2, family=family, optimizer=SGD, model={"num_layers": 2 * chunks + 1},
        parallel={"schedule": schedule, "num_chunks": chunks},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("zb-h1", 1), ("dualpipe-v", 2), ("zb-v", 2)]
)
def test_other_schedules_on_a_whole_mesh(pool: Pool, schedule: str, chunks: int) -> None:
    """dp 2 x tp 2 x pp 2, a tied table in a family that has none by itself."""
    prove(
        pool, 2, 2, 2, family="llama", optimizer=ADAMW,
        model=DROPOUT | {"num_layers": 2 * chunks + 1, "tie_embeddings": True},
        parallel={"schedule": schedule, "num_chunks": chunks},
    )  # fmt: skip


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunks", [1, 2])
def test_tied_tables_wherever_they_are(pool: Pool, pp: int, tied: bool, chunks: int) -> None:
    """On one stage, on two stages of one rank, on two ranks."""
    prove(
        pool, 1, 1, pp, family="llama", optimizer=ADAMW,
        model={"tie_embeddings": tied, "num_layers": 5},
        parallel={"schedule": "interleaved", "num_chunks": chunks},
    )  # fmt: skip


@pytest.mark.parametrize("layout", [[0, 4], [4, 0], [1, 3]])
def test_a_given_layout(pool: Pool, layout: list[int]) -> None:
    """Also a stage with nothing but the table, and one with nothing but the head."""
    prove(
        pool, 1, 1, 2, family="gpt2", optimizer=ADAMW, model={"num_layers": 4},
        parallel={"layout": layout},
    )  # fmt: skip


@pytest.mark.parametrize("mask", ["none", "rows", "all"])
def test_masked_labels(pool: Pool, mask: str) -> None:
    """Field reports D02, P08: replicas with few or no valid labels under a pipeline."""
    prove(pool, 1, 2, 2, family="llama", optimizer=SGD, mask=mask)


@pytest.mark.parametrize("microbatch", [1, 2, 4, 8])
def test_the_microbatch_size_changes_nothing(pool: Pool, microbatch: int) -> None:
    """Field report P10: a global batch of 16 in microbatches of 1, 2, 4, 8."""
    train = {"global_batch_size": 16, "microbatch_size": microbatch}
    prove(pool, 1, 1, 2, family="llama", optimizer=ADAMW, mask="rows", train=train)


@pytest.mark.parametrize(("tp", "lengths"), [(2, [5, 7, 3, 9]), (1, [8, 16, 8])])
def test_microbatches_of_different_lengths(pool: Pool, tp: int, lengths: list[int]) -> None:
    """Field reports P04, P06: no length is taken from another microbatch."""
    found = pool.run("tests.gloo.pipeline_jobs:lengths", 2 * tp, tp=tp, sizes=lengths)
    assert len(found) == 2 * tp and max(found) < 1e-9


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_several_pipeline_runs_before_a_step(pool: Pool, runs: int) -> None:
    """Field report P07: gradients of several runs of the schedule are summed."""
    found = pool.run("tests.gloo.pipeline_jobs:several_runs", 2, runs=runs)
    assert len(found) == 2 and max(found) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "pp", "chunks", "microbatches"),
    [("1f1b", 4, 1, 6), ("interleaved", 2, 2, 4), ("zb-v", 2, 2, 5)],
)
def test_sleeping_ranks(pool: Pool, schedule: str, pp: int, chunks: int, microbatches: int) -> None:
    """Field report P12: 100 steps with a random sleep of 0 to 5 ms around every action end, and
    every loss is that of a run without.
    """
    results = pool.run(
        "tests.gloo.pipeline_jobs:sleeping", pp, timeout=240, schedule=schedule, chunks=chunks,
        microbatches=microbatches, steps=100,
    )  # fmt: skip
    assert len({tuple(losses) for losses in results}) == 1
    assert len(results[0]) == 100


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("dtype", "[14, 24] float32"),
        ("width", "[14, 25] float64"),
        ("stage", "pipeline rank 1 at RECV_F1.0: expected the activation of microbatch 0 by stage"),
    ],
)
def test_a_message_that_is_not_what_was_expected(pool: Pool, fault: str, says: str) -> None:
    """One line that names both sides' idea of it, and no hang."""
    reason, logs = pool.fail("tests.gloo.pipeline_jobs:strange_message", 2, fault=fault, timeout=30)
    assert "ended with exit code 1" in reason
    assert "MeshError: pipeline rank 1 at RECV_F1.0: expected" in logs and says in logs


def test_swapped_neighbours(pool: Pool) -> None:
    """Two ranks that are none take each other for neighbours: found before anything is computed."""
    reason, logs = pool.fail("tests.gloo.pipeline_jobs:swapped", 4, timeout=30)
    assert "ended with exit code 1" in reason
    assert (
        "pipeline rank 2 at RECV_F2.0: expected the activation of microbatch 0 by stage 1" in logs
    )
    assert "came the activation of microbatch 0 by stage 0, [14, 24] float64, from" in logs


def test_a_rank_that_does_not_come(pool: Pool) -> None:
    """The time-out names stage, microbatch, action and peer."""
    _, logs = pool.fail("tests.gloo.pipeline_jobs:absent", 2, timeout=20)
    assert "RECV_F (stage 1, microbatch 0) from pipeline rank 0 over pp [0, 1] failed" in logs


def test_what_was_sent_is_let_go(pool: Pool) -> None:
    """Of many microbatches two messages a stage are kept."""
    most = pool.run("tests.gloo.pipeline_jobs:kept", 2, microbatches=24)
    assert max(most) == 4
