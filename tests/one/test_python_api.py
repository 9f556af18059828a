"""`import rankmesh as rm`: training from Python in one process, as a notebook does."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import rankmesh as rm
from rankmesh.comm.failure import Failure
from rankmesh.obs.metrics import StepMetrics, read_metrics
from rankmesh.obs.rundir import metrics_path, read_status
from tests import runs


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return runs.write_config(tmp_path)


def test_a_run_returns_what_it_came_to(config: Path) -> None:
    """Figures, the folder and the checkpoint; the files say the same."""
    test = f"data.test=['{config.parent / 'valid'}']"
    result = rm.train(config, ["train.eval_every=2", test])
    records = read_metrics(metrics_path(result.run_dir))
    assert result.run_dir == config.parent / "run"
    assert list(result.losses) == [record["loss"] for record in records]
    assert result.eval_losses == {n: records[n - 1]["eval_loss"] for n in (2, 4, 6)}
    assert result.test_loss == pytest.approx(result.eval_losses[6])
    assert result.loss == records[-1]["loss"] and result.first_step == 1
    assert result.checkpoint.is_dir() and result.checkpoint.parent.parent == result.run_dir
    assert read_status(result.run_dir)["state"] == "done"


def test_path_dict_and_config_are_one(config: Path, tmp_path: Path) -> None:
    """A dict may hold tuples, paths and None."""
    plain = rm.train(str(config))
    given: dict[str, Any] = {
        "model": {
            "family": "llama", "num_layers": 2, "hidden_size": 24, "num_heads": 4,
            "num_kv_heads": 2, "ffn_size": 37, "vocab_size": 257, "max_seq_len": 32,
            "init_std": 0.2, "preset": None,
        },
        "parallel": {"bucket_mb": 0.01},
        "data": {"train": (tmp_path / "train",), "valid": [tmp_path / "valid"], "seq_len": 12},
        "optimizer": {"lr": 1e-2, "schedule": "constant", "betas": (0.9, 0.95)},
        "train": {
            "steps": 6, "global_batch_size": 6, "microbatch_size": 2, "eval_steps": 2,
            "device": "cpu",
        },
        "log": {"run_dir": tmp_path / "from-dict"},
    }  # fmt: skip
    assert rm.train(given).losses == plain.losses
    loaded = rm.load_config(given, [f"log.run_dir={tmp_path / 'from-config'}"])
    assert isinstance(loaded, rm.RunConfig)
    assert rm.train(loaded).losses == plain.losses
    assert rm.load_config(given, "train.steps=9").train.steps == 9
    again = rm.train(loaded, [f"log.run_dir={tmp_path / 'again'}", "train.steps=2"])
    assert again.losses == plain.losses[:2]
    assert given["data"]["train"] == (tmp_path / "train",)


def test_each_step_is_heard_of(config: Path) -> None:
    """While the run goes on."""
    heard: list[StepMetrics] = []
    result = rm.train(config, on_step=heard.append)
    assert [metrics.step for metrics in heard] == list(range(1, 7))
    assert [metrics.loss for metrics in heard] == list(result.losses)
    assert heard[-1].eval_loss == result.eval_losses[6]


def test_a_resume_counts_on(config: Path) -> None:
    """`losses` are those of this call; `first_step` says where they begin."""
    first = rm.train(config, ["train.steps=4"])
    second = rm.train(config, ["train.steps=6", "train.resume=auto"])
    assert second.first_step == 5 and len(second.losses) == 2
    third = rm.train(config, ["train.steps=6", "train.resume=auto"])
    assert third.losses == () and third.loss is None and third.first_step == 7
    assert third.eval_losses == {6: pytest.approx(second.eval_losses[6])}
    assert first.run_dir == second.run_dir == third.run_dir


def test_it_runs_in_any_thread(config: Path) -> None:
    """As Ray's workers do: no signal handler is set, which only a main thread could."""
    found: list[rm.RunResult] = []
    thread = threading.Thread(target=lambda: found.append(rm.train(config)))
    thread.start()
    thread.join()
    assert len(found[0].losses) == 6
    assert not dist.is_initialized()


def test_an_error_is_raised(config: Path) -> None:
    """It ends the run, not the process; the folder says why."""

    def stop(metrics: StepMetrics) -> None:
        if metrics.step == 3:
            raise ZeroDivisionError("my own mistake")

    with pytest.raises(ZeroDivisionError, match="my own mistake"):
        rm.train(config, on_step=stop)
    status = read_status(config.parent / "run")
    assert status["state"] == "failed" and status["error"] == "my own mistake"
    with pytest.raises(rm.UserError, match="train.resume=auto"):
        rm.train(config)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["train.stepps=3"], "did you mean train.steps?"),
        (["parallel.tp=2"], "tp"),
        (["data.train=['nowhere']"], "nowhere"),
    ],
)
def test_input_in_error_is_one_line(config: Path, overrides: list[str], text: str) -> None:
    """A UserError, from before anything has started: no folder is left behind."""
    with pytest.raises(rm.UserError, match=text) as caught:
        rm.train(config, overrides)
    assert "\n" not in str(caught.value)
    assert not (config.parent / "run").exists()


def test_no_argument_is_parsed(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["notebook", "--help", "-f", "kernel.json"])
    assert len(rm.train(config, ["train.steps=1"]).losses) == 1


def test_secrets_stay_out_of_the_run_folder(config: Path) -> None:
    """The text of an error is the way in that is left: it is masked in status, logs and files."""

    def stop(metrics: StepMetrics) -> None:
        raise ConnectionError('401 from the proxy: password=hunter2, {"api_key": "hunter3"}')

    with pytest.raises(ConnectionError):
        rm.train(config, on_step=stop)
    folder = config.parent / "run"
    assert "password=***" in read_status(folder)["error"]
    for path in folder.rglob("*"):
        if path.is_file():
            assert b"hunter" not in path.read_bytes(), path
    try:
        raise ConnectionError("hf_token: hunter4")
    except ConnectionError as error:
        # What a rank writes for its launcher when it fails.
        assert "hunter" not in repr(Failure.of(error, 0, "host"))


def test_the_names_are_few_and_typed() -> None:
    """And none brings torch before it is used."""
    assert rm.__all__ == [
        "MeshError", "RankmeshError", "RunConfig", "RunResult", "StepError", "UserError",
        "__version__", "load_config", "train",
    ]  # fmt: skip
    assert set(rm.__all__) <= set(dir(rm))
    code = (
        "import sys, rankmesh as rm\n"
        "config = rm.load_config({'train': {'steps': 3}})\n"
        "assert isinstance(config, rm.RunConfig) and callable(rm.train)\n"
        "assert 'torch' not in sys.modules\n"
        "import rankmesh.train.session\n"
        "from rankmesh import train\n"
        "assert callable(train) and train is rm.train and 'torch' in sys.modules\n"
        "try: rm.trian\n"
        "except AttributeError as error: assert 'trian' in str(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_page_names_what_there_is() -> None:
    """docs/python.md: every name of `rm`, and every field of a result."""
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="ascii")
    assert set(re.findall(r"\brm\.(\w+)", page)) == set(rm.__all__)
    fields = {entry.name for entry in dataclasses.fields(rm.RunResult)}
    assert all(f"`{name}`" in page for name in {*fields, "loss"})
