"""What a run shows on the terminal: lines, and below them a bar where there is a terminal.

Owns the stream and the bar. It knows nothing of training; colours and NO_COLOR are rich's business.
A stream that takes nothing any more (its reader has gone, its disk is full) ends no run: what a run
leaves is in its files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from rankmesh.obs.metrics import StepMetrics
from rankmesh.obs.stepline import TimeLeft, duration, not_finite, step_line

_LOUD = "bold red"


class _Console(Console):
    """Rich's, but a broken pipe is an error as any other: rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Raises the BrokenPipeError that is being handled."""
        raise


class StepConsole:
    """Shows steps on one stream. Use as a context manager, so that the bar always ends.

    total_steps: steps of the run. mode: "bar", "lines", or "auto" for a bar where the stream is a
    terminal that can draw one. every: steps between lines; steps that are not finite, evaluated or
    last are always shown. stream: standard output by default.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        mode: str = "auto",
        every: int = 1,
        stream: TextIO | None = None,
    ) -> None:
        self._console = _Console(
            file=stream, highlight=False, force_terminal=True if mode == "bar" else None
        )
        self._total = total_steps
        self._every = every
        self._left = TimeLeft(total_steps)
        terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        self._bar = self._new_bar() if mode == "bar" or (mode == "auto" and terminal) else None
        self._task = self._bar.add_task("", total=total_steps, left="") if self._bar else None

    def _new_bar(self) -> Progress:
        # Drawn anew at each step, without a thread of its own.
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}"),
        )
        return Progress(*columns, console=self._console, auto_refresh=False)

    def line(self, text: str, *, loud: bool = False) -> None:
        """Show `text` as it stands, above the bar; brackets in it are no markup."""
        with self._or_never():
            self._console.print(Text(text, style=_LOUD if loud else ""), soft_wrap=True)

    def step(self, metrics: StepMetrics) -> None:
        """Show a step: its line where one is due, and the bar."""
        left = self._left.after(metrics.step)
        bad = bool(not_finite(metrics))
        due = metrics.step % self._every == 0 or metrics.step in (1, self._total)
        if due or bad or metrics.eval_loss is not None:
            self.line(step_line(metrics, self._total, left), loud=bad)
        if self._bar is not None and self._task is not None:
            with self._or_never():
                self._bar.update(
                    self._task, completed=metrics.step, left=f"left {duration(left)}", refresh=True
                )

    def close(self) -> None:
        """End the bar and leave the cursor on a line of its own; closing twice is fine."""
        if self._bar is not None:
            with self._or_never():
                self._bar.stop()

    def __enter__(self) -> Self:
        if self._bar is not None:
            with self._or_never():
                self._bar.start()
        return self

    @contextlib.contextmanager
    def _or_never(self) -> Iterator[None]:
        """Shows something; where the stream fails, nothing is shown from here on."""
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: closed
            if isinstance(error, ValueError) and not self._console.file.closed:
                raise
            self._give_up()

    def _give_up(self) -> None:
        stream, self._console.quiet = self._console.file, True
        bar, self._bar = self._bar, None
        if bar is not None:
            with contextlib.suppress(IndexError):  # it had failed to start: rich has not hooked it
                bar.stop()
        with contextlib.suppress(OSError, ValueError):
            # What the stream still holds is flushed once more at exit: that must not fail again.
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, stream.fileno())
            os.close(sink)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
