"""A log file for each rank, and console lines on one.

Owns the logger's handlers and formats. The logger is handed down, never looked up: it stands
outside logging's global registry, so that runs in one process do not share it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from rankmesh.errors import RankmeshError, reason
from rankmesh.obs.secrets import mask_text


class _Formatter(logging.Formatter):
    """UTC times, and no secret in a line, also not in the text of an exception."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        return mask_text(super().format(record))


class QuietFileHandler(logging.FileHandler):
    """A log file that a full disk does not turn into tracebacks on the console.

    Lines that cannot be written are lost: what the disk is needed for says so by itself.
    """

    def handleError(self, record: logging.LogRecord) -> None:
        """Says nothing."""

    def close(self) -> None:
        """Close the file, also where its last lines find no room."""
        with contextlib.suppress(OSError):
            super().close()


class _LineHandler(logging.Handler):
    """Hands finished lines to a function, such as the console's."""

    def __init__(self, show: Callable[[str], object]) -> None:
        super().__init__(logging.INFO)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            plain = record.levelno < logging.WARNING
            self._show(text if plain else f"{record.levelname.lower()}: {text}")
        except Exception:
            self.handleError(record)


class RankLog:
    """The log of one rank: `logger` is what the rest of the code is handed.

    rank: global rank. folder: where `rank-00000.log` is appended to, DEBUG and up; None for no
    file. show: takes console lines, INFO and up; None on ranks that keep quiet.
    """

    def __init__(
        self, rank: int, *, folder: Path | None = None, show: Callable[[str], object] | None = None
    ) -> None:
        self.logger = logging.Logger(f"rankmesh.rank-{rank:05}", logging.DEBUG)
        if folder is not None:
            file = _opened(folder / f"rank-{rank:05}.log")
            file.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s"))
            self.logger.addHandler(file)
        if show is not None:
            lines = _LineHandler(show)
            lines.setFormatter(_Formatter("%(message)s"))
            self.logger.addHandler(lines)
        if not self.logger.handlers:
            self.logger.addHandler(logging.NullHandler())

    def close(self) -> None:
        """Close every handler; what is logged later goes nowhere. Closing twice is fine."""
        for handler in list(self.logger.handlers):
            self.logger.removeHandler(handler)
            handler.close()
        self.logger.addHandler(logging.NullHandler())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _opened(path: Path) -> QuietFileHandler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return QuietFileHandler(path, encoding="utf-8")
    except OSError as error:
        raise RankmeshError(f"{path}: cannot be written: {reason(error)}") from error
