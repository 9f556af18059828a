"""One step on any mesh equals one step on one process (DESIGN section 9), in fp64 and fp32."""

from __future__ import annotations

from typing import Any

import pytest

from rankmesh.testing.spawn import Pool
from tests.tiny import FAMILIES

LAYOUTS = [(1, 2), (2, 1), (2, 2), (4, 1), (1, 4), (4, 2)]
ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.5}
SGD = {"name": "sgd", "lr": 0.05, "clip_grad": 0.0}
OTHERS = [family for family in FAMILIES if family not in ("llama", "gpt2")]
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}


def check(
    pool: Pool, tp: int = 1, dp: int = 1, pp: int = 1, **kwargs: Any
) -> list[dict[str, float]]:
    """The largest differences on each rank."""
    results = pool.run(
        "tests.gloo.parity:case", tp * dp * pp, tp=tp, dp=dp, pp=pp, timeout=90, **kwargs
    )
    assert len(results) == tp * dp * pp
    for result in results:
        assert {"loss", "norm", "gradient", "weight"} <= set(result)
    return results


@pytest.mark.parametrize(("tp", "dp"), LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_sgd(pool: Pool, family: str, tp: int, dp: int) -> None:
    """SGD shows constant factors that Adam hides; tp 4 exceeds llama's 2 KV heads (field reports
    T01, T02, D13).
    """
    check(pool, tp, dp, family=family, optimizer=SGD)


@pytest.mark.parametrize(("tp", "dp"), LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adamw_with_clipping_and_dropout(pool: Pool, family: str, tp: int, dp: int) -> None:
    """Decay, clipping that bites, and the single process's dropout masks."""
    check(pool, tp, dp, family=family, optimizer=ADAMW, model=DROPOUT)


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("family", OTHERS)
def test_families(pool: Pool, family: str, tp: int, dp: int) -> None:
    """Windows, soft caps, norms of queries and keys, norms around and after branches (DESIGN
    section 4: gradients of norms that all heads share are summed over tp).
    """
    check(pool, tp, dp, family=family, optimizer=SGD)


@pytest.mark.parametrize("family", OTHERS)
def test_families_with_adamw_and_dropout(pool: Pool, family: str) -> None:
    """Every family takes the explicit attention path too."""
    check(pool, 2, 2, family=family, optimizer=ADAMW, model=DROPOUT)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gemma3", "olmo2"])
def test_families_with_fewer_kv_heads_than_tp(pool: Pool, family: str) -> None:
    """tp 4 with 2 KV heads: holders of one key head share its norm, and count once in a mean over
    all heads (field report T01).
    """
    check(pool, 4, 1, family=family, optimizer=SGD)


@pytest.mark.parametrize("loss", [{"z_loss": 0.01}, {"label_smoothing": 0.1}])
def test_terms_of_a_capped_loss(pool: Pool, loss: dict[str, float]) -> None:
    """The terms are those of the capped logits."""
    check(pool, 2, 1, family="gemma2", optimizer=SGD, train=loss)


@pytest.mark.parametrize(
    ("tp", "family", "model"),
    [
        (3, "olmo2", {"num_heads": 8, "num_kv_heads": 4, "head_dim": 6}),
        (2, "llama", {"qk_norm": "all", "qkv_bias": True, "logit_softcap": 1.0}),
        (2, "gpt2", {"qk_norm": "head", "window": 3, "window_pattern": "GL"}),
    ],
)
def test_parts_in_other_families(pool: Pool, tp: int, family: str, model: dict[str, Any]) -> None:
    """Uneven heads under norms over all of them; parts that a family does not have by itself."""
    check(pool, tp, 1, family=family, optimizer=ADAMW, model=model)


@pytest.mark.parametrize("mask", ["none", "rows", "all"])
def test_masked_labels(pool: Pool, mask: str) -> None:
    """Field reports D01, D02, L11: replicas with few, none or (in step 2) not one valid label."""
    check(pool, 2, 2, family="llama", optimizer=ADAMW, mask=mask)


@pytest.mark.parametrize("microbatch", [1, 2, 4, 8])
def test_the_microbatch_size_changes_nothing(pool: Pool, microbatch: int) -> None:
    """Field reports D05, P10: the same batch of 8 with very uneven masks in microbatches of 1, 2,
    4, 8.
    """
    train = {"global_batch_size": 8, "microbatch_size": microbatch}
    check(pool, 1, 2, family="llama", optimizer=SGD, mask="rows", train=train)


@pytest.mark.parametrize(("global_batch", "microbatch"), [(1, 1), (1, 2), (3, 1), (5, 2), (9, 4)])
def test_uneven_batches(pool: Pool, global_batch: int, microbatch: int) -> None:
    """Global batches that do not divide; replicas that hold only padding."""
    train = {"global_batch_size": global_batch, "microbatch_size": microbatch}
    check(pool, 1, 4, family="gpt2", optimizer=ADAMW, train=train)


@pytest.mark.parametrize(
    "loss", [{"z_loss": 0.01}, {"label_smoothing": 0.1}, {"z_loss": 0.01, "label_smoothing": 0.2}]
)
def test_terms_of_the_loss(pool: Pool, loss: dict[str, float]) -> None:
    """z-loss and label smoothing have the exact gradient over a split vocabulary."""
    check(pool, 2, 2, family="llama", optimizer=SGD, train=loss)


@pytest.mark.parametrize(
    ("tp", "model"),
    [
        (2, {"num_heads": 6, "num_kv_heads": 3, "head_dim": 4}),
        (3, {"num_heads": 8, "num_kv_heads": 4, "head_dim": 6, "hidden_size": 20}),
        (4, {"num_heads": 8, "num_kv_heads": 1, "head_dim": 4}),
        (2, {"tie_embeddings": True, "vocab_size": 257}),
        (4, {"ffn_size": 5, "vocab_size": 7, "num_layers": 1}),
        (2, {"num_layers": 3, "num_kv_heads": 4}),
    ],
)
def test_odd_shapes(pool: Pool, tp: int, model: dict[str, Any]) -> None:
    """Heads, feed-forward and vocabulary that do not divide by tp; one KV head; tied llama."""
    check(pool, tp, 1, family="llama", optimizer=ADAMW, model=model)


def test_untied_gpt2_with_momentum(pool: Pool) -> None:
    optimizer = SGD | {"momentum": 0.9, "weight_decay": 0.01, "clip_grad": 1.0}
    check(pool, 2, 2, family="gpt2", optimizer=optimizer, model={"tie_embeddings": False})


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_fp32(pool: Pool, family: str, tp: int, dp: int) -> None:
    """The smaller fp32 suite: 1e-5 of the tensor's largest value, AdamW with eps 1e-4."""
    check(
        pool, tp, dp, family=family, rtol=1e-5, atol=1e-6, train={"dtype": "fp32"},
        optimizer=ADAMW | {"eps": 1e-4},
    )  # fmt: skip


def test_odd_vocabulary_for_50_steps(pool: Pool) -> None:
    """Field report T14: vocabulary 257 over tp 2, fp32, 50 steps: losses equal to 1e-4."""
    check(
        pool, 2, 1, family="llama", rtol=1e-4, atol=1e-5, model={"vocab_size": 257},
        train={"dtype": "fp32", "steps": 50}, optimizer=ADAMW | {"lr": 1e-3, "eps": 1e-4},
    )  # fmt: skip


def test_the_proof_can_fail(pool: Pool) -> None:
    """A mesh whose optimizer differs from the oracle's by 1% is found out."""
    reason, logs = pool.fail(
        "tests.gloo.parity:case", 2, tp=2, dp=1, family="llama", optimizer=SGD, rtol=1e-9, skew=1.01
    )
    assert "ended with exit code 1" in reason and "loss of step 2" in logs
