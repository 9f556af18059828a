"""What Python code calls: few names, typed, and no torch until one is used.

Owns the door, not what is behind it: the work is loaded when it is asked for. Importing
`rankmesh.train` here, for its result, also makes sure that the folder of that name is loaded before
the function takes its place in `rankmesh`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from rankmesh.train.result import RunResult

if TYPE_CHECKING:
    from rankmesh.config.schema import RunConfig
    from rankmesh.obs.metrics import StepMetrics


def train(
    config: str | PathLike[str] | Mapping[str, Any] | RunConfig,
    overrides: Sequence[str] = (),
    *,
    on_step: Callable[[StepMetrics], object] | None = None,
) -> RunResult:
    """Train as `rankmesh train` does, in this process; returns when the run is done.

    config: path of a TOML file, a dict of sections, or a RunConfig. overrides: `section.key=value`
    on top. on_step: called on every rank with the figures of each finished step.

    Alone, this process is the whole mesh. Started by torchrun, srun or mpirun, or where a world
    process group exists (Ray, launchers of your own), it is one rank: every rank calls this with
    the same config. A group that exists is used and left standing; else one is made, and destroyed
    at the end. No argument of the command line is read and no signal handler set.

    Raises UserError for input in error, MeshError for ranks that cannot work together, StepError
    for a step that must not be applied. Where a rank fails, it raises; the others raise within
    seconds too, or, where they hang in a collective that cannot be left, are ended with exit code
    1.
    """
    embedded = importlib.import_module("rankmesh.train.embedded")
    result: RunResult = embedded.train(config, overrides, on_step)
    return result
