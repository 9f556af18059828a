"""`rankmesh.train` as one rank of several: in a script under torchrun, in a group made before."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import rankmesh as rm
from rankmesh.comm.environ import read_launch
from rankmesh.obs.rundir import read_status
from tests import runs

ROOT = Path(__file__).resolve().parents[2]
MODULE = "tests.gloo.python_jobs"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes find the package and the tests; nothing says that a launcher started us."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert read_launch() is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    runs.write_config(tmp_path)
    return tmp_path


def torchrun(mode: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The script under torchrun, with arguments that are not ours to parse."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", MODULE, mode, str(folder), "--help"]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def notes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_a_script_under_torchrun(folder: Path) -> None:
    """Twice in one script, on two meshes; both ranks hold the result of the single process."""
    plain = rm.train(folder / "config.toml")
    done = torchrun("script", folder)
    assert done.returncode == 0, done.stderr
    for found in notes(folder):
        assert found["tp"] == pytest.approx(plain.losses, rel=1e-5)
        assert found["dp"] == pytest.approx(plain.losses, rel=1e-5)
        assert found["evals"] == pytest.approx(plain.eval_losses[6], rel=1e-5)
        assert not found["group_left"]
    assert read_status(folder / "second")["state"] == "done"


def test_a_group_that_exists_is_used(folder: Path) -> None:
    """As Ray and launchers of one's own make it: it is used for every run and left standing."""
    plain = rm.train(folder / "config.toml")
    command = [sys.executable, "-m", MODULE, "own", str(folder)]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    codes = [rank.wait(timeout=200) for rank in ranks]
    assert codes == [0, 0]
    for found in notes(folder):
        assert found["tp"] == pytest.approx(plain.losses, rel=1e-5)
        assert found["dp"] == pytest.approx(plain.losses, rel=1e-5)
        assert found["total"] == 2.0


def test_one_failure_reaches_all(folder: Path) -> None:
    """Field report U01 in a script: the failing rank raises its own error; the other one, inside a
    collective, ends within seconds, by an error that names rank 1 or as a process.
    """
    began = time.time()
    done = torchrun("fail", folder)
    assert done.returncode != 0 and time.time() - began < 100
    first = json.loads((folder / "rank-1.json").read_text())
    assert first["kind"] == "ZeroDivisionError" and first["text"] == "a mistake of rank 1"
    other = folder / "rank-0.json"
    if other.exists():
        found = json.loads(other.read_text())
        assert found["kind"] == "MeshError" and "a mistake of rank 1" in found["text"]
        assert found["at"] - first["at"] < 30
    status = read_status(folder / "run")
    assert status["state"] == "failed"
    assert "a mistake of rank 1" in done.stderr
