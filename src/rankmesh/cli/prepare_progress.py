"""What `rankmesh prepare` shows while it works, on stderr: a bar on a terminal, else a line now and
then.

Owns when something is shown and how. It must not know how the work is done.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from rankmesh.data.prepare import Progress as Work
from rankmesh.obs.stepline import duration

_BAR_S, _LINE_S = 0.2, 30.0


def progress_line(work: Work) -> str:
    """One line: the share of the input, what was made of it, the pace and the time left."""
    share = 100 * work.tally.read / work.total if work.total else 100.0
    tokens = work.tally.tokens - work.resumed.tokens
    return (
        f"{share:5.1f}%  {work.tally.documents:,} documents  {work.tally.tokens:,} tokens  "
        f"{work.tally.num_skipped:,} skipped  {tokens / max(work.seconds, 1e-9):,.0f} tok/s  "
        f"left {duration(work.seconds_left)}"
    )


class ProgressView:
    """Shows progress when it is called with it. A context manager, so that the bar always ends.

    stream: stderr by default. line_s: seconds between lines where there is no terminal.
    """

    def __init__(self, stream: TextIO | None = None, line_s: float = _LINE_S) -> None:
        self._console = Console(file=stream, stderr=stream is None, highlight=False)
        bar = self._console.is_terminal and not self._console.is_dumb_terminal
        columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[text]}"))
        self._bar = Progress(*columns, console=self._console, auto_refresh=False) if bar else None
        self._task = self._bar.add_task("", total=1, text="") if self._bar else None
        self._every = _BAR_S if bar else line_s
        self._shown: float | None = None

    def __call__(self, work: Work) -> None:
        """Shows `work` if it is time to."""
        now = time.monotonic()
        if self._shown is None:
            if work.resumed.documents:
                self._line(
                    f"going on after {work.resumed.documents:,} documents of an interrupted job"
                )
            self._shown = now if self._bar is None else now - self._every
        if now - self._shown < self._every:
            return
        self._shown = now
        if self._bar is not None and self._task is not None:
            text = progress_line(work).partition("%")[2].strip()
            share = work.tally.read / max(work.total, 1)
            self._bar.update(self._task, completed=share, text=text, refresh=True)
        else:
            self._line(progress_line(work))

    def _line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
