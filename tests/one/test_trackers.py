"""Trackers, and what they do to a run however they fail: nothing."""

from __future__ import annotations

import importlib
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rankmesh.config.schema import TRACKERS as NAMES
from rankmesh.config.schema import RunConfig
from rankmesh.errors import UserError
from rankmesh.obs import trackers
from rankmesh.obs.trackers import RunInfo, Trackers, check_trackers, figures, load_trackers
from tests.tracked import CONFIG, SECRET, install, step, texts


class Listener:
    """A tracker that keeps what it hears."""

    def __init__(self, run: RunInfo, config: Mapping[str, Any]) -> None:
        self.run, self.config = run, config
        self.heard: list[tuple[int, dict[str, float]]] = []
        self.ended: bool | None = None
        self.threads = {threading.current_thread().name}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.threads.add(threading.current_thread().name)
        self.heard.append((step, dict(metrics)))

    def close(self, *, failed: bool) -> None:
        self.ended = failed


@pytest.fixture
def opened() -> dict[str, Listener]:
    """The listeners made so far, by the name of their opener."""
    return {}


@pytest.fixture
def opener(opened: dict[str, Listener]) -> Callable[[str], Any]:
    def make(name: str) -> Any:
        def open_tracker(run: RunInfo, config: Mapping[str, Any]) -> Listener:
            opened[name] = Listener(run, config)
            return opened[name]

        return open_tracker

    return make


def test_the_config_names_the_trackers_there_are() -> None:
    """And nothing is tracked unless asked for."""
    assert set(NAMES) == set(trackers.TRACKERS)
    assert RunConfig().log.trackers == ()


def test_figures_have_flat_names() -> None:
    flat = figures(step(2, eval_loss=3.0, mfu=0.4))
    assert flat["comm_bytes/tp"] == 4096 and flat["exposed_s/tp"] == 0.01
    assert flat["loss"] == 1.0 and flat["eval_loss"] == 3.0 and flat["mfu"] == 0.4
    assert "step" not in flat and "format_version" not in flat
    assert "mfu" not in figures(step(2)) and "eval_loss" not in figures(step(2))
    assert all(isinstance(value, float) for value in flat.values())
    assert math.isnan(figures(step(2, loss=math.nan))["loss"])


def test_steps_reach_every_tracker_in_order(
    tmp_path: Path, opener: Callable[[str], Any], opened: dict[str, Listener]
) -> None:
    """From a thread of their own."""
    openers = {"one": opener("one"), "two": opener("two")}
    with Trackers(openers, tmp_path, CONFIG, pytest.fail) as all_of_them:
        for number in range(1, 40):
            all_of_them.log(step(number))
    for tracker in opened.values():
        assert [number for number, _ in tracker.heard] == list(range(1, 40))
        assert tracker.heard[3][1] == figures(step(4))
        assert tracker.ended is False
        assert tracker.threads == {"rankmesh-trackers"}
    assert set(opened) == {"one", "two"}


def test_no_secret_is_handed_over(
    tmp_path: Path, opener: Callable[[str], Any], opened: dict[str, Listener]
) -> None:
    with Trackers({"one": opener("one")}, tmp_path, CONFIG, pytest.fail) as one:
        one.log(step(1))
    shown = opened["one"].config
    assert SECRET not in " ".join(texts(shown))
    assert shown["log"] == {"hf_token": "***", "api_key": "***", "deep": {"password": "***"}}
    assert shown["data"]["tokenizer"] == "bytes"
    assert not [path for path in tmp_path.iterdir() if SECRET in path.read_text()]


def test_without_trackers_nothing_happens(tmp_path: Path) -> None:
    before = threading.active_count()
    with Trackers({}, tmp_path, CONFIG, pytest.fail) as none:
        none.log(step(1))
        assert threading.active_count() == before
    assert not list(tmp_path.iterdir())


def test_a_later_attempt_is_the_same_run(
    tmp_path: Path, opener: Callable[[str], Any], opened: dict[str, Listener]
) -> None:
    with Trackers({"one": opener("one")}, tmp_path, {}, pytest.fail):
        pass
    first = opened["one"].run
    with Trackers({"one": opener("one")}, tmp_path, {}, pytest.fail, first_step=8):
        pass
    second = opened["one"].run
    assert (first.resumed, second.resumed) == (False, True)
    assert first.id == second.id and second.first_step == 8
    assert first.name == tmp_path.name and first.folder == tmp_path
    other = tmp_path / "other"
    other.mkdir()
    with Trackers({"one": opener("one")}, other, {}, pytest.fail):
        pass
    assert opened["one"].run.id != first.id


class Broken(Listener):
    """Fails where the test says."""

    where = ""

    def __init__(self, run: RunInfo, config: Mapping[str, Any]) -> None:
        super().__init__(run, config)
        self._fail("open")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._fail("log")

    def close(self, *, failed: bool) -> None:
        self._fail("close")

    def _fail(self, here: str) -> None:
        if self.where == here:
            raise ConnectionError(f"no route\nto the {here} host")


@pytest.mark.parametrize("where", ["open", "log", "close"])
def test_a_failing_tracker_warns_once(
    where: str, tmp_path: Path, opener: Callable[[str], Any], opened: dict[str, Listener],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One line; the run and the other trackers go on."""
    monkeypatch.setattr(Broken, "where", where)
    warned: list[str] = []
    openers = {"broken": Broken, "one": opener("one")}
    with Trackers(openers, tmp_path, {}, warned.append) as both:
        for number in range(1, 6):
            both.log(step(number))
    (line,) = warned
    assert line.startswith("tracker broken failed (ConnectionError: no route to the ")
    assert "\n" not in line
    assert len(opened["one"].heard) == 5 and opened["one"].ended is False


class Slow(Listener):
    """Waits for the test at its first step."""

    gate = threading.Event()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self.gate.wait(30)
        super().log(step, metrics)


def test_a_slow_tracker_delays_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that never answers; beyond the backlog steps are left out, said once."""
    monkeypatch.setattr(trackers, "_BACKLOG", 10)
    monkeypatch.setattr(trackers, "_PATIENCE_AFTER_FAILURE_S", 0.2)
    monkeypatch.setattr(Slow, "gate", threading.Event())
    warned: list[str] = []
    slow = Trackers({"slow": Slow}, tmp_path, {}, warned.append)
    began = time.monotonic()
    for number in range(1, 100):
        slow.log(step(number))
    slow.close(failed=True)
    assert time.monotonic() - began < 10
    Slow.gate.set()
    assert len(warned) == 2
    assert "behind" in warned[0] and "did not finish" in warned[1]


def test_the_end_says_how_the_run_went(
    tmp_path: Path, opener: Callable[[str], Any], opened: dict[str, Listener]
) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        Trackers({"one": opener("one")}, tmp_path, {}, pytest.fail) as one,
    ):
        one.log(step(1))
        raise ZeroDivisionError
    assert opened["one"].ended is True and len(opened["one"].heard) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found without importing anything, before a run starts."""
    monkeypatch.setitem(sys.modules, name, None)
    for load in (check_trackers, load_trackers):
        with pytest.raises(UserError) as caught:
            load([name])
        assert str(caught.value) == (
            f"log.trackers names {name}, which is not installed; install it with "
            f"`pip install 'rankmesh[{name}]'` or take it out"
        )


def test_a_broken_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "wandb", {})
    monkeypatch.delitem(sys.modules, "rankmesh.obs.trackers_wandb", raising=False)

    def broken(name: str) -> Any:
        raise TypeError("Descriptors cannot be created directly")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(UserError, match="wandb, which cannot be imported: Descriptors"):
        load_trackers(["wandb"])
