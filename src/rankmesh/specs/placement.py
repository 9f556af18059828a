"""The placement table of a model: every parameter's name, shape, init, decay and split over the
mesh.

Owns which logical tensors a spec has and how each is cut. It knows no torch and no process group.

Shapes: V vocabulary, P positions, H hidden, F feed-forward, Q = num_heads * head_dim, K =
num_kv_heads * head_dim. Matrices are [out, in].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rankmesh.specs.model import GATED, ModelSpec
from rankmesh.topology import fit
from rankmesh.topology.params import Init, ParamSpec, ParamTable, Shard
from rankmesh.topology.plan import ParallelPlan
from rankmesh.topology.split import even, given_layers, layers_of_stages

# Softmax and its gradient pass a few times over the logits, which a product touches once.
_LOSS_COLUMNS = 8

Kind = Literal["embedding", "matrix", "residual", "norm", "bias"]
Cut = Literal["vocab", "query", "kv", "query_in", "ffn", "ffn_in", "head", "whole"]


@dataclass(frozen=True)
class Part:
    """One logical tensor before it is placed.

    kind decides init and decay: "residual" is a matrix that writes into the residual stream. cut
    decides the tensor-parallel split: "query", "kv", "ffn" and "vocab" split dim 0, "query_in" and
    "ffn_in" split dim 1; "head" is whole on every rank, which uses it for its own heads alone.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    cut: Cut


def parts(spec: ModelSpec) -> Iterator[Part]:
    """The logical tensors of a model in the order in which a forward pass first uses them."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    yield Part("embed.weight", (vocab, hidden), "embedding", "vocab")
    if spec.positions == "learned":
        yield Part("positions.weight", (spec.max_seq_len, hidden), "embedding", "whole")
    for layer in range(spec.num_layers):
        for name, inner in (("attn", _attention), ("mlp", _mlp)):
            branch = f"layers.{layer}.{name}"
            if spec.norm_place != "after":
                yield from _norm(spec, f"{branch}_norm")
            yield from inner(spec, branch)
            if spec.norm_place != "before":
                yield from _norm(spec, f"{branch}_post_norm")
    yield from _norm(spec, "norm")
    if not spec.tie_embeddings:
        yield Part("head.weight", (vocab, hidden), "matrix", "vocab")


def param_table(
    spec: ModelSpec,
    plan: ParallelPlan,
    *,
    decay_norms: bool = False,
    decay_biases: bool = False,
    decay_embeddings: bool = False,
) -> ParamTable:
    """Every parameter of `spec` placed by `plan`, in order of use. A tied embedding appears once.

    Weight decay acts on matrices; the switches add the other kinds (an untied head is a matrix, a
    tied one an embedding). Raises PlanError, in one line, where the plan does not fit the model.
    """
    fit.check_model(
        plan,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        ffn_size=spec.ffn_size,
        vocab_size=spec.vocab_size,
        num_layers=spec.num_layers,
    )
    cuts = _boundaries(spec, plan.tp)
    ranges = stage_layers(spec, plan)
    decay = {
        "matrix": True,
        "residual": True,
        "norm": decay_norms,
        "bias": decay_biases,
        "embedding": decay_embeddings,
    }
    return ParamTable(
        tuple(
            ParamSpec(
                name=part.name,
                shape=part.shape,
                init=_init(spec, part.kind),
                placements={"tp": cuts[part.cut]} if part.cut in cuts else {},
                grad_sum=_grad_sum(spec, plan, part),
                decay=decay[part.kind],
                stages=_stages(spec, part, ranges),
            )
            for part in parts(spec)
        )
    )


def stage_layers(spec: ModelSpec, plan: ParallelPlan) -> tuple[range, ...]:
    """The layers of each pipeline stage: as `plan.layout` has them, else balanced by cost.

    The cost of a layer or of the head is its number of matrix elements: each costs 2 operations a
    token forward. Attention scores, which depend on the length of samples, are left out. The
    loss counts as a few more columns of the head, a lookup as one row.
    """
    if plan.layout is not None:
        return given_layers(plan.layout)
    costs = [0.0] * spec.num_layers
    for part in parts(spec):
        if part.name.startswith("layers.") and len(part.shape) == 2:
            costs[int(part.name.split(".")[1])] += math.prod(part.shape)
    head = spec.vocab_size * (spec.hidden_size + _LOSS_COLUMNS)
    return layers_of_stages(costs, plan.num_stages, first=spec.hidden_size, last=head)


def num_params(spec: ModelSpec) -> int:
    """Parameters of the whole model, each logical element once."""
    return sum(math.prod(part.shape) for part in parts(spec))


def kv_replicas(spec: ModelSpec, plan: ParallelPlan) -> int:
    """Neighbouring tp ranks that hold the same KV head: 1 unless tp exceeds the number of KV
    heads."""
    return fit.kv_replicas(plan.tp, spec.num_kv_heads)


def _norm(spec: ModelSpec, name: str) -> Iterator[Part]:
    yield Part(f"{name}.weight", (spec.hidden_size,), "norm", "whole")
    if spec.norm == "layernorm":
        yield Part(f"{name}.bias", (spec.hidden_size,), "bias", "whole")


def _attention(spec: ModelSpec, name: str) -> Iterator[Part]:
    hidden = spec.hidden_size
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield from _linear(f"{name}.q", query, hidden, "query", spec.qkv_bias)
    yield from _linear(f"{name}.k", kv, hidden, "kv", spec.qkv_bias)
    yield from _linear(f"{name}.v", kv, hidden, "kv", spec.qkv_bias)
    if spec.qk_norm == "head":
        for one in ("q", "k"):
            yield Part(f"{name}.qk_norm.{one}.weight", (spec.head_dim,), "norm", "head")
    elif spec.qk_norm == "all":
        yield Part(f"{name}.qk_norm.q.weight", (query,), "norm", "query")
        yield Part(f"{name}.qk_norm.k.weight", (kv,), "norm", "kv")
    yield from _linear(f"{name}.o", hidden, query, "query_in", spec.out_bias)


def _mlp(spec: ModelSpec, name: str) -> Iterator[Part]:
    hidden, ffn = spec.hidden_size, spec.ffn_size
    if spec.mlp in GATED:
        yield from _linear(f"{name}.gate", ffn, hidden, "ffn", spec.mlp_bias)
    yield from _linear(f"{name}.up", ffn, hidden, "ffn", spec.mlp_bias)
    yield from _linear(f"{name}.down", hidden, ffn, "ffn_in", spec.mlp_bias)


def _linear(name: str, out: int, inner: int, cut: Cut, bias: bool) -> Iterator[Part]:
    row = cut in ("query_in", "ffn_in")
    yield Part(f"{name}.weight", (out, inner), "residual" if row else "matrix", cut)
    if bias:
        # A row layer's bias is added once, after the sum over tp, so every rank holds the whole of
        # it.
        yield Part(f"{name}.bias", (out,), "bias", "whole" if row else cut)


def _init(spec: ModelSpec, kind: Kind) -> Init:
    if kind == "norm":
        return Init("zeros" if spec.norm == "rmsnorm_1p" else "ones")
    if kind == "bias":
        return Init("zeros")
    if kind == "residual" and spec.scale_residual_init:
        return Init("normal", spec.init_std / math.sqrt(2 * spec.num_layers))
    return Init("normal", spec.init_std)


def _grad_sum(spec: ModelSpec, plan: ParallelPlan, part: Part) -> tuple[str, ...]:
    """Groups over which this rank's gradient of `part` is only a part of the sum."""
    if part.cut == "kv" and kv_replicas(spec, plan) > 1:
        # Each holder of a KV head sees only its own query heads.
        return ("tp_rep",)
    if part.cut == "head" and plan.tp > 1:
        # One weight for all heads, of which each rank has only some.
        return ("tp",)
    if part.cut == "whole" and plan.sequence_parallel and plan.tp > 1:
        # Outside the matmuls each rank sees only its slice of the sequence.
        return ("tp",)
    return ()


def _stages(spec: ModelSpec, part: Part, ranges: Sequence[range]) -> tuple[int, ...]:
    """Pipeline stages that hold `part`: two for a tied embedding, the last stage's head."""
    last = len(ranges) - 1
    if part.name.startswith("layers."):
        layer = int(part.name.split(".")[1])
        return tuple(stage for stage, layers in enumerate(ranges) if layer in layers)
    if part.name == "embed.weight":
        return (0, last) if spec.tie_embeddings and last > 0 else (0,)
    return (0,) if part.name == "positions.weight" else (last,)


def _boundaries(spec: ModelSpec, tp: int) -> Mapping[str, Shard]:
    """Cut name -> placement over tp. KV heads are split as evenly as they go, or held by several
    ranks where tp exceeds them; query heads follow their KV head.
    """
    ffn, vocab = even(spec.ffn_size, tp), even(spec.vocab_size, tp)
    if tp <= spec.num_kv_heads:
        replicas = 1
        kv_heads = even(spec.num_kv_heads, tp)
        query_heads = tuple(head * spec.query_groups for head in kv_heads)
    else:
        replicas = tp // spec.num_kv_heads
        kv_heads = tuple(range(spec.num_kv_heads + 1))
        query_heads = even(spec.num_heads, tp)
    query = tuple(head * spec.head_dim for head in query_heads)
    kv = tuple(head * spec.head_dim for head in kv_heads)
    return {
        "vocab": Shard(0, vocab),
        "query": Shard(0, query),
        "kv": Shard(0, kv, replicas),
        "query_in": Shard(1, query),
        "ffn": Shard(0, ffn),
        "ffn_in": Shard(1, ffn),
    }
