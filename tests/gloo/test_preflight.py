"""Preflight on real processes: each fault is injected, found, and named with ranks and hosts.

Where it matters the same fault is shown with the check off: it hangs, or passes without a word.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from rankmesh.comm.preflight import tp_across_hosts
from rankmesh.comm.shards import fingerprint
from rankmesh.testing.spawn import Pool
from rankmesh.topology.hosts import block_hosts, cyclic_hosts
from rankmesh.topology.plan import ParallelPlan

JOBS = "tests.gloo.preflight_jobs"


def same_on_all(texts: list[str]) -> str:
    """The one text that all ranks got."""
    assert len(set(texts)) == 1 and "\n" not in texts[0], texts
    return texts[0]


def test_a_is_content_with_ranks_that_fit(pool: Pool) -> None:
    """No fault, no finding."""
    assert same_on_all(pool.run(f"{JOBS}:try_a", 4, timeout=20, fault={})) == ""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            {"3": {"agree": {"config": "xyz"}}},
            ["config differs: ranks 0-1 (alpha), rank 2 (beta): abc; rank 3 (beta): xyz"],
        ),
        ({"0": {"agree": {"plan": "tp 2 dp 2"}}}, ["plan differs", "rank 0 (alpha): tp 2 dp 2"]),
        ({"1": {"agree": {"torch": "2.0.1"}}}, ["torch differs", "rank 1 (alpha): 2.0.1"]),
        ({"2": {"agree": {"code": "ffff"}}}, ["code differs", "rank 2 (beta): ffff"]),
        (
            {"2": {"device_id": "GPU-3"}},
            ["ranks 2-3 (beta) share the accelerator GPU-3, as local ranks 2, 3"],
        ),
        (
            {"1": {"device_id": "GPU-2"}, "3": {"agree": {"plan": "x", "config": "y"}}},
            ["plan differs", "config differs"],
        ),
    ],
)
def test_a_names_who_does_not_fit(pool: Pool, fault: dict[str, Any], words: list[str]) -> None:
    """Two processes on one accelerator; another plan, config, version or code. On all ranks."""
    text = same_on_all(pool.run(f"{JOBS}:try_a", 4, timeout=20, fault=fault))
    assert text.startswith("preflight A: ")
    for word in words:
        assert word in text


def test_accelerators_of_different_hosts_may_have_one_name(pool: Pool) -> None:
    """GPU-0 of alpha and GPU-0 of beta are two."""
    fault = {"1": {"device_id": "GPU-2"}}
    assert same_on_all(pool.run(f"{JOBS}:try_a", 4, timeout=20, fault=fault)) == ""


def test_a_names_the_absent(pool: Pool) -> None:
    """Within the limit, with those that came."""
    texts = pool.run(f"{JOBS}:try_a", 4, timeout=20, fault={"2": "absent"}, limit_s=1.0)
    text = same_on_all(texts[:2] + texts[3:])
    assert "rank 2 did not come within 1 s; there are ranks 0-1 (alpha), rank 3 (beta)" in text


def test_an_absent_rank_hangs_without_a(pool: Pool) -> None:
    """The fault with the check off."""
    reason, _ = pool.fail(f"{JOBS}:without_a", 4, timeout=3)
    assert reason


def test_a_second_process_with_the_same_rank(pool: Pool) -> None:
    """Both would write the same key: the second is refused, the rank it should be is absent."""
    fault = {"3": {"rank": 1}}
    texts = pool.run(f"{JOBS}:try_a", 4, timeout=20, fault=fault, limit_s=1.0)
    assert any("a second process claims rank 1" in text for text in texts)
    assert "rank 3 did not come" in texts[0]


def test_another_order_of_groups(pool: Pool) -> None:
    """Refused by the hash of the list; without the check creation hangs or breaks."""
    text = same_on_all(pool.run(f"{JOBS}:other_order", 4, timeout=20, check=True))
    assert "groups differs" in text and "rank 3 (beta): [[1, 3]" in text
    reason, _ = pool.fail(f"{JOBS}:other_order", 4, timeout=4, check=False)
    assert reason


@pytest.mark.parametrize("name", ["groups", "plan", "config"])
def test_a_comes_before_any_process_group(pool: Pool, name: str) -> None:
    """A whole start that is refused has made no group; the value given is not overruled."""
    texts = pool.run(f"{JOBS}:refused_start", 2, timeout=30, agree={name: "mine"})
    text = same_on_all(texts)
    assert text.startswith("False preflight A: ") and f"{name} differs" in text
    assert "mine" in text


@pytest.mark.parametrize("plan", [{"tp": 2, "dp": 2}, {"dp": 4}, {"pp": 2, "tp": 2}], ids=str)
def test_b_is_content_with_links_that_work(pool: Pool, plan: dict[str, Any]) -> None:
    """No fault, no fatal finding."""
    got = pool.run(f"{JOBS}:try_b", 4, timeout=30, plan=plan, rank=0, step="", kind="", limits={})
    assert not [text for _, found in got for text, fatal in found if fatal]


@pytest.mark.parametrize("kind", ["dead", "hung"])
def test_b_names_a_rank_that_is_gone_at_the_start(pool: Pool, kind: str) -> None:
    """Gone between A and B: named with its host on all that are left."""
    found = left_over(pool, "arrive", kind, {"arrive_s": 1.0})
    assert found == [("preflight B: rank 2 (beta) did not answer within 1 s", True)]


@pytest.mark.parametrize("step", ["all_reduce tp", "link dp"])
def test_b_names_a_rank_that_goes_in_the_middle(pool: Pool, step: str) -> None:
    """Whatever its neighbours met, the rank that gave no answer is what is told."""
    found = left_over(pool, step, "hung", {"arrive_s": 5.0, "answer_s": 0.4})
    assert len(found) == 1 and found[0][1]
    assert found[0][0].startswith("preflight B: rank 2 (beta) stopped answering within")


def left_over(pool: Pool, step: str, kind: str, limits: dict[str, float]) -> list[tuple[str, bool]]:
    """Findings of the ranks that are left when rank 2 goes: the same on all."""
    plan = {"tp": 2, "dp": 2}
    arguments = {"plan": plan, "rank": 2, "step": step, "kind": kind, "limits": limits}
    # The rank that is gone has no result, so the job as a whole fails; the others print theirs.
    _, output = pool.fail(f"{JOBS}:tell_b", 4, timeout=25, **arguments)
    told = [line for line in output.splitlines() if line.startswith("found ")]
    assert len(told) == 3 and len(set(told)) == 1, output
    findings: list[tuple[str, bool]] = [
        (text, fatal) for text, fatal in json.loads(told[0].removeprefix("found "))
    ]
    return findings


def test_a_hung_rank_hangs_all_without_b(pool: Pool) -> None:
    """The fault with the check off: the first collective waits."""
    reason, _ = pool.fail(f"{JOBS}:without_b", 3, timeout=3)
    assert "no end within 3 s" in reason


def test_b_names_who_comes_late(pool: Pool) -> None:
    """A group that fails because one rank came late says which."""
    limits = {"answer_s": 1.0}
    got = pool.run(
        f"{JOBS}:try_b",
        4,
        timeout=30,
        plan={"tp": 2, "dp": 2},
        rank=3,
        step="all_reduce tp",
        kind="2.5",
        limits=limits,
    )
    texts = [text for text, _ in got[0][1]]
    assert any("group tp of ranks 2-3 (beta)" in text for text in texts)
    assert any("rank 3 (beta) came to it late" in text for text in texts)


def test_b_names_a_slow_rank(pool: Pool) -> None:
    """Both of its links are slow and the others are not: the rank is named, as a warning."""
    got = pool.run(f"{JOBS}:slow_messages", 4, timeout=60, rank=2, seconds=0.3)
    found, links = got[0]
    assert sorted([low, high] for low, high, _ in links) == [[0, 1], [0, 3], [1, 2], [2, 3]]
    named = [text for text, fatal in found if "rank 2 (beta) is slow: latency" in text]
    assert len(named) == 1 and not any(fatal for _, fatal in found)
    assert all(rank[0] == found for rank in got)


def test_b_finds_a_handle_of_other_ranks(pool: Pool) -> None:
    """The known answer of the small all-reduce tells that a group is not what it says."""
    text = pool.run(f"{JOBS}:crossed_handles", 4, timeout=30)[0][0]
    assert "group tp of ranks 0-1 (alpha): an all-reduce gave 4 on rank 0, not 3" in text


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (list(block_hosts([2, 2])), []),
        (list(cyclic_hosts([2, 2])), ["[rank 0 (host0), rank 1 (host1)]", "dp, cp, tp, pp"]),
        (["a", "b", "b", "a"], ["2 of 2 tp groups", "order of today's ranks: 0,3,1,2"]),
    ],
)
def test_tp_across_hosts(pool: Pool, names: list[str], words: list[str]) -> None:
    """Block, cyclic and mixed placement, by injected host names: a warning with what mends it."""
    found = pool.run(f"{JOBS}:hosts", 4, timeout=30, plan={"tp": 2, "dp": 2}, names=names)
    told = [text for text, _ in found[0] if "tp groups" in text]
    assert bool(told) == bool(words)
    assert all(word in told[0] for word in words) and not any(fatal for _, fatal in found[0])


def test_tp_across_uneven_hosts() -> None:
    """Hosts of 3 and 5: one group must cross, and the line says so."""
    plan = ParallelPlan(tp=4, dp=2)
    (finding,) = tp_across_hosts(plan, block_hosts([3, 5]))
    assert "1 of 2 tp groups cross hosts" in finding.text and not finding.fatal
    assert "[ranks 0-2 (host0), rank 3 (host1)]" in finding.text
    assert "1 will still cross" in finding.text
    assert tp_across_hosts(plan, block_hosts([4, 4])) == ()


def test_c_is_content_with_a_model_as_it_should_be(pool: Pool) -> None:
    """Constant biases may be equal on different slices; replicas are equal."""
    assert pool.run(f"{JOBS}:shards", 4, timeout=30, fault="") == [[]] * 4


def test_c_finds_identical_shards(pool: Pool) -> None:
    """Field report R05, at start-up: nothing else notices two ranks with one seed."""
    found = pool.run(f"{JOBS}:shards", 4, timeout=30, fault="identical")
    text = "preflight C: q.weight over tp: different slices are identical on"
    assert found[0] == found[1] and found[0][0].startswith(f"{text} ranks 0-1 (alpha): ")
    assert found[3][0].startswith(f"{text} ranks 2-3 (beta): ") and len(found[3]) == 1


def test_c_finds_replicas_that_differ(pool: Pool) -> None:
    """One bit of one element on rank 2: its tp and its dp peers say so."""
    found = pool.run(f"{JOBS}:shards", 4, timeout=30, fault="drifted")
    assert found[1] == [] and len(found[0]) == 1 and len(found[2]) == 2
    assert "norm.weight over dp_cp: replicas of one slice differ: rank 0 (alpha): " in found[0][0]
    assert "; rank 2 (beta): " in found[0][0]


def test_c_finds_models_of_other_parts(pool: Pool) -> None:
    """Ranks that hold other parameters are told before anything is compared."""
    found = pool.run(f"{JOBS}:shards", 4, timeout=30, fault="other")
    assert "ranks 2-3 (beta) hold other parameters: 3, 2 of them" in found[2][0]
    assert found[0] == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_a_fingerprint_sees_every_bit_and_place(dtype: torch.dtype) -> None:
    """Equal tensors agree; a changed element, two swapped ones or a longer tensor do not."""
    tensor = torch.arange(1, 101).to(dtype)
    swapped, changed = tensor.clone(), tensor.clone()
    swapped[[3, 90]] = tensor[[90, 3]]
    changed[50] += 1
    values = [fingerprint(t) for t in (tensor, swapped, changed, tensor[:99], tensor[:0])]
    assert len(set(values)) == 5 and fingerprint(tensor.clone().view(10, 10)) == values[0]
    assert fingerprint(tensor.view(10, 10).T) != values[0]
