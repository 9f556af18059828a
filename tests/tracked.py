"""What tests of trackers share: a config with secrets, steps, fakes of packages.

No test lives here.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from rankmesh.obs.metrics import StepMetrics
from rankmesh.obs.trackers import Trackers, load_trackers

SECRET = "hunter2"
CONFIG: dict[str, Any] = {
    "train": {"steps": 3, "dtype": "fp32"},
    "data": {"train": ("a", "b"), "tokenizer": "bytes", "test": None},
    "log": {"hf_token": SECRET, "api_key": SECRET, "deep": {"password": SECRET}},
}


def step(number: int, **rest: Any) -> StepMetrics:
    given: dict[str, Any] = {
        "step": number,
        "loss": 2.0 / number,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "tokens": 64,
        "tokens_per_s": 1000.0,
        "mfu": None,
        "step_time_s": 0.064,
        "peak_memory_bytes": 10**9,
        "comm_bytes": {"tp": 4096},
        "extra": {"exposed_s.tp": 0.01},
    }
    return StepMetrics(**{**given, **rest})


def texts(value: Any) -> Iterator[str]:
    """Every text inside nested values."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from (str(key), *texts(item))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts(item)
    else:
        yield str(value)


def install(monkeypatch: pytest.MonkeyPatch, name: str, content: Mapping[str, Any]) -> None:
    """A fake of a package, and a fresh load of the file that owns it."""
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, f"rankmesh.obs.trackers_{name}", raising=False)


def track(name: str, folder: Path, *, first: int = 1, fail: bool = False) -> list[str]:
    """Two steps through the real file of a tracker; returns its warnings."""
    warned: list[str] = []
    tracked = Trackers(load_trackers([name]), folder, CONFIG, warned.append, first)
    for number in (first, first + 1):
        tracked.log(step(number))
    tracked.close(failed=fail)
    return warned
