"""One pool of worker processes for all mutants; it knows no mutant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rankmesh.testing.spawn import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Torch is imported once, in the zygote; each job imports the package anew, with its fault."""
    with Pool(cwd=Path(__file__).parents[2]) as made:
        yield made
