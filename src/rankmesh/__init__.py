"""Rankmesh trains transformer language models on many devices.

This file owns the few names that `import rankmesh` offers. It must not import torch.
"""

from rankmesh.errors import MeshError, RankmeshError, StepError, UserError
from rankmesh.version import __version__

__all__ = ["MeshError", "RankmeshError", "StepError", "UserError", "__version__"]
