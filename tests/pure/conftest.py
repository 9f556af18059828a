"""What tests of commands share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rankmesh.cli.main import main

Ran = tuple[int, str, str]


@pytest.fixture
def rankmesh(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs a command; returns (exit code, stdout, stderr)."""

    def call(*words: object) -> Ran:
        code = main([str(word) for word in words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call
