"""Owns the step line, the console, timers and memory. Imports no torch."""

import errno
import io
import math
import os
import re
import sys

import pytest

from rankmesh.obs.console import StepConsole
from rankmesh.obs.memory import peak_rss_bytes
from rankmesh.obs.stepline import TimeLeft, duration, not_finite, number, step_line
from rankmesh.obs.timers import Timers
from tests.pure.test_obs_files import metrics


class Clock:
    """A clock that tests move by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_step_line() -> None:
    assert step_line(metrics(7), 1000, 3725.4) == (
        "step    7/1000  loss   2.5000  grad   1.0000  lr 1.00e-03      1,000 tok/s  "
        "mem 1.00 GiB  left 1:02:05"
    )


def test_step_line_with_all_parts() -> None:
    line = step_line(metrics(10, mfu=0.4123, eval_loss=2.25), 10, 0.0)
    assert line.endswith("tok/s  MFU  41.2%  mem 1.00 GiB  left 0:00:00  eval 2.2500")


def test_step_line_shouts_what_is_not_finite() -> None:
    line = step_line(metrics(1, loss=math.nan, grad_norm=math.inf), 10, None)
    assert "loss      NaN  grad      Inf" in line
    assert line.endswith("left ?  <<< NOT FINITE: loss, grad_norm >>>")
    assert not_finite(metrics(1, eval_loss=-math.inf)) == ["eval_loss"]
    assert not_finite(metrics(1)) == []


def test_columns_do_not_move() -> None:
    """Lines of steps of any size keep their parts at the same place."""
    lines = [
        step_line(metrics(step, loss=loss, grad_norm=norm), 1000, 1.0)
        for step, loss, norm in [(1, 10.98, 123.4), (999, 0.0001, 2e9), (1000, 9e5, 1e-9)]
    ]
    assert len({line.index("tok/s") for line in lines}) == 1
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.5, "2.5000"),
        (0.0, "0.0000"),
        (1e-3, "0.0010"),
        (9e-4, "9.0e-04"),
        (12345.0, "1.2e+04"),
        (-2.5, "-2.5000"),
        (-math.inf, "-Inf"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00:00"),
        (59.6, "0:01:00"),
        (3599, "0:59:59"),
        (86399, "23:59:59"),
        (90061, "1d 1:01:01"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_time_left() -> None:
    clock = Clock()
    left = TimeLeft(10, window=2, clock=clock)
    assert left.after(1) is None
    clock.now += 4
    assert left.after(2) == 32
    clock.now += 2
    assert left.after(3) == 21
    # Out of the window: only the pace of the last two steps counts.
    clock.now += 2
    assert left.after(4) == 12
    assert left.after(10) == 0


def test_plain_lines() -> None:
    stream = io.StringIO()
    with StepConsole(4, stream=stream, every=3) as console:
        console.line("rank map [tp] [0, 1]")
        for step in range(1, 5):
            console.step(metrics(step, loss=math.nan if step == 2 else 2.5))
    text = stream.getvalue()
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0] == "rank map [tp] [0, 1]"
    assert [line[:8] for line in lines[1:]] == ["step 1/4", "step 2/4", "step 3/4", "step 4/4"]
    assert "NOT FINITE: loss" in lines[2]


def test_every() -> None:
    stream = io.StringIO()
    with StepConsole(10, mode="lines", stream=stream, every=4) as console:
        for step in range(1, 11):
            console.step(metrics(step, eval_loss=2.0 if step == 6 else None))
    shown = re.findall(r"^step +(\d+)/", stream.getvalue(), flags=re.MULTILINE)
    assert shown == ["1", "4", "6", "8", "10"]


def test_long_lines_are_not_broken() -> None:
    stream = io.StringIO()
    with StepConsole(1, stream=stream) as console:
        console.line("x " * 300)
    assert stream.getvalue().count("\n") == 1


def test_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    with StepConsole(2, mode="bar", stream=stream) as console:
        console.step(metrics(1))
        console.step(metrics(2, loss=math.nan))
    text = stream.getvalue()
    assert "step 1/2  loss   2.5000" in text
    assert "2/2" in text and "100%" in text and "left 0:00:00" in text
    # Loud: bold and red.
    assert re.search(r"\x1b\[1;31m[^\x1b]*NOT FINITE", text)
    # The cursor is shown again at the end.
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_bar_without_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    with StepConsole(1, mode="bar", stream=stream) as console:
        console.step(metrics(1, loss=math.nan))
    assert not re.search(r"\x1b\[[\d;]*3\dm", stream.getvalue())


def test_bar_ends_when_the_run_fails() -> None:
    stream = io.StringIO()
    with pytest.raises(RuntimeError), StepConsole(2, mode="bar", stream=stream) as console:
        console.step(metrics(1))
        raise RuntimeError
    assert sys.stdout is sys.__stdout__ or "rich" not in type(sys.stdout).__module__
    console.close()


def test_timers() -> None:
    clock = Clock()
    order: list[str] = []
    timers = Timers(clock, sync=lambda: order.append("sync"))
    for seconds in (1.0, 2.0):
        with timers.measure("forward"):
            clock.now += seconds
            with timers.measure("inner"):
                clock.now += 0.5
    with pytest.raises(KeyError), timers.measure("forward"):
        clock.now += 4.0
        raise KeyError
    timers.add("wait", 0.25)
    assert timers.calls["forward"] == 3
    assert len(order) == 10
    assert timers.take() == {"inner": 1.0, "forward": 8.0, "wait": 0.25}
    assert timers.take() == {}
    assert timers.calls["forward"] == 0


def test_timers_measure_real_time() -> None:
    timers = Timers()
    with timers.measure("nothing"):
        pass
    assert 0 <= timers.seconds["nothing"] < 1


def test_peak_memory_grows() -> None:
    before = peak_rss_bytes()
    block = bytearray(before)
    assert peak_rss_bytes() >= before + len(block) // 2
    assert before > 2**20


class Broken(io.StringIO):
    """Takes `room` writes, then fails as a full disk or a left pipe does."""

    def __init__(self, error: int, room: int) -> None:
        super().__init__()
        self._error, self._room = error, room
        self.tries = 0

    def write(self, text: str) -> int:
        self.tries += 1
        if self.tries > self._room:
            raise OSError(self._error, os.strerror(self._error))
        return super().write(text)


@pytest.mark.parametrize("error", [errno.EPIPE, errno.ENOSPC])
@pytest.mark.parametrize("mode", ["lines", "bar"])
@pytest.mark.parametrize("room", [0, 2])
def test_a_stream_that_fails_is_left_alone(error: int, mode: str, room: int) -> None:
    """A run goes on without its console: `rankmesh train ... | head -2`."""
    stream, streams = Broken(error, room), (sys.stdout, sys.stderr)
    with StepConsole(5, mode=mode, stream=stream) as console:
        for number in range(1, 6):
            console.step(metrics(number))
            console.line("checkpoint")
    console.close()
    assert stream.tries == room + 1
    assert (sys.stdout, sys.stderr) == streams


def test_other_errors_of_a_stream_are_ours() -> None:
    """A character that the stream's encoding lacks is a bug, not a missing reader."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with pytest.raises(UnicodeEncodeError):
        StepConsole(5, mode="lines", stream=stream).line("\u2026")
