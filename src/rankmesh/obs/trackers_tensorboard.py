"""TensorBoard: event files in the run's folder, under `tensorboard/`.

Owns the package `tensorboard`, which torch's writer needs. Nothing here touches the network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from rankmesh.obs.trackers import RunInfo, Tracker


class _TensorBoard:
    def __init__(self, run: RunInfo, config: Mapping[str, Any]) -> None:
        # What an earlier attempt logged from here on is no longer part of the run.
        purge = run.first_step if run.resumed else None
        self._writer: Any = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)
        self._writer.add_text("config", f"```\n{json.dumps(config, indent=2)}\n```")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


def open_tracker(run: RunInfo, config: Mapping[str, Any]) -> Tracker:
    """An event file for this attempt, with the config as text."""
    return _TensorBoard(run, config)
