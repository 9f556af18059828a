"""`rankmesh doctor`: what it tells of a machine that works, and of one that does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rankmesh.comm.machine import machine_facts, machine_findings

ROOT = Path(__file__).resolve().parents[2]
FACTS: dict[str, Any] = {
    "host": "alpha",
    "accelerators": [],
    "shm_bytes": 1 << 30,
    "open_files": 65536,
    "locked_memory_bytes": -1,
    "loopback": {"127.0.0.1": True, "::1": False},
}


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks find the package; nothing says that a launcher started us."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    """The command, as a user types it."""
    return subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_machine_that_works() -> None:
    """Machine, versions, start-up times and the speed of the link; exit 0."""
    done = doctor("rankmesh", "doctor", "--nproc", "2", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] and [one["rank"] for one in report["ranks"]] == [0, 1]
    assert not [found for found in report["findings"] if found["fatal"]]
    (link,) = report["links"]
    assert (link["low"], link["high"]) == (0, 1)
    assert 0 < link["latency_s"] < 1 and link["bytes_per_s"] > 1e6
    (machine,) = report["machines"]
    assert machine["cores"] >= 1 and machine["torch"] == str(torch.__version__)
    assert list(report["phases"])[:4] == ["environment", "device", "rendezvous", "preflight A"]


@pytest.mark.slow
def test_the_form_for_people() -> None:
    """One fact a line, under names; three ranks form a ring of three links."""
    done = doctor("rankmesh", "doctor", "--nproc", "3", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    words = [line.split()[0] for line in done.stdout.splitlines()]
    assert words[:5] == ["machine", "system", "versions", "package", "ranks"]
    assert words.count("link") == 3 and "GB/s" in done.stdout


@pytest.mark.slow
def test_joined_to_a_launcher() -> None:
    """Under torchrun it starts nothing, and rank 0 alone prints."""
    words = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "rankmesh")
    done = doctor(*words, "doctor", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] and len(report["ranks"]) == 2 and len(report["links"]) == 1


def test_ranks_that_cannot_start() -> None:
    """Exit 1, the reason on one line of stderr, and a report all the same."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = doctor("rankmesh", "doctor", "--nproc", "2", "--device", "cuda", "--json")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "device cuda: no CUDA device is visible" in line
    report = json.loads(done.stdout)
    assert not report["ok"] and "did not start" in report["findings"][-1]["text"]


@pytest.mark.parametrize("words", [("--nproc", "0"), ("--patience", "0"), ("--nproc", "x")])
def test_wrong_input(words: tuple[str, str]) -> None:
    """One line, exit 2."""
    done = doctor("rankmesh", "doctor", *words)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert words[0] in done.stderr


@pytest.mark.parametrize(
    ("change", "text", "fatal"),
    [
        ({"loopback": {"127.0.0.1": False, "::1": False}}, "no message comes back", True),
        ({"shm_bytes": 8 << 20}, "/dev/shm has 8 MiB free", False),
        ({"open_files": 256}, "256 open files are allowed", False),
        (
            {"accelerators": [{"name": "gpu"}], "locked_memory_bytes": 64 << 10},
            "0 MiB may be locked",
            False,
        ),
    ],
)
def test_what_a_machine_lacks(change: dict[str, Any], text: str, fatal: bool) -> None:
    """Each limit has a line with the value and the remedy."""
    assert machine_findings(FACTS) == []
    (finding,) = machine_findings({**FACTS, **change})
    assert text in finding.text and finding.text.startswith("alpha: ")
    assert finding.fatal == fatal


def test_facts_of_this_machine() -> None:
    """They are there, and are what JSON can carry."""
    facts = machine_facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["memory_bytes"] > facts["memory_free_bytes"] > 0
    assert any(facts["loopback"].values())
