"""What a rank does when: spans of time of the steps that are traced.

Owns the recording and the clocks of the host. It knows neither schedules nor collectives nor files:
who records says what a span is, and who reads them is handed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

# Where a span is drawn. Spans of the first two follow or hold one another; those of the last may
# overlap.
COMPUTE, OPTIMIZER, COMMUNICATION = "compute", "optimizer", "communication"

Args = Mapping[str, int | str]


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """Something done in one step on a track, in ns of the host's monotonic clock."""

    track: str
    name: str
    step: int
    start: int
    end: int
    args: Args


class Clock(Protocol):
    """Ticks that are cheap to take, and read as ns only when a step has ended."""

    def begin(self) -> None: ...

    def now(self) -> Any: ...

    def read(self, ticks: Sequence[Any]) -> list[int]: ...


class HostClock:
    """The monotonic clock, which all processes of a host share."""

    def begin(self) -> None:
        """Nothing to prepare."""

    def now(self) -> int:
        return time.monotonic_ns()

    def read(self, ticks: Sequence[int]) -> list[int]:
        return list(ticks)


@dataclass(slots=True, eq=False)
class Mark:
    """A span under way. It ends with `close`, or with the block that it is entered for; without a
    clock nothing is recorded.
    """

    track: str = ""
    name: str = ""
    args: Args | None = None
    clock: Clock | None = None
    start: Any = None
    end: Any = None

    def close(self) -> None:
        """The span ends here; a second call changes nothing."""
        if self.clock is not None and self.end is None:
            self.end = self.clock.now()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


NO_MARK = Mark()


class Tracer:
    """Records the spans of the steps in `steps`; with none of them it costs a comparison a span.

    write: takes all spans once, after the last of the steps or on `close`.
    """

    def __init__(
        self,
        steps: range = range(0),
        clock: Clock | None = None,
        write: Callable[[Sequence[TraceSpan]], object] = len,
    ) -> None:
        self.steps = steps
        self._clock = clock if clock is not None else HostClock()
        self._write = write
        self._spans: list[TraceSpan] = []
        self._marks: list[Mark] | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The body is step `number`. Of one that raises, nothing is kept."""
        if number not in self.steps:
            yield
            return
        self._clock.begin()
        self._marks = []
        try:
            with self.open(OPTIMIZER, "step"):
                yield
            self._spans += self._closed(number, self._marks)
        finally:
            self._marks = None
        if number == self.steps[-1]:
            self.close()

    def open(self, track: str, name: str, **args: int | str) -> Mark:
        """A span begins. Outside the steps that are traced it is never recorded."""
        if self._marks is None:
            return NO_MARK
        mark = Mark(track, name, args, self._clock, self._clock.now())
        self._marks.append(mark)
        return mark

    def _closed(self, step: int, marks: Sequence[Mark]) -> Iterator[TraceSpan]:
        """The marks that have ended, as spans."""
        ended = [mark for mark in marks if mark.end is not None]
        starts = self._clock.read([mark.start for mark in ended])
        ends = self._clock.read([mark.end for mark in ended])
        for mark, start, end in zip(ended, starts, ends, strict=True):
            yield TraceSpan(mark.track, mark.name, step, start, end, mark.args or {})

    def close(self) -> None:
        """Write what has been recorded; a second call writes nothing."""
        if self._spans:
            spans, self._spans = self._spans, []
            self._write(spans)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# It traces no step, so it never holds anything.
NO_TRACE = Tracer()
