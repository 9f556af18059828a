"""Measured timelines: idle time, costs of earlier steps, formulas; and the command's answers."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.cli.main import main
from rankmesh.errors import UserError
from rankmesh.obs.tracefile import RankTrace
from rankmesh.report.timeline import MeasuredCosts, costs_of, measured, order_of, simulated
from rankmesh.schedule import Costs, Kind, Timeline, build_schedule, simulate
from rankmesh.theory.bubble import textbook_bubble
from rankmesh.topology.plan import ParallelPlan
from tests import traces
from tests.traces import MS, action

SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2))


def test_idle_time_is_counted_from_the_timestamps() -> None:
    """From the first start to the last end over the ranks: 100 ms of which 40 and 55 are idle."""
    ranks = [
        RankTrace(
            0, 1,
            (
                action("F", 0, 0, 7 * MS, 27 * MS), action("B", 0, 0, 67 * MS, 107 * MS),
                traces.norm(500 * MS), action("F", 0, 0, 900 * MS, 950 * MS, step=2),
            ),
        ),
        RankTrace(
            1, 1, (action("B", 1, 0, 42 * MS, 67 * MS), action("F", 1, 0, 22 * MS, 42 * MS))
        ),
    ]  # fmt: skip
    timeline = measured(ranks, 1)
    assert timeline.makespan == pytest.approx(100)
    assert timeline.bubble == pytest.approx((40 + 55) / 200)
    assert [(s.start, s.end) for s in timeline.ranks[0]] == [(0, 20), (60, 100)]
    assert [[str(a) for a in rank] for rank in order_of(timeline)] == [
        ["F0.0", "B0.0"],
        ["F1.0", "B1.0"],
    ]


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (action("F", 0, 0, 0, 10), action("B", 0, 0, 9, 20)),
        (action("F", 0, 0, 0, 10), action("F", 0, 0, 10, 20)),
    ],
)
def test_ranks_that_recorded_badly_are_named(spans: tuple[Any, ...]) -> None:
    """No action, two at once, or one twice."""
    with pytest.raises(UserError, match=r"step 1: rank 5"):
        measured([RankTrace(5, 1, spans)], 1)


@given(st.data())
def test_equal_steps_are_simulated_as_they_were(data: st.DataObject) -> None:
    """A step whose actions take what they took before is the simulation of itself."""
    name, chunks = data.draw(st.sampled_from(SCHEDULES))
    pp, batches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    schedule = build_schedule(name, pp, chunks, batches)
    times = {
        (kind, stage): float(data.draw(st.integers(1, 9)))
        for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
        for stage in range(pp * chunks)
    }
    timeline = simulate(schedule, Costs(), lambda one: times[one.kind, one.stage])
    ranks = traces.traces_of({3: timeline, 4: timeline})
    costs = costs_of([measured(ranks, 3)])
    assert costs.send == 0
    assert all(cost == pytest.approx(times[key]) for key, cost in costs.actions.items())
    again = measured(ranks, 4)
    made = simulated(again, costs)
    assert made.makespan == pytest.approx(again.makespan)
    assert made.bubble == pytest.approx(again.bubble, abs=1e-9)


def test_costs_are_medians_and_transfers_those_that_were_waited_for() -> None:
    """Of each kind and stage; a message that came while its rank was busy says nothing."""
    slow = simulate(build_schedule("1f1b", 3, 1, 4), Costs(f=2, i=3, w=4, send=0.5))
    fast = simulate(build_schedule("1f1b", 3, 1, 4), Costs(f=1, i=1, w=1, send=0.25))
    costs = costs_of([slow, fast, slow])
    assert costs.send == 0.5
    assert costs.actions[Kind.F, 1] == 2 and costs.actions[Kind.B, 2] == 7
    assert simulated(fast, costs).bubble == pytest.approx(slow.bubble)
    with pytest.raises(UserError, match="no earlier step has B of stage"):
        simulated(fast, MeasuredCosts({(Kind.F, stage): 1.0 for stage in range(3)}, 0.0))


@pytest.mark.parametrize("batches", [4, 8])
@pytest.mark.parametrize(
    ("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-h2", 1)]
)
def test_textbook_formulas_are_those_of_equal_stages(name: str, chunks: int, batches: int) -> None:
    """What the simulator finds with F = I = W and free transfers."""
    timeline = simulate(build_schedule(name, 4, chunks, batches), Costs())
    assert textbook_bubble(name, 4, chunks, batches) == pytest.approx(timeline.bubble)
    assert textbook_bubble(name, 1, chunks, batches) == 0


def test_schedules_without_a_formula_have_none() -> None:
    """Their bubble depends on more than these numbers."""
    assert textbook_bubble("zb-v", 4, 2, 8) is None


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    """Steps 3 to 8 of 1f1b on 4 pipeline ranks, the last two with a straggler; attempt 2."""
    plain = traces.textbook_steps("1f1b", 4, 8, range(3, 7))
    schedule = build_schedule("1f1b", 4, 1, 8)
    straggler = simulate(schedule, Costs(), lambda one: 6.0 if one.stage == 2 else 1.5)
    steps: dict[int, Timeline] = {**plain, 7: straggler, 8: straggler}
    return traces.run_dir(tmp_path / "run", ParallelPlan(pp=4), traces.traces_of(steps, attempt=2))


def test_the_json_of_a_run(traced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The later half is compared with what the earlier half took."""
    assert main(["trace", str(traced), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["attempt"], found["costs_from"], found["steps"]) == (2, [3, 4, 5], [6, 7, 8])
    by_step = [found["by_step"][str(step)] for step in (6, 7, 8)]
    assert by_step[0] == pytest.approx(3 / 11) and by_step[1] == by_step[2] > 0.3
    bubble = found["bubble"]
    assert bubble["textbook"] == pytest.approx(3 / 11)
    assert bubble["simulated"]["median"] == pytest.approx(3 / 11)
    assert bubble["measured"] == {
        "median": median(by_step), "least": min(by_step), "most": max(by_step),
    }  # fmt: skip
    assert found["step"] in (7, 8)
    merged = json.loads((traced / "trace" / "merged.json").read_text())
    names = {e["args"]["name"] for e in merged["traceEvents"] if e["name"] == "process_name"}
    assert names == {f"rank {rank} (pp {rank})" for rank in range(4)}
    assert min(e["ts"] for e in merged["traceEvents"] if e["ph"] == "X") == 0


def test_what_a_person_reads(traced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Timeline, one table, where costs come from; the picture."""
    svg = traced / "step.svg"
    assert main(["trace", str(traced), "--step", "6", "--svg", str(svg)]) == 0
    out = capsys.readouterr().out
    title = "step 6, 1f1b: 4 pipeline ranks, 1 chunk(s) each, 8 microbatches, 33.0 ms"
    assert out.startswith(title)
    rows = [line.split() for line in out.splitlines()]
    assert ["measured", "6", "0.2727", "0.2727", "0.2727"] in rows
    assert ["simulated", "6", "0.2727", "0.2727", "0.2727"] in rows
    assert ["textbook", "-", "0.2727"] in rows
    assert "from times of steps 3 to 5" in out
    assert sum(line.startswith("rank ") for line in out.splitlines()) == 4
    assert svg.read_text().startswith("<svg ")


def test_the_first_step_has_nothing_to_be_simulated_from(
    traced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is measured all the same."""
    assert main(["trace", str(traced), "--steps", "1:4"]) == 0
    out = capsys.readouterr().out
    assert "needs a traced step before step 3" in out
    assert ["simulated", "-", "-", "-", "-"] in [line.split() for line in out.splitlines()]


def test_a_schedule_of_one_s_own_has_no_textbook(
    traced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The config of the launch names its file."""
    (traced / "config.toml").write_text('[parallel]\npp = 4\nschedule_file = "mine.txt"\n')
    assert main(["trace", str(traced), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schedule"], found["bubble"]["textbook"]) == ("mine.txt", None)
    assert found["bubble"]["simulated"]["median"] == pytest.approx(3 / 11)


def _replicas(folder: Path) -> Path:
    """Two replicas with two tp ranks each, of which rank 7 left nothing."""
    plan = ParallelPlan(tp=2, dp=2, pp=2)
    made = []
    for index, trace in enumerate(traces.traces_of(traces.textbook_steps("1f1b", 2, 2, (1, 2)))):
        made += [RankTrace(4 * index + place, 1, trace.spans) for place in range(4)]
    return traces.run_dir(folder, plan, made[:7])


def test_other_replicas_can_be_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By their dp, tp and cp; a rank that left no trace is named."""
    run = str(_replicas(tmp_path / "run"))
    assert main(["trace", run, "--dp", "1"]) == 0
    assert "left no trace: ranks 7" in capsys.readouterr().out
    assert main(["trace", run, "--dp", "1", "--tp", "1"]) == 2
    assert capsys.readouterr().err == "rankmesh: error: attempt 1: rank 7 left no trace\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "9"], "--step 9: not traced; traced are steps 3 to 8"),
        (["--steps", "9:10"], "--steps 9:10: not traced"),
        (["--steps", "5"], "--steps 5: two step numbers A:B"),
        (["--step", "5", "--steps", "5:6"], "not allowed with"),
        (["--attempt", "1"], "--attempt 1: traced are 2"),
        (["--dp", "1"], "--dp 1: allowed are 0 to 0"),
        (["--svg", "/nowhere/x.svg"], "--svg /nowhere/x.svg cannot be written"),
    ],
)
def test_wrong_words_are_one_line(
    traced: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    """Exit code 2."""
    assert main(["trace", str(traced), *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_wrong_folders_are_one_line(traced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No run, no trace, no launches, a damaged file, a rank that recorded no action."""
    assert main(["trace", str(traced / "gone")]) == 2
    assert "no such run directory" in capsys.readouterr().err
    assert main(["trace", str(traced / "trace")]) == 2
    assert "log.trace=true" in capsys.readouterr().err
    path = traced / "trace" / "rank-0002-2.json"
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    assert main(["trace", str(traced)]) == 2
    assert "rank-0002-2.json" in capsys.readouterr().err
    path.write_text(whole.replace('"kind"', '"kin"', 1))
    assert main(["trace", str(traced), "--step", "3"]) == 2
    assert "step 3: rank 2 recorded F2.0 amiss" in capsys.readouterr().err
    path.write_text(whole)
    (traced / "ranks.json").unlink()
    assert main(["trace", str(traced)]) == 2
    assert "ranks.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"kind": "F"', '"kind": "Q"'),
        ('"kind": "F"', '"kind": "SEND_F"'),
        ('"stage": 2', '"stage": "x"'),
        ('"stage": 2', '"stage": 7'),
        ('"microbatch": 1', '"microbatch": 99'),
    ],
)
def test_actions_that_make_no_schedule(
    traced: Path, old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and no picture of it."""
    path = traced / "trace" / "rank-0002-2.json"
    whole = path.read_text()
    spaced = whole if old in whole else whole.replace('":', '": ')
    assert old in spaced
    path.write_text(spaced.replace(old, new))
    assert main(["trace", str(traced), "--step", "3"]) == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1 and "step 3" in said.err and not said.out
