"""Jobs of the ZeRO tests; they run inside worker processes."""

from __future__ import annotations

from rankmesh.testing.worker import Worker
from tests import tiny
from tests.gloo.pipeline_jobs import start_run


def state_elements(worker: Worker, zero: int) -> int:
    """Elements of the first moment that this rank holds."""
    run = start_run(
        worker,
        tiny.llama(),
        dp=worker.world_size,
        parallel={"zero": zero},
        optimizer={"name": "adamw"},
    )
    return sum(len(tensor) for name, tensor in run.optimizer.state().items() if name.endswith(".m"))
