"""Owns `rankmesh map`: what people read, what machines read, what is refused. Imports no torch."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from rankmesh.topology import GROUP_NAMES, ParallelPlan, coordinate, groups

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mesh.md"


@pytest.fixture
def rankmesh_map(rankmesh):
    """That command alone."""
    return partial(rankmesh, "map")


def rows_of(text):
    """The lines of a table as lists of cells."""
    return [line.split() for line in text.splitlines()]


def test_the_table_of_16_ranks(rankmesh_map):
    code, out, err = rankmesh_map("--world-size", 16, "--tp", 2, "--pp", 4)
    assert (code, err) == (0, "")
    assert out.startswith("16 ranks = tp 2 x cp 1 x dp 2 x pp 4")
    rows = rows_of(out)
    assert ["rank", "tp", "cp", "dp", "pp", "TP", "group", "DP", "group", "PP", "group"] in rows
    assert ["0", "0", "0", "0", "0", "[0,1]", "[0,2]", "[0,4,8,12]"] in rows
    assert ["15", "1", "0", "1", "3", "[14,15]", "[13,15]", "[3,7,11,15]"] in rows
    assert ["pp", "4", "4", "[0,4,8,12]"] in rows
    assert "EP" not in out and "host" not in out and "warning" not in out


def test_the_table_with_experts_and_hosts(rankmesh_map):
    words = ("--world-size", 8, "--tp", 2, "--ep", 4, "--etp", 2, "--ranks-per-host", 4)
    code, out, err = rankmesh_map(*words)
    assert (code, err) == (0, "")
    assert "expert view of a stage's 8 ranks = etp 2 x ep 4 x edp 1" in out
    rows = rows_of(out)
    assert [
        "5",
        "host1",
        "1",
        "0",
        "2",
        "0",
        "1",
        "2",
        "0",
        "[4,5]",
        "[1,3,5,7]",
        "[1,3,5,7]",
    ] in rows
    assert "warning" not in out


def test_json_of_16_ranks(rankmesh_map):
    code, out, err = rankmesh_map("--world-size", 16, "--tp", 2, "--pp", 4, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    plan = ParallelPlan.for_world(16, tp=2, pp=4)
    assert found["world_size"] == 16 and found["warnings"] == []
    assert found["plan"] == {**plan.to_dict(), "edp": 4}
    assert [place["rank"] for place in found["coordinates"]] == list(range(16))
    for place in found["coordinates"]:
        held = coordinate(plan, place["rank"])
        assert all(place[axis] == getattr(held, axis) for axis in ("tp", "cp", "dp", "pp", "ep"))
    assert set(found["groups"]) == set(GROUP_NAMES)
    for name in GROUP_NAMES:
        assert found["groups"][name] == [list(group) for group in groups(plan, name)]


def test_json_carries_hosts_and_the_mending(rankmesh_map):
    words = ("--world-size", 8, "--tp", 2, "--ranks-per-host", 4, "--placement", "cyclic", "--json")
    found = json.loads(rankmesh_map(*words)[1])
    assert [place["host"] for place in found["coordinates"]] == ["host0", "host1"] * 4
    (warning,) = found["warnings"]
    assert warning["axis"] == "tp" and len(warning["crossing"]) == warning["of"] == 4
    assert warning["mending_order"] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert warning["still_crossing"] == []
    order = ",".join(warning["mending_axes"])
    assert json.loads(rankmesh_map(*words, "--order", order)[1])["warnings"] == []


def test_crossing_hosts_is_warned_of(rankmesh_map):
    words = ("--world-size", 8, "--tp", 2, "--ranks-per-host", 4, "--placement", "cyclic")
    _, out, _ = rankmesh_map(*words)
    assert "warning: 4 of 4 tp groups cross hosts: [0,1] on host0+host1" in out
    assert "today's ranks in the order 0 2 4 6 1 3 5 7" in out
    assert "--order " in out
    # Five ranks on one host and three on the other: one group has to cross.
    _, out, _ = rankmesh_map("--world-size", 8, "--tp", 2, "--ranks-per-host", "5,3")
    assert "warning: 1 of 4 tp groups cross hosts: [4,5] on host0+host1" in out
    assert "no order mends it" in out
    _, out, _ = rankmesh_map("--world-size", 8, "--tp", 2, "--ranks-per-host", "3,2,3")
    assert "1 tp group(s) still cross" in out


def test_five_answers_about_one_rank(rankmesh_map):
    words = ("--world-size", 16, "--tp", 2, "--pp", 4, "--rank", 5)
    code, out, _ = rankmesh_map(*words, "--ranks-per-host", 4)
    lines = out.splitlines()
    assert code == 0 and len(lines) == 5
    assert [line.split("  ")[0] for line in lines] == [
        "device", "tp peers", "stages", "dp peers", "random",
    ]  # fmt: skip
    assert lines[0].endswith("cuda:1 of host1, or its CPU (local rank 1)")
    assert "rank [4] (tp rank 1)" in lines[1]
    assert "previous rank 1 and next rank 9 (this is stage 1)" in lines[2]
    assert "rank [7] (dp rank 0)" in lines[3]
    assert "shared: initial values with rank [7], dropout masks with rank [4]; private:" in lines[4]
    code, out, _ = rankmesh_map(*words)
    assert len(out.splitlines()) == 5 and "LOCAL_RANK" in out.splitlines()[0]


def test_the_ends_of_the_pipeline(rankmesh_map):
    words = ("--world-size", 4, "--pp", 4, "--json", "--rank")
    first, last = (json.loads(rankmesh_map(*words, rank)[1]) for rank in (0, 3))
    assert (first["previous_stage"], first["next_stage"]) == (None, 1)
    assert (last["previous_stage"], last["next_stage"]) == (2, None)
    assert first["tp_peers"] == first["dp_peers"] == []
    assert "no rank" in rankmesh_map(*words[:-2], "--rank", 0)[1]


def test_a_big_world_is_cut_short_unless_asked_for(rankmesh_map):
    words = ("--world-size", 4096, "--tp", 8, "--pp", 8, "--ranks-per-host", 8)
    code, out, _ = rankmesh_map(*words)
    lines = out.splitlines()
    assert code == 0 and len(lines) < 50
    assert any("4,080 more ranks; --all shows them" in line for line in lines)
    assert ["tp,", "tp_cp", "512", "8", "0", "[0,1,2,3,4,5,6,7]"] in rows_of(out)
    _, out, _ = rankmesh_map("--world-size", 100, "--tp", 2, "--all")
    assert len(out.splitlines()) > 100


def test_kv_heads_and_zero_groups(rankmesh_map):
    words = ("--world-size", 8, "--tp", 4, "--kv-heads", 2, "--zero-group", 1, "--json")
    found = json.loads(rankmesh_map(*words)[1])["groups"]
    assert found["tp_rep"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert found["shard_rep"] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_order_takes_commas_or_dashes(rankmesh_map):
    for order in ("dp,tp,cp,pp", "dp-tp-cp-pp"):
        out = rankmesh_map("--world-size", 4, "--tp", 2, "--order", order, "--json")[1]
        assert json.loads(out)["groups"]["tp"] == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--world-size 12 --tp 2 --pp 4", "12 ranks do not tile: tp 2 * pp 4 = 8"),
        ("--world-size 0", "world_size 0"),
        ("--world-size 4 --tp 0", "tp 0"),
        ("--world-size 4 --order tp,dp", "order tp, dp:"),
        ("--world-size 4 --rank 4", "rank 4: allowed are 0 to 3"),
        ("--world-size 4 --ranks-per-host 0", "--ranks-per-host '0'"),
        ("--world-size 4 --ranks-per-host 2,x", "--ranks-per-host '2,x'"),
        ("--world-size 4 --ranks-per-host 2,1", "the hosts hold 3 ranks, --world-size is 4"),
        ("--world-size 4 --tp 4 --kv-heads 3", "tp 4 exceeds num_kv_heads 3"),
        ("--world-size 4 --kv-heads 0", "--kv-heads 0"),
        ("--world-size 4 --tpp 2", "--tpp"),
        ("--tp 2", "--world-size"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(rankmesh_map, words, line):
    code, out, err = rankmesh_map(*words.split())
    assert (code, out) == (2, "")
    assert line in err and err.count("\n") == 1 and "Traceback" not in err


def test_the_page_shows_what_the_command_prints(rankmesh_map):
    shown = re.findall(r"```\n\$ rankmesh map (.*)\n([^`]*)\n```", PAGE.read_text("ascii"))
    assert len(shown) == 5
    for words, expected in shown:
        _, out, err = rankmesh_map(*words.split())
        lines = [line.rstrip() for line in (out + err).replace("\u2500", "-").splitlines()]
        # The page leaves out the second of two blank lines, and those around the whole.
        printed = re.sub(r"\n{2,}", "\n\n", "\n".join(lines)).strip("\n")
        assert printed == expected


@pytest.mark.parametrize("size", ["16777217", "99999999999999999999"])
def test_a_world_beyond_reason_is_refused(size, rankmesh_map):
    code, out, err = rankmesh_map("--world-size", size, "--rank", "3")
    assert (code, out, len(err.splitlines())) == (2, "", 1) and "16,777,216" in err


def test_a_full_disk_is_one_line():
    done = subprocess.run(
        f"{sys.executable} -m rankmesh map --world-size 64 --json > /dev/full",
        shell=True, capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1


def test_the_command_does_not_load_torch():
    script = (
        "import sys; from rankmesh.cli.main import main;"
        "code = main(['map', '--world-size', '8', '--tp', '2', '--ranks-per-host', '4']);"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
