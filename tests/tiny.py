"""Tiny models of every family and batches for tests: odd sizes, masked labels, uneven batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rankmesh.config.schema import (
    LogConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from rankmesh.data.loader import Microbatch
from rankmesh.nn import IGNORED
from rankmesh.specs.model import ModelSpec
from rankmesh.specs.rope import LinearScaling, YarnScaling
from rankmesh.testing.oracle import WholeBatch
from rankmesh.topology.batch import BatchPlan


def llama(**changes: Any) -> ModelSpec:
    """Grouped-query attention, SwiGLU, RMSNorm, rotary; vocabulary and feed-forward width odd."""
    fields: dict[str, Any] = {
        "family": "llama",
        "num_layers": 2,
        "hidden_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "ffn_size": 37,
        "vocab_size": 61,
        "max_seq_len": 32,
        "norm": "rmsnorm",
        "norm_eps": 1e-5,
        "mlp": "swiglu",
        "qkv_bias": False,
        "out_bias": False,
        "mlp_bias": False,
        "positions": "rotary",
        "tie_embeddings": False,
        "scale_residual_init": False,
        "init_std": 0.2,
    }
    return ModelSpec(**(fields | changes))


def gpt2(**changes: Any) -> ModelSpec:
    """Biases, LayerNorm, GELU, learned positions, tied head."""
    fields: dict[str, Any] = {
        "family": "gpt2",
        "num_layers": 2,
        "hidden_size": 24,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 6,
        "ffn_size": 37,
        "vocab_size": 61,
        "max_seq_len": 32,
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "mlp": "gelu_tanh",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "positions": "learned",
        "tie_embeddings": True,
        "scale_residual_init": True,
        "init_std": 0.2,
    }
    return ModelSpec(**(fields | changes))


def mistral(**changes: Any) -> ModelSpec:
    """Windows shorter than the samples in every layer."""
    return llama(**{"family": "mistral", "window": 4} | changes)


def qwen2(**changes: Any) -> ModelSpec:
    """Biases on queries, keys and values; windows in the second layer; tied head."""
    fields = {"qkv_bias": True, "window": 4, "window_pattern": "GL", "tie_embeddings": True}
    return llama(**{"family": "qwen2"} | fields | changes)


def qwen3(**changes: Any) -> ModelSpec:
    """Norms over each head; YaRN frequencies."""
    yarn = YarnScaling(factor=4.0, original_max_seq_len=8, beta_fast=2.0, beta_slow=0.1)
    return llama(**{"family": "qwen3", "qk_norm": "head", "rope_scaling": yarn} | changes)


def gemma2(**changes: Any) -> ModelSpec:
    """Norms around branches, gated GELU, local and global layers, soft caps that bite."""
    fields = {
        "norm": "rmsnorm_1p",
        "norm_place": "around",
        "mlp": "geglu_tanh",
        "window": 4,
        "window_pattern": "LG",
        "query_scalar": 5.0,
        "attention_softcap": 1.5,
        "logit_softcap": 2.0,
        "tie_embeddings": True,
        "scale_embedding": True,
    }
    return llama(**{"family": "gemma2"} | fields | changes)


def gemma3(**changes: Any) -> ModelSpec:
    """As gemma2 with norms over each head, two thetas and no cap of scores."""
    fields = {
        "qk_norm": "head",
        "rope_theta": 1000.0,
        "rope_local_theta": 100.0,
        "rope_scaling": LinearScaling(factor=3.0),
        "attention_softcap": 0.0,
    }
    return gemma2(**{"family": "gemma3"} | fields | changes)


def olmo2(**changes: Any) -> ModelSpec:
    """Norms after branches, and over all query heads and all key heads at once."""
    return llama(**{"family": "olmo2", "norm_place": "after", "qk_norm": "all"} | changes)


def phi3(**changes: Any) -> ModelSpec:
    """All heads with keys of their own, one window for all layers."""
    return llama(**{"family": "phi3", "num_kv_heads": 4, "window": 5} | changes)


FAMILIES = ("llama", "gpt2", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "phi3")


def config(
    *,
    tp: int = 1,
    dp: int = 1,
    pp: int = 1,
    parallel: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    bucket_mb: float = 0.01,
    run_dir: str = "run",
) -> RunConfig:
    """fp64, a global batch of 7 in microbatches of 2, several gradient buckets."""
    base_train = {
        "steps": 3,
        "global_batch_size": 7,
        "microbatch_size": 2,
        "dtype": "fp64",
        "seed": 5,
        "device": "cpu",
    }
    base_optimizer = {"name": "sgd", "lr": 0.05, "schedule": "constant", "clip_grad": 0.0}
    # Jobs get their arguments as JSON, which has no tuples.
    more = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in (parallel or {}).items()
    }
    return RunConfig(
        parallel=ParallelConfig(tp=tp, dp=dp, pp=pp, bucket_mb=bucket_mb, **more),
        train=TrainConfig(**(base_train | (train or {}))),
        optimizer=OptimizerConfig(**(base_optimizer | (optimizer or {}))),
        log=LogConfig(run_dir=run_dir),
    )


def batches(
    *, steps: int, global_batch: int, seq_len: int, vocab: int, mask: str = "some", seed: int = 3
) -> list[WholeBatch]:
    """Global batches. `mask`: "none", "some" labels ignored, or "rows": the first 3 rows have no
    valid label.
    """
    generator = torch.Generator().manual_seed(seed)
    made = []
    for step in range(steps):
        tokens = torch.randint(0, vocab, (global_batch, seq_len + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        if mask != "none":
            labels[torch.rand(labels.shape, generator=generator) < 0.3] = IGNORED
        if mask == "rows":
            labels[:3] = IGNORED
        if mask == "all" and step == 1:
            labels[:] = IGNORED
        samples = torch.arange(global_batch) + step * global_batch
        made.append(WholeBatch(tokens[:, :-1].contiguous(), labels, samples))
    return made


def microbatches(batch: WholeBatch, plan: BatchPlan, replica: int) -> list[Microbatch]:
    """This replica's rows of a global batch, cut by the rule that BatchPlan documents, padded where
    rows lack.
    """
    total, length = batch.tokens.shape
    made = []
    for j in range(-(-total // (plan.dp * plan.microbatch))):
        first = (j * plan.dp + replica) * plan.microbatch
        rows = [row for row in range(first, first + plan.microbatch) if row < total]
        pad = plan.microbatch - len(rows)
        made.append(
            Microbatch(
                tokens=_pad(batch.tokens[rows], pad, 0, length),
                labels=_pad(batch.labels[rows], pad, IGNORED, length),
                samples=torch.cat([batch.samples[rows], torch.full((pad,), -1)]),
            )
        )
    return made


def _pad(rows: Tensor, count: int, value: int, length: int) -> Tensor:
    return torch.cat([rows, torch.full((count, length), value)])
