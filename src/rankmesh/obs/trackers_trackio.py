"""Trackio: a local database that its dashboard reads.

Owns the package `trackio`. It stays on this machine unless Trackio's own variables
(TRACKIO_SPACE_ID, TRACKIO_SERVER_URL) say otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trackio

from rankmesh.obs.trackers import RunInfo, Tracker

_PROJECT = "rankmesh"


class _Trackio:
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish()


def open_tracker(run: RunInfo, config: Mapping[str, Any]) -> Tracker:
    """A run in the project `rankmesh`, named after the folder and the run's id."""
    opened = trackio.init(
        project=_PROJECT,
        name=f"{run.name}-{run.id}",
        config=dict(config),
        resume="allow" if run.resumed else "never",
        embed=False,
    )
    return _Trackio(opened)
