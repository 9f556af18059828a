"""Faults that users of such systems have met, tried on 2 to 4 ranks."""

from __future__ import annotations

import math
import socket
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from rankmesh.config.load import load_config
from rankmesh.data.indexed import TokenFile
from rankmesh.data.order import SampleOrder
from rankmesh.data.samples import Samples
from rankmesh.testing.spawn import Pool
from tests import runs

JOBS = "tests.gloo.field_jobs"


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_shards_differ_and_replicas_are_equal(pool: Pool, family: str, tp: int) -> None:
    """Field report R05: no two slices of a weight are alike; equal slices are, bit for bit."""
    ranks = pool.run(f"{JOBS}:fresh_shards", tp, family=family, tp=tp, model={})
    by_name = defaultdict(set)
    for name, cut, kind, index, value, *_ in (row for rows in ranks for row in rows):
        by_name[name].add((index, value, cut, kind))
    for name, held in by_name.items():
        slices, values = {index for index, *_ in held}, {value for _, value, *_ in held}
        assert len(held) == len(slices), f"{name}: replicas of a slice differ"
        if any(cut and kind == "normal" for *_, cut, kind in held):
            assert len(values) == len(slices) > 1, f"{name}: two slices are alike"
        assert len(slices) > 1 or not any(cut for *_, cut, _ in held), name


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_scale_of_weights_does_not_depend_on_tp(pool: Pool, tp: int) -> None:
    """Field report R07: gathered 1024 x 1024 weights have the configured deviation within 1%.

    Projections into the residual stream have theirs, which falls with the depth.
    """
    model = {
        "num_layers": 1,
        "hidden_size": 1024,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 256,
        "ffn_size": 1024,
        "scale_residual_init": True,
    }
    ranks = pool.run(f"{JOBS}:fresh_shards", tp, family="llama", tp=tp, model=model)
    parts: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for name, _, kind, index, _, square, numel, std in (row for rows in ranks for row in rows):
        if kind == "normal":
            parts[name][index] = [square, numel, std]
    for name, slices in parts.items():
        square, numel, stds = (list(column) for column in zip(*slices.values(), strict=True))
        if sum(numel) < 1 << 20:
            continue
        depth = math.sqrt(2) if name.endswith(("attn.o.weight", "mlp.down.weight")) else 1.0
        assert stds[0] == pytest.approx(0.2 / depth)
        assert math.sqrt(sum(square) / sum(numel)) == pytest.approx(stds[0], rel=0.01), name


LAYOUTS = [("llama", 2, 1), ("llama", 1, 2), ("llama", 4, 1), ("gpt2", 2, 2)]


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize(("family", "tp", "dp"), LAYOUTS)
def test_the_logged_norm_is_that_of_the_gathered_gradient(
    pool: Pool, family: str, tp: int, dp: int, clip: float
) -> None:
    """Field report D13: replicated weights and, at tp 4, KV heads that two ranks hold count once.

    One number on all ranks; after clipping the whole gradient has the limit as its norm.
    """
    ranks = pool.run(f"{JOBS}:gathered_norms", tp * dp, family=family, tp=tp, dp=dp, clip=clip)
    for logged, whole, clipped in (step for steps in ranks for step in steps):
        assert logged == pytest.approx(whole, rel=1e-9)
        assert not clip or clipped == pytest.approx(clip, rel=1e-4)
    assert all(steps == ranks[0] for steps in ranks)


@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_two_models_in_one_world(pool: Pool, axis: str) -> None:
    """Field report G08: groups {0,1}, {2,3} and {0,2}, {1,3}, handed in and never looked up.

    Each model's losses, norms and weights are those of a 2-rank world of its own, bit for bit.
    """
    job = f"{JOBS}:independent_models"
    alone = [pool.run(job, 2, pairs=[[0, 1]], axis=axis, seed=seed) for seed in (1, 2)]
    assert alone[0][0][1] != alone[1][0][1]
    for pairs in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        found = pool.run(job, 4, pairs=pairs, axis=axis, seed=1)
        assert [[found[rank] for rank in pair] for pair in pairs] == alone


@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 2)])
def test_unused_parameters_have_the_gradient_zero(pool: Pool, tp: int, dp: int) -> None:
    """Field report D09: a vector never used and one used in every second step; no step hangs."""
    for steps in pool.run(f"{JOBS}:sometimes_used", tp * dp, tp=tp, dp=dp):
        assert [never for never, _ in steps] == [0.0] * 4
        assert [second > 0 for _, second in steps] == [False, True, False, True]


def test_replicas_that_use_different_parameters(pool: Pool) -> None:
    """Field report D10: each rank has a branch of its own, in a bucket of its own.

    Both gradients are the sum of what the ranks computed, and both weights equal on all ranks:
    buckets go out in one order, whatever the order in which backward completes them.
    """
    ranks = pool.run(f"{JOBS}:branches", 2)
    for found in ranks:
        assert found["worst"] <= 1e-12 and min(found["sizes"]) > 1e-3
    assert ranks[0]["weights"] == ranks[1]["weights"]


@pytest.mark.parametrize(
    ("counts", "loss"),
    [([[1, 1, 1, 1], [1, 1, 1, 1]], 4.0), ([[1, 1, 1, 5], [2, 1, 0, 1]], 53 / 12)],
)
def test_the_logged_loss_is_weighted_by_targets(
    pool: Pool, counts: list[list[int]], loss: float
) -> None:
    """Field report L12: over microbatches and replicas, also where one has no target."""
    means = [[1.0, 2.0, 3.0, 6.0], [2.0, 4.0, 5.0, 9.0]]
    found = pool.run(f"{JOBS}:forced_loss", 2, means=means, counts=counts)
    assert found == [pytest.approx(loss, rel=1e-12)] * 2


DOWN = "layers.1.mlp.down.weight"
UP = "layers.0.mlp.up.weight"
SAYINGS = [
    ("gradient", 1, 2, f"the gradient of {DOWN} is not finite, first on rank 1"),
    ("gradient", 2, 2, f"the gradient of {DOWN} is not finite, first on rank 1"),
    ("weight", 2, 1, f"the weight {DOWN} is not finite, first on rank 1"),
    ("value", 2, 1, "a value of the forward pass is not finite, first on rank 1"),
    ("once", 1, 2, "but a replay of the step is: a transient fault"),
    ("overflow", 1, 2, "finite on every rank, but their sum or its norm overflows"),
]


@pytest.mark.parametrize(("fault", "tp", "dp", "says"), SAYINGS)
def test_a_step_that_is_not_finite_stops_every_rank(
    pool: Pool, fault: str, tp: int, dp: int, says: str
) -> None:
    """Field report L15: rank 1 goes wrong in step 3; all ranks say the same and keep their weights.

    The first rank is named, not the first to which the sums over tp carried the fault.
    """
    expect_named(pool, [tp, dp, 1], fault, 1, DOWN, says)


@pytest.mark.parametrize(
    ("fault", "sizes", "zero", "rank", "name", "says"),
    [
        ("weight", [1, 1, 2], 0, 1, DOWN, f"the weight {DOWN} is not finite, first on rank 1"),
        (
            "value",
            [1, 1, 2],
            0,
            0,
            UP,
            "a value of the forward pass is not finite, first on rank 0",
        ),
        ("value", [1, 1, 2], 0, 1, DOWN, "the loss is not finite, first on rank 1"),
        ("gradient", [1, 1, 2], 0, 0, UP, f"the gradient of {UP} is not finite, first on rank 0"),
        (
            "gradient",
            [1, 2, 1],
            2,
            1,
            DOWN,
            f"the gradient of {DOWN} is not finite, first on rank 1",
        ),
        (
            "gradient",
            [1, 2, 2],
            1,
            3,
            DOWN,
            f"the gradient of {DOWN} is not finite, first on rank 3",
        ),
        ("overflow", [1, 2, 1], 2, 1, DOWN, "finite on every rank, but their sum or its norm"),
    ],
)
def test_over_pipelines_and_shards_too(
    pool: Pool, fault: str, sizes: list[int], zero: int, rank: int, name: str, says: str
) -> None:
    """The stage where it began is named, not one that it was handed to."""
    expect_named(pool, sizes, fault, rank, name, says, zero)


def expect_named(
    pool: Pool, sizes: list[int], fault: str, rank: int, name: str, says: str, zero: int = 0
) -> None:
    """Every rank says it, and keeps its weights."""
    found = pool.run(
        f"{JOBS}:poisoned", math.prod(sizes), sizes=sizes, fault=fault, rank=rank, name=name,
        zero=zero,
    )  # fmt: skip
    for number, one in enumerate(found):
        assert one["said"].startswith("step 3: ") and says in one["said"]
        assert one["untouched"] and (one["finite"] or (fault, number) == ("weight", rank))
    assert len({one["said"] for one in found}) == 1


# --- whole runs, as the command makes them


def train(pool: Pool, config: Path, name: str, ranks: int, *changes: str, **options: Any) -> Any:
    """Results of a run of the config in a folder `name`, one a rank."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    overrides = [f"log.run_dir={config.parent / name}", *changes]
    return pool.run(
        f"{JOBS}:train_job", ranks, config=str(config), overrides=overrides, port=port, **options
    )


def test_every_layout_trains_the_same(pool: Pool, tmp_path: Path) -> None:
    """One process, dp 2 and tp 2: losses equal to 1e-5, from the same samples; twice: bit for bit.

    The replicas of dp share the samples out.
    """
    config = runs.write_config(tmp_path)
    (one,) = train(pool, config, "one", 1)
    dp = train(pool, config, "dp", 2, "parallel.dp=2")
    tp = train(pool, config, "tp", 2, "parallel.tp=2")
    again = train(pool, config, "again", 2, "parallel.tp=2")
    assert one["samples"] == list(range(36))
    assert sorted(dp[0]["samples"] + dp[1]["samples"]) == list(range(36))
    assert [rank["samples"] for rank in tp] == [one["samples"]] * 2
    for ranks in (dp, tp):
        assert ranks[0]["losses"] == ranks[1]["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert ranks[0]["valid"] == pytest.approx(one["valid"], rel=1e-5)
    assert again == tp


def test_evaluation_changes_nothing_on_a_mesh(pool: Pool, tmp_path: Path) -> None:
    """Field report X16: with and without evaluations, dropout on, a run has the same losses."""
    config = runs.write_config(tmp_path)
    changes = ("parallel.dp=2", "model.dropout=0.1")
    watched = train(pool, config, "watched", 2, *changes, "train.eval_every=1")
    alone = train(pool, config, "alone", 2, *changes, "data.valid=[]")
    assert [rank["losses"] for rank in watched] == [rank["losses"] for rank in alone]
    assert watched[0]["valid"] == watched[1]["valid"] > 0 and alone[0]["valid"] is None


def test_step_one_has_the_loss_of_the_folder(pool: Pool, tmp_path: Path) -> None:
    """`model.init_from` on tp 2 x dp 2: the first loss is that of `transformers` on those rows."""
    torch.manual_seed(3)
    kind: Any = LlamaConfig
    theirs = LlamaForCausalLM(
        kind(
            vocab_size=runs.VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.2,
            attn_implementation="eager",
        )
    )
    theirs.save_pretrained(tmp_path / "hf")
    config = runs.write_config(tmp_path)
    text = config.read_text(encoding="ascii")
    model = f'[model]\ninit_from = "{tmp_path / "hf"}"\n'
    config.write_text(model + text[text.index("[parallel]") :], encoding="ascii")
    ranks = train(pool, config, "run", 4, "parallel.tp=2", "parallel.dp=2", "train.steps=1")
    samples = Samples([TokenFile(tmp_path / "train")], runs.SEQ_LEN)
    order = SampleOrder(load_config(config).data.seed, len(samples))
    rows = torch.stack([torch.from_numpy(samples.sample(order.index(k))) for k in range(6)])
    with torch.no_grad():
        logits = theirs(input_ids=rows[:, :-1], use_cache=False).logits
        expected = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
    assert [rank["losses"] for rank in ranks] == [[pytest.approx(expected, rel=1e-4)]] * 4


@pytest.mark.slow
def test_slow_files_meet_no_time_out(pool: Pool, tmp_path: Path) -> None:
    """Field report U07: a rank that reads weights, and one that writes them, for three times as
    long as a collective may take.
    """
    config = runs.write_config(tmp_path)
    slow = {"assemble": [0, 4.5], "save": [1, 4.5]}
    ranks = train(pool, config, "run", 2, "parallel.dp=2", "log.timeout_s=1.5", slow=slow)
    assert ranks[0]["losses"] == ranks[1]["losses"] and len(ranks[0]["losses"]) == 6
    log = (tmp_path / "run" / "log" / "rank-00000.log").read_text(encoding="utf-8")
    assert "parameters (llama), 40 samples" in log
