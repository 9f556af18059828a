"""Trackers: TensorBoard, Weights & Biases, MLflow and Trackio behind one small interface.

Owns the table that finds a tracker's file, the thread that feeds them, and what happens where one
fails: one warning, and the run goes on. It knows none of their packages.
"""

from __future__ import annotations

import importlib
import importlib.util
import queue
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rankmesh.errors import UserError
from rankmesh.obs.jsonfile import read_json, write_json
from rankmesh.obs.metrics import StepMetrics
from rankmesh.obs.secrets import masked

# Name in log.trackers -> the module that owns its package. The package, and the extra that
# installs it, have the tracker's own name.
TRACKERS: Mapping[str, str] = {
    name: f"rankmesh.obs.trackers_{name}" for name in ("tensorboard", "wandb", "mlflow", "trackio")
}

# Steps that may wait for a slow tracker: more are left out rather than kept in memory.
_BACKLOG = 10_000
_PATIENCE_S, _PATIENCE_AFTER_FAILURE_S = 60.0, 2.0
_LONGEST_REASON = 300
_NOT_FIGURES = ("format_version", "step")


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """A run as a tracker is told of it.

    id: one for all attempts of the run, unlike that of any other run. name: for people. folder: of
    the run. first_step: the first one that this attempt logs. resumed: an earlier attempt was
    tracked.
    """

    id: str
    name: str
    folder: Path
    first_step: int = 1
    resumed: bool = False


class Tracker(Protocol):
    """An open tracker. Everything it does happens in one thread, which is not the main one."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the figures of one step; "/" in a name groups it."""

    def close(self, *, failed: bool) -> None:
        """Write what is left and end the run there."""


# From the run and its masked config to an open tracker.
Opener = Callable[[RunInfo, Mapping[str, Any]], Tracker]


def check_trackers(names: Iterable[str]) -> None:
    """Raises UserError for the first tracker whose package is not installed; imports nothing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise _missing(name, "is not installed")


def load_trackers(names: Iterable[str]) -> dict[str, Opener]:
    """Imports the file, and with it the package, of each tracker named. Raises UserError."""
    found: dict[str, Opener] = {}
    for name in names:
        check_trackers([name])
        try:
            found[name] = importlib.import_module(TRACKERS[name]).open_tracker
        except Exception as error:  # whatever a broken installation raises
            raise _missing(name, f"cannot be imported: {error}") from error
    return found


def _missing(name: str, why: str) -> UserError:
    return UserError(
        f"log.trackers names {name}, which {why}; install it with "
        f"`pip install 'rankmesh[{name}]'` or take it out"
    )


def figures(metrics: StepMetrics) -> dict[str, float]:
    """The numbers of a step under flat names: `comm_bytes/tp`, `exposed_s/tp`; None is left out."""
    flat: dict[str, float] = {}
    for key, value in metrics.to_dict().items():
        if isinstance(value, Mapping):
            flat.update({f"{key}/{axis}": float(number) for axis, number in value.items()})
        elif isinstance(value, int | float) and key not in _NOT_FIGURES:
            flat[key.replace(".", "/")] = float(value)
    return flat


def run_info(folder: Path, first_step: int = 1) -> RunInfo:
    """What trackers are told of the run in `folder`; its id is kept there for later attempts."""
    path = folder / "trackers.json"
    resumed = path.exists()
    if not resumed:
        write_json(path, {"run_id": uuid.uuid4().hex[:12]})
    return RunInfo(
        id=read_json(path)["run_id"],
        name=folder.resolve().name,
        folder=folder,
        first_step=first_step,
        resumed=resumed,
    )


class Trackers:
    """The trackers of a run, fed by a thread, so that a slow or failing one delays no step.

    openers: from `load_trackers`; with none, nothing is started. config: of the run; texts under
    secret names are masked before any tracker sees them. warn: takes a line, once for each tracker
    that fails and is given up.
    """

    def __init__(
        self,
        openers: Mapping[str, Opener],
        folder: Path,
        config: Mapping[str, Any],
        warn: Callable[[str], object],
        first_step: int = 1,
    ) -> None:
        self._warn = warn
        self._full = False
        self._failed = False
        self._steps: queue.Queue[StepMetrics | None] = queue.Queue(_BACKLOG)
        self._thread: threading.Thread | None = None
        if openers:
            run, shown = run_info(folder, first_step), masked(config)
            self._thread = threading.Thread(
                target=self._feed, args=(openers, run, shown), name="rankmesh-trackers", daemon=True
            )
            self._thread.start()

    def log(self, metrics: StepMetrics) -> None:
        """Hand a step on; never waits."""
        if self._thread is None or self._full:
            return
        try:
            self._steps.put_nowait(metrics)
        except queue.Full:
            self._full = True
            self._warn(f"trackers are {_BACKLOG} steps behind: no step from {metrics.step} on")

    def close(self, *, failed: bool = False) -> None:
        """Let the trackers write what is left, for at most a minute, 2 s where the run has failed.

        Closing twice is fine.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._failed = failed
        patience = _PATIENCE_AFTER_FAILURE_S if failed else _PATIENCE_S
        try:
            self._steps.put(None, timeout=patience)
            thread.join(patience)
        except queue.Full:
            pass  # said below
        if thread.is_alive():
            self._warn(f"trackers did not finish within {patience:g} s; the run does not wait")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed=error is not None)

    def _feed(self, openers: Mapping[str, Opener], run: RunInfo, config: Mapping[str, Any]) -> None:
        """The thread's whole life: open, log, close."""
        live: dict[str, Tracker] = {}
        for name, opener in openers.items():
            tracker = self._tried(name, opener, run, config)
            if tracker is not None:
                live[name] = tracker
        while (metrics := self._steps.get()) is not None:
            flat = figures(metrics)
            for name, tracker in list(live.items()):
                if self._tried(name, _logged, tracker, metrics.step, flat) is None:
                    del live[name]
        for name, tracker in live.items():
            self._tried(name, _closed, tracker, self._failed)

    def _tried(self, name: str, do: Callable[..., Any], *args: Any) -> Any:
        """What `do` returns, or None and a warning where it raises."""
        try:
            return do(*args)
        except Exception as error:  # whatever a tracker raises must not reach the run
            text = " ".join(str(error).split())[:_LONGEST_REASON] or "no reason given"
            self._warn(f"tracker {name} failed ({type(error).__name__}: {text}); it is given up")
            return None


def _logged(tracker: Tracker, step: int, flat: Mapping[str, float]) -> bool:
    tracker.log(step, flat)
    return True


def _closed(tracker: Tracker, failed: bool) -> bool:
    tracker.close(failed=failed)
    return True
