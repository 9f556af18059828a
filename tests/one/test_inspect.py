"""`rankmesh inspect`: what a checkpoint holds, and whether every byte is as it was written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rankmesh.checkpoint.shelf import shelf, step_folder
from rankmesh.checkpoint.weights import write_weights
from rankmesh.cli.main import main
from tests import runs
from tests.checkpoints import SPEC, held, whole


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint each."""
    folder = tmp_path_factory.mktemp("inspect")
    runs.train_alone(runs.write_config(folder), ["train.steps=2", "checkpoint.every=1"])
    return folder / "run"


def test_for_a_person(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step, model, sizes, optimizer, samples; of a run also its other checkpoints."""
    assert main(["inspect", str(run_dir), "--verify"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["checkpoint"] == str(step_folder(run_dir, 2))
    assert lines["step"] == "2"
    assert lines["model"].startswith("llama: 2 layers, hidden 24, 4 heads (2 KV), vocabulary 257")
    assert lines["model"].endswith("; 21,240 parameters")
    assert lines["weights"] == "21 tensors in F32, 84,960 bytes"
    assert lines["optimizer"] == "adamw (m, step, v): 63 tensors in F32, 170,004 bytes"
    assert lines["samples"] == "12 consumed, 40 an epoch"
    assert lines["of"] == "run      2 complete: step-00000001, step-00000002"
    assert lines["verified"] == "every byte is as it was written"


def test_for_a_machine(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(step_folder(run_dir, 1)), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["step"], facts["parameters"], facts["damages"]) == (1, 21240, None)
    assert facts["training"]["samples"] == 6 and facts["model"]["hidden_size"] == 24
    assert facts["weights"]["bytes"] == 4 * facts["weights"]["elements"] == 4 * 21240
    assert facts["tensors"]["norm.weight"] == {"shape": [24], "dtype": "F32", "pieces": 1}
    assert facts["tensors"]["optimizer/norm.weight.step"]["shape"] == []
    on_disk = {path.name: path.stat().st_size for path in step_folder(run_dir, 1).iterdir()}
    del on_disk["manifest.json"]
    assert facts["files"] == on_disk


def test_damage(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --verify only sizes are compared; with it a flipped bit ends with exit code 2."""
    folder = tmp_path / "copy"
    subprocess.run(["cp", "-r", step_folder(run_dir, 2), folder], check=True)
    data = folder / "data-00000.safetensors"
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(raw)
    assert main(["inspect", str(folder)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(folder), "--verify"]) == 2
    out, err = capsys.readouterr()
    assert "DAMAGED" in out
    assert err.startswith(f"rankmesh: error: 1 damaged: {data}: ") and err.count("\n") == 1
    data.write_bytes(raw[:-1])
    assert main(["inspect", str(folder)]) == 2
    assert f"{data}: truncated or changed" in capsys.readouterr().err


def test_weights_alone_and_unfinished_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run whose last save was cut off: what is complete, and what is not."""
    folder = step_folder(tmp_path, 4)
    write_weights(folder, held(SPEC, 1, 0, whole(SPEC)), spec=SPEC, step=4)
    (shelf(tmp_path) / ".step-00000005.partial").mkdir()
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "training    none: weights alone" in out and "optimizer" not in out
    assert "unfinished  .step-00000005.partial\n" in out


def test_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"rankmesh: error: {tmp_path / 'nowhere'}: no such folder\n"


def test_it_loads_no_torch(run_dir: Path) -> None:
    """A manifest says all but the values, and checksums need no tensor."""
    code = (
        "import sys; from rankmesh.cli.main import main; "
        "assert main(sys.argv[1:]) == 0; assert 'torch' not in sys.modules"
    )
    words = [sys.executable, "-c", code, "inspect", str(run_dir), "--verify"]
    assert subprocess.run(words, capture_output=True, timeout=60, check=False).returncode == 0
