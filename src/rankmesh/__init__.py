"""Rankmesh trains transformer language models on many devices.

This file owns the few names that `import rankmesh` offers. It must not import torch, and loads what
would take time when its name is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rankmesh.api import train
from rankmesh.errors import MeshError, RankmeshError, StepError, UserError
from rankmesh.train.result import RunResult
from rankmesh.version import __version__

if TYPE_CHECKING:
    from rankmesh.config.load import load_config
    from rankmesh.config.schema import RunConfig

__all__ = [
    "MeshError",
    "RankmeshError",
    "RunConfig",
    "RunResult",
    "StepError",
    "UserError",
    "__version__",
    "load_config",
    "train",
]

_LATER = {"RunConfig": "rankmesh.config.schema", "load_config": "rankmesh.config.load"}

# A type checker would take any name for one that this finds.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
