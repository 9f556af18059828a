"""Builds the modules of a model spec and their initial values."""

from rankmesh.models.build import build
from rankmesh.models.init import initial_values

__all__ = ["build", "initial_values"]
