"""The placement table: names, shapes, init, decay, and slices that tile for any tp."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.errors import PlanError
from rankmesh.specs.families import FAMILIES
from rankmesh.specs.model import ModelSpec, make_spec
from rankmesh.specs.placement import kv_replicas, num_params, param_table, parts
from rankmesh.specs.presets import preset
from rankmesh.topology.params import ParamSpec, Shard
from rankmesh.topology.plan import ParallelPlan


@st.composite
def specs_and_tp(draw: st.DrawFn) -> tuple[ModelSpec, int]:
    """A random spec, odd sizes included, and a tp that fits its heads."""
    kv_heads = draw(st.integers(1, 6))
    group = draw(st.integers(1, 6))
    replicas = draw(st.sampled_from([n for n in range(1, group + 1) if group % n == 0]))
    tp = draw(st.one_of(st.integers(1, kv_heads), st.just(kv_heads * replicas)))
    family = draw(st.sampled_from(list(FAMILIES)))
    fields: dict[str, Any] = {
        "family": family,
        "num_layers": draw(st.integers(1, 3)),
        "hidden_size": draw(st.integers(1, 20)),
        "num_heads": kv_heads * group,
        "num_kv_heads": kv_heads,
        "head_dim": draw(st.integers(1, 4)) * 2,
        "ffn_size": draw(st.integers(tp, 60)),
        "vocab_size": draw(st.integers(tp, 80)),
        "max_seq_len": draw(st.integers(1, 9)),
    }
    for switch in ("qkv_bias", "out_bias", "mlp_bias", "tie_embeddings"):
        fields[switch] = draw(st.booleans())
    plain = FAMILIES[family].defaults["norm"] == "rmsnorm"
    fields["qk_norm"] = draw(st.sampled_from(["none", "head", *(["all"] if plain else [])]))
    return make_spec(**fields), tp


def owners(param: ParamSpec, tp: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How many first holders each element of the global tensor has."""
    count = np.zeros(param.shape, dtype=np.int64)
    for rank in range(tp):
        if param.is_first_holder({"tp": rank}):
            count[param.slices({"tp": rank})] += 1
    return count


@given(specs_and_tp())
def test_slices_tile_and_each_element_has_one_first_holder(case: tuple[ModelSpec, int]) -> None:
    spec, tp = case
    table = param_table(spec, ParallelPlan(tp=tp))
    assert table.numel == num_params(spec)
    for param in table:
        assert np.array_equal(owners(param, tp), np.ones(param.shape, dtype=np.int64)), param.name
        for placement in param.placements.values():
            assert isinstance(placement, Shard) and placement.axis_size == tp
        assert all(min(param.local_shape({"tp": rank})) > 0 for rank in range(tp))


def heads_of(param: ParamSpec, rank: int, head_dim: int, dim: int) -> range:
    """Whole heads held along `dim`."""
    held = param.slices({"tp": rank})[dim]
    assert held.start % head_dim == held.stop % head_dim == 0
    return range(held.start // head_dim, held.stop // head_dim)


@given(specs_and_tp())
def test_query_heads_sit_with_their_kv_head(case: tuple[ModelSpec, int]) -> None:
    """Field report T02: on every rank the map from query to KV heads is that of the whole model."""
    spec, tp = case
    table = param_table(spec, ParallelPlan(tp=tp))
    for rank in range(tp):
        query = heads_of(table["layers.0.attn.q.weight"], rank, spec.head_dim, 0)
        for name in ("k", "v"):
            kv = heads_of(table[f"layers.0.attn.{name}.weight"], rank, spec.head_dim, 0)
            # Attention on one rank shares its KV heads out evenly among its query heads.
            assert len(query) % len(kv) == 0
            group = len(query) // len(kv)
            assert [kv[i // group] for i in range(len(query))] == [
                head // spec.query_groups for head in query
            ]
        assert heads_of(table["layers.0.attn.o.weight"], rank, spec.head_dim, 1) == query


@given(specs_and_tp())
def test_biases_follow_their_matrix(case: tuple[ModelSpec, int]) -> None:
    """A column bias is cut like its rows; a row bias is whole on every rank."""
    spec, tp = case
    table = {param.name: param for param in param_table(spec, ParallelPlan(tp=tp))}
    for name, param in table.items():
        matrix = table.get(name.replace(".bias", ".weight"))
        if not name.endswith(".bias") or matrix is None or len(matrix.shape) == 1:
            continue
        row = name.split(".")[-2] in ("o", "down")
        for rank in range(tp):
            whole = (slice(0, param.shape[0]),)
            assert param.slices({"tp": rank}) == (whole if row else matrix.slices({"tp": rank})[:1])


def test_kv_heads_are_replicated_when_tp_exceeds_them() -> None:
    """Field report T01: 8 query heads, 2 KV heads, tp 4."""
    spec = make_spec(
        family="llama", num_layers=1, hidden_size=32, num_heads=8, num_kv_heads=2,
        vocab_size=64, max_seq_len=8, qkv_bias=True,
    )  # fmt: skip
    plan = ParallelPlan(tp=4)
    table = param_table(spec, plan)
    assert kv_replicas(spec, plan) == 2
    for name in ("k.weight", "v.weight", "k.bias", "v.bias"):
        param = table[f"layers.0.attn.{name}"]
        assert param.grad_sum == ("tp_rep",)
        assert [param.slices({"tp": r})[0] for r in range(4)] == [
            slice(0, 4), slice(0, 4), slice(4, 8), slice(4, 8),
        ]  # fmt: skip
        assert [param.is_first_holder({"tp": r}) for r in range(4)] == [True, False, True, False]
    query = table["layers.0.attn.q.weight"]
    assert query.grad_sum == ()
    assert [query.slices({"tp": r})[0].start for r in range(4)] == [0, 8, 16, 24]


def test_uneven_kv_heads_keep_whole_groups() -> None:
    """3 KV heads of 2 query heads each over tp 2: 2 + 1 KV heads, 4 + 2 query heads."""
    spec = make_spec(
        family="llama", num_layers=1, hidden_size=24, num_heads=6, num_kv_heads=3, head_dim=4,
        vocab_size=7, max_seq_len=8,
    )  # fmt: skip
    table = param_table(spec, ParallelPlan(tp=2))
    shapes = {
        name: [table[name].local_shape({"tp": rank}) for rank in range(2)]
        for name in ("layers.0.attn.q.weight", "layers.0.attn.k.weight", "embed.weight")
    }
    assert shapes == {
        "layers.0.attn.q.weight": [(16, 24), (8, 24)],
        "layers.0.attn.k.weight": [(8, 24), (4, 24)],
        "embed.weight": [(4, 24), (3, 24)],
    }


@pytest.mark.parametrize("tp", [3, 5, 16])
def test_a_tp_that_no_head_count_allows_is_refused(tp: int) -> None:
    """Field report T01: the refusal comes before any weight is made and names both numbers."""
    spec = make_spec(
        family="llama", num_layers=1, hidden_size=32, num_heads=8, num_kv_heads=2,
        vocab_size=64, max_seq_len=8,
    )  # fmt: skip
    with pytest.raises(PlanError) as caught:
        param_table(spec, ParallelPlan(tp=tp))
    assert f"tp {tp}" in str(caught.value) and "num_kv_heads 2" in str(caught.value)


def test_order_of_use_and_names() -> None:
    llama = [part.name for part in parts(preset("llama-tiny", num_layers=1))]
    assert llama == [
        "embed.weight", "layers.0.attn_norm.weight", "layers.0.attn.q.weight",
        "layers.0.attn.k.weight", "layers.0.attn.v.weight", "layers.0.attn.o.weight",
        "layers.0.mlp_norm.weight", "layers.0.mlp.gate.weight", "layers.0.mlp.up.weight",
        "layers.0.mlp.down.weight", "norm.weight", "head.weight",
    ]  # fmt: skip
    gpt2 = [part.name for part in parts(preset("gpt2-tiny", num_layers=1))]
    assert gpt2[:4] == [
        "embed.weight", "positions.weight", "layers.0.attn_norm.weight", "layers.0.attn_norm.bias",
    ]  # fmt: skip
    assert gpt2[-2:] == ["norm.weight", "norm.bias"]
    assert not any("gate" in name or "head" in name for name in gpt2)


def test_init_rules() -> None:
    spec = preset("gpt2-tiny")
    for param in param_table(spec, ParallelPlan()):
        if "norm.weight" in param.name:
            assert param.init.kind == "ones"
        elif param.name.endswith("bias"):
            assert param.init.kind == "zeros"
        elif param.name.endswith(("attn.o.weight", "mlp.down.weight")):
            assert param.init.std == spec.init_std / math.sqrt(2 * spec.num_layers)
        else:
            assert (param.init.kind, param.init.std) == ("normal", spec.init_std)
    llama = param_table(preset("llama-tiny"), ParallelPlan())
    assert llama["layers.0.attn.o.weight"].init.std == 0.02


@pytest.mark.parametrize("switches", list(itertools.product([False, True], repeat=3)))
def test_decay_acts_on_matrices_and_on_what_is_asked(switches: tuple[bool, bool, bool]) -> None:
    norms, biases, embeddings = switches
    table = param_table(
        preset("gpt2-tiny", tie_embeddings=False),
        ParallelPlan(),
        decay_norms=norms,
        decay_biases=biases,
        decay_embeddings=embeddings,
    )
    decays = {param.name: param.decay for param in table}
    assert decays["layers.0.attn.q.weight"] and decays["layers.1.mlp.down.weight"]
    assert decays["head.weight"]
    assert decays["embed.weight"] is decays["positions.weight"] is embeddings
    assert decays["norm.weight"] is decays["layers.0.mlp_norm.weight"] is norms
    assert decays["layers.0.attn.q.bias"] is decays["norm.bias"] is biases


def test_a_tied_embedding_is_one_parameter_on_two_stages() -> None:
    table = param_table(preset("gpt2-tiny", num_layers=4), ParallelPlan(pp=2))
    assert [param.name for param in table if "embed" in param.name] == ["embed.weight"]
    assert table["embed.weight"].stages == (0, 1)
    assert table["positions.weight"].stages == (0,)
    assert table["layers.1.attn.q.weight"].stages == (0,)
    assert table["layers.2.attn.q.weight"].stages == (1,)
    assert table["norm.weight"].stages == (1,)
    alone = param_table(preset("gpt2-tiny"), ParallelPlan())
    assert {param.stages for param in alone} == {(0,)}


def test_norms_of_queries_and_keys() -> None:
    """One weight for all heads is partial over tp, also without sequence parallelism (DESIGN
    section 4); one weight an element is cut with its head.
    """
    qwen = param_table(preset("qwen3-tiny"), ParallelPlan(tp=2))
    for one in "qk":
        norm = qwen[f"layers.1.attn.qk_norm.{one}.weight"]
        assert (norm.shape, norm.placements, norm.grad_sum) == ((16,), {}, ("tp",))
        assert not norm.decay and norm.init.kind == "ones"
    alone = param_table(preset("qwen3-tiny"), ParallelPlan())
    assert not any(param.grad_sum for param in alone)
    olmo = param_table(preset("olmo2-tiny", num_kv_heads=2), ParallelPlan(tp=4))
    query, key = (olmo[f"layers.1.attn.qk_norm.{one}.weight"] for one in "qk")
    assert [query.slices({"tp": rank})[0].start for rank in range(4)] == [0, 16, 32, 48]
    assert [key.slices({"tp": rank})[0].start for rank in range(4)] == [0, 0, 16, 16]
    assert (query.grad_sum, key.grad_sum) == ((), ("tp_rep",))


def test_norms_stand_where_the_family_has_them() -> None:
    def norms(name: str) -> list[str]:
        found = [part.name for part in parts(preset(name))]
        return [
            name.removeprefix("layers.0.")
            for name in found
            if "layers.0." in name and "norm" in name
        ]

    assert norms("llama-tiny") == ["attn_norm.weight", "mlp_norm.weight"]
    assert norms("gemma2-tiny") == [
        "attn_norm.weight", "attn_post_norm.weight", "mlp_norm.weight", "mlp_post_norm.weight",
    ]  # fmt: skip
    assert norms("olmo2-tiny") == [
        "attn.qk_norm.q.weight", "attn.qk_norm.k.weight", "attn_post_norm.weight",
        "mlp_post_norm.weight",
    ]  # fmt: skip
    gemma = param_table(preset("gemma3-tiny"), ParallelPlan())
    assert {param.init.kind for param in gemma if "norm" in param.name} == {"zeros"}


def test_sequence_parallelism_makes_whole_parameters_partial() -> None:
    """Norms, row biases and positions see a slice of the sequence each."""
    table = param_table(preset("gpt2-tiny"), ParallelPlan(tp=2, sequence_parallel=True))
    partial = {param.name for param in table if param.grad_sum == ("tp",)}
    assert {"norm.weight", "positions.weight", "layers.0.attn.o.bias"} <= partial
    assert not any(param.placements for param in table if param.name in partial)
    plain = param_table(preset("gpt2-tiny"), ParallelPlan(tp=2))
    assert not any(param.grad_sum for param in plain)


def test_experts_are_refused_in_a_model_without_any() -> None:
    with pytest.raises(PlanError, match="ep 2"):
        param_table(preset("llama-tiny"), ParallelPlan(dp=2, ep=2))
