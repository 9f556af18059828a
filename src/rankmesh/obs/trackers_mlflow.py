"""MLflow: one run there for a run here.

Owns the package `mlflow`. Where it writes is said by MLflow's own variables (MLFLOW_TRACKING_URI,
MLFLOW_EXPERIMENT_NAME); without them it is a local file, and nothing touches the network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import mlflow

from rankmesh.obs.trackers import RunInfo, Tracker

_TAG = "rankmesh.run"
# MLflow's own limits: parameters of one call, characters of one value.
_BATCH, _LONGEST = 100, 6000


class _MLflow:
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        mlflow.log_metrics(dict(metrics), step=step)

    def close(self, *, failed: bool) -> None:
        mlflow.end_run("FAILED" if failed else "FINISHED")


def open_tracker(run: RunInfo, config: Mapping[str, Any]) -> Tracker:
    """A run of MLflow with the config as parameters; a later attempt goes on with the same one."""
    before = []
    if run.resumed:
        query = f"tags.`{_TAG}` = '{run.id}'"
        before = mlflow.search_runs(filter_string=query, max_results=1, output_format="list")
    if before:
        mlflow.start_run(run_id=before[0].info.run_id)
        return _MLflow()
    mlflow.start_run(run_name=run.name, tags={_TAG: run.id})
    params = list(_flat(config))
    for start in range(0, len(params), _BATCH):
        mlflow.log_params(dict(params[start : start + _BATCH]))
    return _MLflow()


def _flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """(`section.key`, text) of everything in nested tables; what is not set is left out."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        elif value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            yield f"{above}{key}", text[:_LONGEST]
