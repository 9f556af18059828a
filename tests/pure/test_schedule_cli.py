"""Owns `rankmesh schedule`: what people read, what machines read, what is refused.

Imports no torch.
"""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path

import pytest

from rankmesh.cli.main import main
from rankmesh.cli.schedule import NAMES
from rankmesh.cli.schedule_run import _coloured
from rankmesh.schedule import CHUNKS, Costs, build_schedule, schedule_text, simulate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "schedules.md"


@pytest.fixture
def rankmesh_schedule(rankmesh):
    """That command alone."""
    return partial(rankmesh, "schedule")


def lines_of(text):
    """What was printed as docs show it: ASCII, no blanks at the ends of lines."""
    return [line.rstrip() for line in text.replace("\u2500", "-").splitlines()]


def test_json_has_the_figures_and_the_times(rankmesh_schedule):
    words = ("--pp", 4, "--chunks", 2, "--microbatches", 8, "--schedule", "interleaved", "--json")
    code, out, err = rankmesh_schedule(*words)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert list(found) == [
        "schedule", "bubble", "bubble_stage", "bubble_over_ideal", "peak_live", "peak_live_w",
        "makespan", "actions",
    ]  # fmt: skip
    timeline = simulate(build_schedule("interleaved", 4, 2, 8), Costs())
    assert found == {"schedule": "interleaved", **json.loads(json.dumps(timeline.to_dict()))}
    assert found["bubble"] == pytest.approx(3 / 19) and found["peak_live"] == [11, 9, 7, 5]
    assert found["actions"][1][0] == ["F", 1, 0, 1.0, 2.0]


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_has_a_default_number_of_chunks(rankmesh_schedule, name):
    code, out, err = rankmesh_schedule("--pp", 3, "--microbatches", 6, "--schedule", name)
    assert (code, err) == (0, "")
    assert out.startswith(f"{name}: 3 ranks, {CHUNKS[name] or 2} chunk(s) each, 6 microbatches\n")
    rows = {line.split()[0]: line for line in lines_of(out) if line.strip()}
    assert set(NAMES) <= set(rows) and f"{name} *" in rows[name]
    assert all(line.isascii() for line in lines_of(out)) and "\x1b" not in out


def test_the_names_are_those_of_the_schedules():
    """The options may not import the schedules: help would wait for them."""
    assert set(NAMES) == set(CHUNKS)


def test_costs_and_memory(rankmesh_schedule):
    words = ("--pp", 4, "--microbatches", 12, "--schedule", "zb-h1", "--json")
    found = json.loads(rankmesh_schedule(*words, "--costs", "2,3,1,0.5", "--memory", 3)[1])
    costs = Costs(2, 3, 1, 0.5)
    timeline = simulate(build_schedule("zb-h1", 4, 1, 12, costs, 3), costs)
    assert found["makespan"] == timeline.makespan and max(timeline.peak_held) <= 3
    assert json.loads(rankmesh_schedule(*words, "--costs", "2,2,2")[1])["makespan"] == 2 * 39


def test_the_others_have_the_same_work_a_rank(rankmesh_schedule):
    """A stage of two chunks costs half of one that is a rank's only one."""
    out = rankmesh_schedule("--pp", 4, "--microbatches", 8, "--schedule", "zb-v")[1]
    rows = {words[0]: words[1:] for words in map(str.split, lines_of(out)) if words}
    assert rows["zb-v"] == ["*", "2", "0.0588", "0.0000", "0.0625", "51", "4", "3.5"]
    assert rows["1f1b"] == ["1", "0.2727", "0.2727", "0.3750", "66", "4", "0"]


def test_svg(rankmesh_schedule, tmp_path):
    path = tmp_path / "out.svg"
    words = ("--pp", 2, "--microbatches", 3, "--schedule", "zb-h2", "--svg", path)
    assert rankmesh_schedule(*words)[0] == 0
    assert ElementTree.parse(path).getroot().tag.endswith("svg")
    code, _, err = rankmesh_schedule(*words[:-1], tmp_path / "none" / "out.svg")
    assert code == 2 and err.count("\n") == 1 and "none" in err


def test_a_schedule_of_ones_own(rankmesh_schedule, tmp_path):
    path = tmp_path / "own.txt"
    path.write_text(schedule_text(build_schedule("zb-h2", 3, 1, 6)))
    code, out, _ = rankmesh_schedule("--file", path, "--json")
    found = json.loads(out)
    same = json.loads(
        rankmesh_schedule("--pp", 3, "--microbatches", 6, "--schedule", "zb-h2", "--json")[1]
    )
    assert code == 0 and found["schedule"] == str(path)
    assert {**found, "schedule": "zb-h2"} == same
    assert " own.txt *  " in rankmesh_schedule("--file", path)[1]
    code, _, err = rankmesh_schedule("--file", path, "--pp", 4)
    assert code == 2 and "--pp 4, but the file has 3" in err
    code, _, err = rankmesh_schedule("--file", path, "--chunks", 2)
    assert code == 2 and "--chunks 2, but the file has 1" in err
    code, _, err = rankmesh_schedule("--file", path, "--schedule", "1f1b")
    assert code == 2 and "one of them is needed" in err
    assert rankmesh_schedule("--file", path, "--memory", 5)[0] == 0
    code, _, err = rankmesh_schedule("--file", path, "--memory", 4)
    assert code == 2 and "holds 5 activations on a rank, --memory is 4" in err
    path.write_text("F0.0 B0.0 F0.1 B0.1\nF1.0 F1.1 B1.1 B1.0\n")
    code, _, err = rankmesh_schedule("--file", path)
    assert code == 2 and err.count("\n") == 1 and "waits for itself: rank 0 at B0.0" in err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--pp 4", "--microbatches is needed"),
        ("--microbatches 4", "--pp is needed"),
        ("--pp 0 --microbatches 4", "1f1b of 0 ranks"),
        ("--pp 4 --microbatches -1", "-1 microbatches"),
        ("--pp 4 --microbatches 4 --schedule zb-q", "zb-q"),
        (
            "--pp 4 --microbatches 4 --schedule zb-v --chunks 3",
            "zb-v runs 2 chunk(s) a rank, not 3",
        ),
        ("--pp 4 --microbatches 4 --costs 1,1", "--costs '1,1': three or four numbers"),
        ("--pp 4 --microbatches 4 --costs 1,x,1,0", "--costs '1,x,1,0'"),
        ("--pp 4 --microbatches 4 --costs 1,0,1,0", "cost i 0.0: a number from 1e-100 to 1e100"),
        ("--pp 4 --microbatches 4 --costs 1,1,1,-1", "cost send -1.0: a number from 0 to 1e100"),
        ("--pp 4 --microbatches 4 --memory 3", "memory 3: 1f1b of 4 ranks"),
        ("--pp 4 --microbatches 4 --memory much", "--memory"),
        ("--pp 1000 --microbatches 1000", "at most 131,072"),
        ("--file /nowhere/own.txt", "schedule file /nowhere/own.txt cannot be read"),
        ("--pp 4 --microbatches 4 --widht 3", "--widht"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(rankmesh_schedule, words, line):
    code, out, err = rankmesh_schedule(*words.split())
    assert (code, out) == (2, "")
    assert line in err and err.count("\n") == 1 and "Traceback" not in err


def test_colours_follow_the_kinds():
    """For terminals alone."""
    found = _coloured("rank 10 F0.0f1--I2 W~1")
    assert found.plain == "rank 10 F0.0f1--I2 W~1"
    pieces = [(found.plain[span.start : span.end], str(span.style)) for span in found.spans]
    assert [piece for piece, _ in pieces] == ["F0.0", "f1", "--", "I2 ", "W", "~1"]
    assert pieces[0][1] == pieces[1][1] != pieces[3][1]
    assert pieces[2][1] == pieces[5][1] == "dim"


def test_the_page_shows_what_the_command_prints(rankmesh_schedule):
    """Every line of a block, in order; a block may leave lines out where it says `...`."""
    shown = re.findall(r"```\n\$ rankmesh schedule (.*)\n([^`]*)\n```", PAGE.read_text("ascii"))
    assert len(shown) >= 8
    for words, expected in shown:
        code, out, err = rankmesh_schedule(*words.split())
        printed = [line for line in lines_of(out + err) if line]
        wanted = [line for line in expected.splitlines() if line]
        assert code == 0
        if wanted[-1] == "...":
            assert printed[: len(wanted) - 1] == wanted[:-1]
        else:
            assert printed == wanted


def test_the_command_does_not_load_torch():
    script = (
        "import sys; from rankmesh.cli.main import main;"
        "code = main(['schedule', '--pp', '4', '--microbatches', '8']);"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_least_cost_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """The comparison halves it and goes on."""
    costs = "1e-100,1,1e-100,0"
    assert main(["schedule", "--pp", "1", "--microbatches", "1", "--costs", costs]) == 0
    assert "zb-v" in capsys.readouterr().out
