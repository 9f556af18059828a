"""TensorBoard for real; Weights & Biases, MLflow and Trackio against small fakes."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankmesh.obs.trackers import Trackers, figures, load_trackers
from tests.tracked import SECRET, install, step, texts, track


def test_tensorboard_for_real(tmp_path: Path) -> None:
    """Read back with TensorBoard's own reader; a later attempt replaces the steps it makes anew."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert track("tensorboard", tmp_path) == []
    assert track("tensorboard", tmp_path, first=2) == []
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert set(tags["scalars"]) == set(figures(step(1)))
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert losses == [(1, 2.0), (2, 1.0), (3, pytest.approx(2 / 3))]
    text = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    assert b"fp32" in text and SECRET.encode() not in text


class FakeWandb:
    """What our file uses of wandb, and a record of how."""

    def __init__(self, mode: str, *, key: bool) -> None:
        self.mode, self.key = mode, key
        self.calls: list[tuple[str, Any]] = []

    def content(self) -> dict[str, Any]:
        return {
            "setup": lambda: types.SimpleNamespace(settings=types.SimpleNamespace(mode=self.mode)),
            "login": self.login,
            "init": self.init,
            "Settings": dict,
        }

    def login(self, **given: Any) -> bool:
        self.calls.append(("login", given))
        return self.key

    def init(self, **given: Any) -> Any:
        self.calls.append(("init", given))
        return types.SimpleNamespace(
            log=lambda figures, step: self.calls.append(("log", (step, figures))),
            finish=lambda exit_code: self.calls.append(("finish", exit_code)),
        )


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run for all attempts, its files in the run's folder; the key is never asked for."""
    fake = FakeWandb("online", key=True)
    install(monkeypatch, "wandb", fake.content())
    assert track("wandb", tmp_path) == []
    assert track("wandb", tmp_path, first=3, fail=True) == []
    names = [name for name, _ in fake.calls]
    assert names == ["login", "init", "log", "log", "finish"] * 2
    assert fake.calls[0][1] == {"prompt": False, "verify": False}
    first, second = (given for name, given in fake.calls if name == "init")
    assert first["dir"] == str(tmp_path) and first["id"] == second["id"]
    assert (first["resume"], second["resume"]) == (None, "allow")
    assert first["settings"] == {"console": "off"}
    assert "project" not in first and "mode" not in first
    assert SECRET not in " ".join(texts(first["config"]))
    assert fake.calls[2] == ("log", (1, figures(step(1))))
    assert [code for name, code in fake.calls if name == "finish"] == [0, 1]


def test_wandb_offline_needs_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """WANDB_MODE is wandb's own to read: its settings say offline, and no login is tried."""
    fake = FakeWandb("offline", key=False)
    install(monkeypatch, "wandb", fake.content())
    assert track("wandb", tmp_path) == []
    assert [name for name, _ in fake.calls] == ["init", "log", "log", "finish"]


def test_wandb_without_a_key_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `wandb.init` would ask on the terminal, and a job would wait for ever."""
    fake = FakeWandb("online", key=False)
    install(monkeypatch, "wandb", fake.content())
    (line,) = track("wandb", tmp_path)
    assert "WANDB_API_KEY" in line and "WANDB_MODE=offline" in line
    assert [name for name, _ in fake.calls] == ["login"]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []

    def record(name: str, answer: Any = None) -> Callable[..., Any]:
        def call(*args: Any, **given: Any) -> Any:
            calls.append((name, (*args, given)))
            return answer

        return call

    before = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
    names = ("start_run", "log_params", "log_metrics", "end_run")
    content = {name: record(name) for name in names}
    install(monkeypatch, "mlflow", {**content, "search_runs": record("search_runs", [before])})
    assert track("mlflow", tmp_path) == []
    assert track("mlflow", tmp_path, first=3, fail=True) == []
    assert [name for name, _ in calls] == [
        "start_run", "log_params", "log_metrics", "log_metrics", "end_run",
        "search_runs", "start_run", "log_metrics", "log_metrics", "end_run",
    ]  # fmt: skip
    run_id = calls[0][1][0]["tags"]["rankmesh.run"]
    assert run_id in calls[5][1][0]["filter_string"]
    assert calls[6][1] == ({"run_id": "r1"},)
    params = calls[1][1][0]
    assert params["train.steps"] == "3" and params["data.train"] == '["a", "b"]'
    assert params["log.deep.password"] == "***" and "data.test" not in params
    assert calls[2][1] == (figures(step(1)), {"step": 1})
    assert [args[0] for name, args in calls if name == "end_run"] == ["FINISHED", "FAILED"]


def test_mlflow_takes_a_hundred_parameters_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And 6000 characters of each: its own limits."""
    batches: list[dict[str, str]] = []
    content: dict[str, Any] = {name: lambda *a, **k: None for name in ("start_run", "end_run")}
    install(monkeypatch, "mlflow", {**content, "log_params": batches.append})
    config = {"big": {f"key{n}": "x" * 7000 for n in range(250)}}
    with Trackers(load_trackers(["mlflow"]), tmp_path, config, pytest.fail):
        pass
    assert [len(batch) for batch in batches] == [100, 100, 50]
    assert {len(text) for batch in batches for text in batch.values()} == {6000}


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []

    def init(**given: Any) -> Any:
        calls.append(("init", given))
        return types.SimpleNamespace(
            log=lambda figures, step: calls.append(("log", (step, figures))),
            finish=lambda: calls.append(("finish", None)),
        )

    install(monkeypatch, "trackio", {"init": init})
    assert track("trackio", tmp_path) == []
    assert track("trackio", tmp_path, first=3) == []
    assert [name for name, _ in calls] == ["init", "log", "log", "finish"] * 2
    first, second = (given for name, given in calls if name == "init")
    assert first["name"] == second["name"] and first["name"].startswith(tmp_path.name)
    assert (first["resume"], second["resume"]) == ("never", "allow")
    assert first["embed"] is False and first["project"] == "rankmesh"
    assert SECRET not in " ".join(texts(first["config"]))
