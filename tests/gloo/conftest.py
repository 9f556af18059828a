"""One pool of worker processes for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rankmesh.testing.spawn import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The zygote imports torch once; each job forks its ranks from it."""
    with Pool(cwd=Path(__file__).parents[2]) as made:
        yield made
