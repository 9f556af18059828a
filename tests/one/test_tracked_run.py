"""A training run with trackers named in its config."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import rankmesh as rm
from rankmesh.obs.metrics import read_metrics
from rankmesh.obs.rundir import metrics_path, read_status
from tests import runs
from tests.tracked import install


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return runs.write_config(tmp_path)


def test_a_tracker_gets_what_the_file_gets(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step, evaluations included, and the resolved config; a resume goes on there."""
    started: list[dict[str, Any]] = []
    heard: list[tuple[int, dict[str, float]]] = []
    ended: list[bool] = []

    class Run:
        def log(self, figures: dict[str, float], step: int) -> None:
            heard.append((step, figures))

        def finish(self) -> None:
            ended.append(True)

    def init(**given: Any) -> Run:
        started.append(given)
        return Run()

    install(monkeypatch, "trackio", {"init": init})
    for steps in ("4", "6"):
        changes = [f"train.steps={steps}", "log.trackers=['trackio']", "train.resume=auto"]
        rm.train(config, [*changes, "train.eval_every=2"])
    records = read_metrics(metrics_path(config.parent / "run"))
    assert (
        [step for step, _ in heard] == [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    )
    for (_, figures), record in zip(heard, records, strict=True):
        assert figures["loss"] == record["loss"]
        assert figures.get("eval_loss") == record.get("eval_loss")
    assert started[0]["config"]["model"]["hidden_size"] == 24
    assert started[0]["config"]["optimizer"]["eps"] == 1e-8
    assert [given["resume"] for given in started] == ["never", "allow"]
    assert started[0]["name"] == started[1]["name"]
    assert ended == [True, True]


def test_a_failing_tracker_ends_nothing(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One warning on the console and in the log; the losses are those of a run without it."""

    def init(**given: Any) -> None:
        raise ConnectionError("token=hunter2 was refused")

    install(monkeypatch, "trackio", {"init": init})
    plain = rm.train(config, [f"log.run_dir={config.parent / 'plain'}"])
    capsys.readouterr()
    tracked = rm.train(config, ["log.trackers=['trackio']"])
    assert tracked.losses == plain.losses
    assert read_status(tracked.run_dir)["state"] == "done"
    shown = capsys.readouterr().out
    logged = (tracked.run_dir / "log" / "rank-00000.log").read_text()
    for text in (shown, logged):
        assert text.count("tracker trackio failed (ConnectionError: token=***") == 1
        assert "hunter2" not in text


def test_a_run_without_trackers_loads_none(config: Path) -> None:
    """Off by default: no package, no thread, no file."""
    result = rm.train(config)
    assert not (result.run_dir / "trackers.json").exists()
    assert not (result.run_dir / "tensorboard").exists()


def test_a_missing_tracker_is_found_before_the_run(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, and no folder that a second try would trip over."""
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(rm.UserError, match=r"pip install 'rankmesh\[mlflow\]'"):
        rm.train(config, ["log.trackers=['mlflow']"])
    assert not (config.parent / "run").exists()


def test_an_unknown_tracker_names_the_nearest(config: Path) -> None:
    with pytest.raises(rm.UserError, match="did you mean wandb"):
        rm.train(config, ["log.trackers=['wanbd']"])
