"""Weights & Biases: one run there for a run here, its files in the run's folder.

Owns the package `wandb`. Project, entity, key and mode are those of wandb's own variables
(WANDB_PROJECT, WANDB_MODE=offline, ...); it never asks for a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wandb

from rankmesh.obs.trackers import RunInfo, Tracker

_WITHOUT_NETWORK = ("offline", "dryrun", "disabled")


class _Wandb:
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def open_tracker(run: RunInfo, config: Mapping[str, Any]) -> Tracker:
    """A run of wandb; a later attempt goes on with the same one. Raises RuntimeError without key.

    Without a key `wandb.init` would ask for one on a terminal.
    """
    online = wandb.setup().settings.mode not in _WITHOUT_NETWORK
    if online and not wandb.login(prompt=False, verify=False):
        raise RuntimeError("no key: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline")
    opened = wandb.init(
        dir=str(run.folder),
        id=run.id,
        name=run.name,
        config=dict(config),
        resume="allow" if run.resumed else None,
        reinit="create_new",
        # Our console has a bar of its own, and goes nowhere but to the terminal.
        settings=wandb.Settings(console="off"),
    )
    return _Wandb(opened)
