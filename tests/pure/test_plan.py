"""Owns the refusals of plans, of plans for models, and of what this release cannot run.

Imports no torch.
"""

import dataclasses
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.errors import PlanError
from rankmesh.topology import ParallelPlan, check_model, check_release, kv_replicas
from rankmesh.topology.fit import check_tokens
from rankmesh.topology.plan import CP_KINDS, RECOMPUTE, SCHEDULES, near_divisors
from tests.pure.plans import divisors, plans

SELECTIVE = {"recompute": "selective"}
MODEL = {"num_heads": 8, "num_kv_heads": 2, "ffn_size": 64, "vocab_size": 257, "num_layers": 4}


def refusal(make, *args, **kwargs) -> str:
    """The one line with which `make` refuses."""
    with pytest.raises(PlanError) as caught:
        make(*args, **kwargs)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 300
    return line


def proposals(line: str) -> list[tuple[dict[str, int], int]]:
    """The plans that a refusal proposes: axis -> size, and the number of ranks."""
    found = []
    for words in line.split("nearest plans: ")[1].split(", "):
        sizes = {axis: int(size) for axis, size in re.findall(r"([a-z]+) (\d+)", words)}
        ranks = re.findall(r"\((\d+) ranks\)", words)
        found.append((sizes, int(ranks[0]) if ranks else 1))
    return found


def test_a_plan_is_frozen_equal_by_value_and_hashable():
    plan = ParallelPlan(tp=2, dp=2)
    assert plan == ParallelPlan.for_world(4, tp=2) and hash(plan) == hash(ParallelPlan(tp=2, dp=2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.tp = 4
    assert str(plan) == "tp 2 dp 2" and str(ParallelPlan()) == "one rank"


@given(plans())
def test_a_plan_survives_json(plan):
    assert ParallelPlan(**json.loads(json.dumps(plan.to_dict()))) == plan


@given(plans())
def test_products(plan):
    assert plan.world_size == plan.tp * plan.cp * plan.dp * plan.pp
    assert plan.size("etp") * plan.size("ep") * plan.edp * plan.pp == plan.world_size
    assert plan.size("cp_ring") * plan.size("cp_ulysses") == plan.cp
    assert plan.size("shard") * plan.size("shard_rep") == plan.dp * plan.cp == plan.size("dp_cp")
    assert plan.size("expert_shard") * plan.size("expert_shard_rep") == plan.edp
    assert plan.size("stage") * plan.pp == plan.size("world") == plan.world_size
    assert plan.num_stages == plan.pp * plan.num_chunks


@given(plans())
def test_dp_follows_from_the_world(plan):
    fields = {key: value for key, value in plan.to_dict().items() if key != "dp"}
    assert ParallelPlan.for_world(plan.world_size, **fields) == plan
    assert ParallelPlan.for_world(plan.world_size, dp=None, **fields) == plan
    assert ParallelPlan.for_world(plan.world_size, dp=plan.dp, **fields) == plan


def test_twelve_ranks_with_tp_2_and_pp_4():
    line = refusal(ParallelPlan.for_world, 12, tp=2, pp=4)
    assert line == (
        "12 ranks do not tile: tp 2 * pp 4 = 8 does not divide 12; nearest plans: "
        "tp 2 dp 2 pp 3 (12 ranks), tp 3 pp 4 (12 ranks), tp 2 pp 4 (8 ranks), "
        "tp 2 dp 2 pp 4 (16 ranks)"
    )


def test_a_dp_that_does_not_fit_the_world():
    line = refusal(ParallelPlan.for_world, 16, tp=2, pp=4, dp=3)
    assert line.startswith("16 ranks do not tile: tp 2 * dp 3 * pp 4 = 24 is not 16; nearest plans")
    assert "tp 2 dp 2 pp 4 (16 ranks)" in line
    assert "tp 8 does not divide 4" in refusal(ParallelPlan.for_world, 4, tp=8)


@given(
    st.integers(1, 200),
    st.fixed_dictionaries({axis: st.integers(1, 12) for axis in ("tp", "cp", "pp")}),
    st.integers(1, 4),
)
def test_every_refused_world_is_offered_plans_that_tile(world, axes, ep):
    product = math.prod(axes.values())
    if world % product == 0:
        return
    line = refusal(ParallelPlan.for_world, world, ep=ep, **axes)
    assert f"{product} does not divide {world}" in line
    assert all(f"{axis} {size}" in line for axis, size in axes.items() if size > 1)
    if "nearest plans" not in line:
        assert ep > 1  # an ep that fits no stage of that many ranks
        return
    for sizes, ranks in proposals(line):
        assert ParallelPlan(**sizes).world_size == ranks


@pytest.mark.parametrize("world", [0, -1, True, "8", 2.0])
def test_a_world_size_is_a_positive_integer(world):
    assert f"world_size {world!r}" in refusal(ParallelPlan.for_world, world)


@pytest.mark.parametrize(
    "field", ["tp", "cp", "ep", "etp", "pp", "dp", "num_chunks", "zero_group", "cp_ulysses"]
)
@pytest.mark.parametrize("value", [0, -2, True, 2.0, "2"])
def test_counts_are_positive_integers(field, value):
    assert refusal(ParallelPlan, **{field: value}).startswith(f"{field} {value!r}: a whole number")


@pytest.mark.parametrize(
    ("field", "allowed"),
    [("schedule", tuple(SCHEDULES)), ("cp_kind", CP_KINDS), ("recompute", RECOMPUTE)],
)
def test_words_are_checked_and_the_allowed_ones_listed(field, allowed):
    """Field report M14: every string option refuses an unknown value; its default is allowed."""
    assert getattr(ParallelPlan(), field) in allowed
    for word in (allowed[0].upper(), f"{allowed[0]}s", "", None):
        line = refusal(ParallelPlan, **{field: word})
        assert repr(word) in line and ", ".join(allowed) in line
    for word in allowed:
        chunks = SCHEDULES.get(word, 1) or 3
        assert getattr(ParallelPlan(**{field: word, "num_chunks": chunks}), field) == word


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"zero": 4}, ["zero 4", "0, 1, 2, 3"]),
        ({"zero": True}, ["zero True"]),
        ({"sequence_parallel": 1}, ["sequence_parallel 1", "true, false"]),
        ({"order": ("tp", "dp", "pp")}, ["order tp, dp, pp:", "tp, cp, dp, pp"]),
        ({"order": ("tp", "tp", "dp", "pp")}, ["each once"]),
        ({"order": ("tp", "cp", "ep", "pp")}, ["ep"]),
        ({"order": "tp-cp-dp-pp"}, ["order tp-cp-dp-pp:"]),
        ({"num_chunks": 2}, ["1f1b", "num_chunks 2", "num_chunks 1", "interleaved"]),
        ({"schedule": "zb-v", "num_chunks": 3}, ["zb-v", "num_chunks 3", "num_chunks 2"]),
        ({"cp": 6, "cp_ulysses": 4}, ["cp_ulysses 4", "cp 6", "cp_ulysses 3 or 6"]),
        (
            {"cp": 6, "cp_ulysses": 2, "cp_kind": "all-gather"},
            ["cp_ulysses 2", "cp 6", "all-gather", "cp_kind ring"],
        ),
        ({"cp": 6, "cp_ulysses": 2, "cp_kind": "ulysses"}, ["cp_ulysses 2", "cp 6", "ulysses"]),
        (
            {"tp": 2, "dp": 3, "ep": 4, "etp": 2},
            ["etp 2 * ep 4 = 8", "tp 2 * cp 1 * dp 3 = 6", "ep 3 or dp 4"],
        ),
        (
            {"tp": 2, "dp": 4, "ep": 3},
            ["etp 1 * ep 3 = 3", "tp 2 * cp 1 * dp 4 = 8", "ep 2 or ep 4 or dp 3 or dp 6"],
        ),
        ({"dp": 8, "zero_group": 3}, ["zero_group 3", "dp 8 * cp 1 = 8", "zero_group 2 or 4"]),
        ({"dp": 2, "zero_group": 4}, ["zero_group 4", "dp 2 * cp 1 = 2", "zero_group 2"]),
        (
            {"dp": 8, "ep": 4, "zero_group": 2},
            ["zero_group 2", "dp 8 * cp 1 / 2 = 4 copies", "edp 2", "nearest: zero_group 4"],
        ),
    ],
)
def test_refusals_name_each_number_and_what_fits(fields, words):
    line = refusal(ParallelPlan, **fields)
    assert [word for word in words if word not in line] == []


@given(plans(), st.integers(1, 9), st.integers(1, 9))
def test_experts_that_do_not_fit_are_offered_values_that_do(plan, etp, ep):
    stage = plan.size("stage")
    base = {"tp": plan.tp, "cp": plan.cp, "dp": plan.dp, "etp": etp, "ep": ep}
    if stage % (etp * ep) == 0:
        assert ParallelPlan(**base).edp == stage // (etp * ep)
        return
    line = refusal(ParallelPlan, **base)
    near = line.split("nearest: ")[1].split(" or ")
    assert near
    for proposal in near:
        axis, size = proposal.split()
        assert ParallelPlan(**{**base, axis: int(size)})


@given(st.integers(1, 500), st.integers(1, 600))
def test_near_divisors(total, wanted):
    near = near_divisors(total, wanted)
    below = [d for d in divisors(total) if d < wanted][-1:]
    above = [d for d in divisors(total) if d > wanted][:1]
    assert list(near) == below + above


def test_an_unknown_axis_is_refused():
    assert "allowed: tp, cp, dp, pp" in refusal(ParallelPlan().size, "sp")


def test_etp_is_one_unless_asked_for():
    assert ParallelPlan(tp=4, dp=2).edp == 8
    assert ParallelPlan(tp=4, dp=2, ep=8).edp == 1
    assert ParallelPlan(tp=4, dp=2, etp=4).edp == 2


def test_kv_heads_below_tp_are_replicated_or_refused():
    """Field report T01: 8 query and 2 KV heads at tp 4 replicate; 6 and 4 are refused."""
    check_model(ParallelPlan(tp=4), **MODEL)
    assert kv_replicas(4, 2) == 2 and kv_replicas(2, 4) == 1 and kv_replicas(3, 5) == 1
    line = refusal(check_model, ParallelPlan(tp=4), **MODEL | {"num_heads": 6, "num_kv_heads": 4})
    assert "num_heads 6" in line and "num_kv_heads 4" in line


@pytest.mark.parametrize(
    ("plan", "sizes", "words"),
    [
        (
            {"tp": 4},
            {"num_heads": 6, "num_kv_heads": 3},
            ["tp 4", "num_kv_heads 3", "tp 3 or tp 6"],
        ),
        (
            {"tp": 4},
            {"num_heads": 6},
            ["num_heads 6 / num_kv_heads 2 = 3", "tp 4 / num_kv_heads 2 = 2", "tp 2 or tp 6"],
        ),
        ({"tp": 16}, {}, ["num_heads 8", "tp 16 / num_kv_heads 2 = 8", "nearest: tp 8"]),
        ({"tp": 4}, {"ffn_size": 3}, ["ffn_size 3", "tp 4", "1 of 4"]),
        ({"tp": 8}, {"vocab_size": 7}, ["vocab_size 7", "tp 8"]),
        ({"pp": 6}, {}, ["num_layers 4", "pp * num_chunks 6"]),
        (
            {"pp": 2, "num_chunks": 3, "schedule": "interleaved"},
            {},
            ["num_layers 4", "pp * num_chunks 6"],
        ),
        ({"dp": 4, "ep": 4}, {"num_experts": 6}, ["num_experts 6", "ep 4", "ep 3 or 6"]),
        ({"dp": 2, "ep": 2}, {}, ["num_experts 0", "ep 2", "ep 1"]),
        ({"dp": 128, "etp": 128}, {"num_experts": 2}, ["ffn_size 64", "etp 128"]),
        ({"cp": 3, "cp_kind": "ulysses"}, {}, ["num_heads 8", "tp 1 * cp_ulysses 3 = 3"]),
        (
            {"tp": 2, "cp": 2, "cp_ulysses": 2},
            {"num_heads": 12, "num_kv_heads": 6},
            ["num_kv_heads 6", "tp 2 * cp_ulysses 2 = 4"],
        ),
    ],
)
def test_models_that_do_not_fit(plan, sizes, words):
    line = refusal(check_model, ParallelPlan(**plan), **MODEL | sizes)
    assert [word for word in words if word not in line] == []


def test_ulysses_over_fewer_kv_heads_than_ranks():
    """Field report C08: 8 query and 2 KV heads over 4 ranks are fine, as KV heads replicate."""
    check_model(ParallelPlan(cp=4, cp_kind="ulysses"), **MODEL)


@given(st.integers(1, 24), st.integers(1, 12), st.integers(1, 8))
def test_every_tp_rank_gets_whole_heads(tp, num_kv_heads, group):
    """The rule against its meaning: cut KV heads evenly, or share one out among equals."""
    sizes = MODEL | {"num_heads": num_kv_heads * group, "num_kv_heads": num_kv_heads}
    if tp <= num_kv_heads:
        fits = True
    else:
        fits = tp % num_kv_heads == 0 and group % (tp // num_kv_heads) == 0
    if fits:
        check_model(ParallelPlan(tp=tp), **sizes)
        return
    line = refusal(check_model, ParallelPlan(tp=tp), **sizes)
    assert f"tp {tp}" in line and f"num_kv_heads {num_kv_heads}" in line
    for size in re.findall(r"tp (\d+)", line.split("nearest: ")[1]):
        kv_replicas(int(size), num_kv_heads)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"cp": 2}, "cp 2"),
        ({"dp": 2, "ep": 2}, "ep 2"),
        ({"dp": 2, "etp": 2}, "etp 2"),
        ({"zero": 3}, "zero 3 (allowed: 0, 1 or 2)"),
    ],
)
def test_what_this_release_cannot_run(fields, word):
    assert word in refusal(check_release, ParallelPlan(**fields))


def test_sequences_that_are_not_cut_evenly():
    plan = ParallelPlan(tp=4, sequence_parallel=True)
    check_tokens(plan, 2, 10)
    line = refusal(check_tokens, plan, 1, 10)
    assert (
        "microbatch_size 1 * seq_len 10 = 10 tokens" in line and "seq_len 8 or seq_len 12" in line
    )


def test_what_this_release_runs():
    check_release(ParallelPlan(tp=4, dp=6, pp=3, order=("dp", "tp", "cp", "pp")))
    check_release(
        ParallelPlan(pp=2, num_chunks=3, schedule="interleaved", layout=(0, 1, 1, 1, 1, 0))
    )
    check_release(ParallelPlan(recompute="full", recompute_layers=(2,)))
    line = refusal(check_release, ParallelPlan(ep=2, dp=2, cp=2))
    assert "ep 2" in line and "cp 2" in line


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pp": 2, "layout": (1, 2, 3)}, "layout [1, 2, 3] has 3 stages; needed are pp 2"),
        ({"pp": 3, "layout": (1, 0, 3)}, "stage 1 has 0 layers; allowed: a whole number of at"),
        ({"pp": 2, "layout": (1, -1)}, "stage 1 has -1 layers"),
    ],
)
def test_layouts_that_make_no_stages(fields, words):
    with pytest.raises(PlanError, match=re.escape(words)):
        ParallelPlan(**fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"recompute_layers": 2}, "recompute_layers [2] with recompute none: allowed with sel"),
        ({"recompute": "full", "recompute_layers": (1, 2)}, "needed is one number, or one for"),
        ({"recompute": "full", "recompute_layers": -1}, "-1 is no whole number of at least 0"),
        ({"recompute": "full", "recompute_layers": (True,)}, "True is no whole number"),
        ({"recompute_modules": ("mlp",)}, "recompute_modules mlp with recompute none: allowed"),
        ({"recompute": "full", "recompute_modules": "norm"}, "norm with recompute full: allowed"),
        ({**SELECTIVE, "recompute_modules": ("mpl",)}, "allowed are core, norm, activation, att"),
        ({**SELECTIVE, "recompute_modules": ()}, "each once, and at least one"),
        ({**SELECTIVE, "recompute_modules": ("mlp", "mlp")}, "each once, and at least one"),
        ({**SELECTIVE, "recompute_modules": ("core", "attention")}, "attention holds core; name"),
        ({**SELECTIVE, "recompute_modules": ("mlp", "activation")}, "mlp holds activation; name"),
    ],
)
def test_what_cannot_be_recomputed(fields, words):
    with pytest.raises(PlanError, match=re.escape(words)):
        ParallelPlan(**fields)


def test_what_is_recomputed():
    """Names of stretches, by stage and place of a layer in it."""
    assert ParallelPlan().recomputed(0, 0) == set()
    assert ParallelPlan(recompute="full").recomputed(0, 99) == {"block"}
    assert ParallelPlan(**SELECTIVE).recomputed(0, 0) == {"core"}
    plan = ParallelPlan(
        pp=2, num_chunks=2, schedule="interleaved", recompute="selective",
        recompute_modules=["mlp", "norm"], recompute_layers=[2, 0],
    )  # fmt: skip
    assert [plan.recomputed(1, place) for place in (0, 1, 2)] == [{"mlp", "norm"}] * 2 + [set()]
    assert plan.recomputed(2, 0) == set() == plan.recomputed(3, 0)
    assert ParallelPlan(**plan.to_dict()) == plan
    assert plan.to_dict()["recompute_layers"] == [2, 0]


def test_a_layout_places_every_layer():
    """Field report P01."""
    line = refusal(check_model, ParallelPlan(pp=2, layout=(3, 4)), **MODEL)
    assert "layout [3, 4] places 7 layers, the model has" in line
