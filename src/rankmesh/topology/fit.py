"""Whether a plan fits a model of given sizes.

Owns the rules that need both, as integers; it knows no model family, parameter or torch. The rules
of the plan alone stand in plan.py, what this release cannot run in release.py.
"""

from __future__ import annotations

from rankmesh.errors import PlanError
from rankmesh.topology.plan import ParallelPlan, near_divisors


def check_model(
    plan: ParallelPlan,
    *,
    num_heads: int,
    num_kv_heads: int,
    ffn_size: int,
    vocab_size: int,
    num_layers: int,
    num_experts: int = 0,
) -> None:
    """Raises PlanError, one line with both numbers, where a rank would hold nothing or half a head.

    Feed-forward, vocabulary and layers may be split unevenly. KV heads at least as many as tp may
    be, too: each brings its query heads along. Fewer KV heads than tp are held by several
    neighbouring ranks, which share out the query heads of their KV head.
    """
    _check_heads(plan.tp, num_heads, num_kv_heads)
    _check_ulysses(plan, num_heads, num_kv_heads)
    _at_least("vocab_size", vocab_size, "tp", plan.tp)
    _check_layers(plan, num_layers)
    _at_least("ffn_size", ffn_size, "tp", plan.tp)
    if num_experts:
        _at_least("ffn_size", ffn_size, "etp", plan.etp)
    if max(num_experts, 1) % plan.ep:
        near = " or ".join(map(str, near_divisors(max(num_experts, 1), plan.ep)))
        raise PlanError(
            f"num_experts {num_experts} is not split by ep {plan.ep}; nearest: ep {near}"
        )


def check_tokens(plan: ParallelPlan, microbatch: int, seq_len: int) -> None:
    """Raises PlanError where sequence parallelism cannot cut a microbatch's tokens evenly."""
    tokens, low = microbatch * seq_len, seq_len // plan.tp * plan.tp
    if plan.sequence_parallel and tokens % plan.tp:
        near = " or ".join(f"seq_len {n}" for n in (low, low + plan.tp) if n)
        raise PlanError(
            f"sequence_parallel: microbatch_size {microbatch} * seq_len {seq_len} = {tokens} "
            f"tokens are not split evenly by tp {plan.tp}; nearest: {near}"
        )


def kv_replicas(tp: int, num_kv_heads: int) -> int:
    """Neighbouring tp ranks that hold the same KV head: 1 unless tp exceeds the KV heads.

    Raises PlanError where tp exceeds them and is not a multiple of them.
    """
    if tp > num_kv_heads and tp % num_kv_heads:
        raise PlanError(
            f"tp {tp} exceeds num_kv_heads {num_kv_heads} and is not a multiple of it; nearest: "
            f"tp {tp // num_kv_heads * num_kv_heads} or tp {-(-tp // num_kv_heads) * num_kv_heads}"
        )
    return max(1, tp // num_kv_heads)


def _check_heads(tp: int, num_heads: int, num_kv_heads: int) -> None:
    if min(num_heads, num_kv_heads) < 1 or num_heads % num_kv_heads:
        raise PlanError(
            f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}: "
            "every KV head serves the same number of query heads"
        )
    holders, query_heads = kv_replicas(tp, num_kv_heads), num_heads // num_kv_heads
    if query_heads % holders:
        near = " or ".join(f"tp {n * num_kv_heads}" for n in near_divisors(query_heads, holders))
        raise PlanError(
            f"num_heads {num_heads} / num_kv_heads {num_kv_heads} = {query_heads} query heads are "
            f"not split by tp {tp} / num_kv_heads {num_kv_heads} = {holders} holders of their KV "
            f"head; nearest: {near}"
        )


def _check_ulysses(plan: ParallelPlan, num_heads: int, num_kv_heads: int) -> None:
    """The all-to-all of cp_ulysses u hands each of tp * u ranks whole heads (field report C08)."""
    ulysses = plan.size("cp_ulysses")
    parts = plan.tp * ulysses
    if ulysses == 1:
        return
    if num_heads % parts:
        raise PlanError(
            f"num_heads {num_heads} is not split by tp {plan.tp} * cp_ulysses {ulysses} = {parts}"
        )
    if num_kv_heads % parts and parts % num_kv_heads:
        raise PlanError(
            f"num_kv_heads {num_kv_heads} neither divides nor is split by "
            f"tp {plan.tp} * cp_ulysses {ulysses} = {parts}"
        )


def _check_layers(plan: ParallelPlan, num_layers: int) -> None:
    """Every layer lands on one stage (field report P01)."""
    if plan.layout is None:
        _at_least("num_layers", num_layers, "pp * num_chunks", plan.num_stages)
    elif sum(plan.layout) != num_layers:
        raise PlanError(
            f"layout {list(plan.layout)} places {sum(plan.layout)} layers, the model has "
            f"{num_layers}"
        )


def _at_least(name: str, size: int, axis: str, ranks: int) -> None:
    if size < ranks:
        raise PlanError(
            f"{name} {size} is less than {axis} {ranks}: {ranks - size} of {ranks} parts would be "
            f"empty; nearest: {axis} {max(size, 1)}"
        )
