"""Owns the proof of what `rankmesh prepare` shows while it works."""

import io

from rankmesh.cli.prepare_progress import ProgressView, progress_line
from rankmesh.data.prepare import Progress
from rankmesh.data.tally import Reason, Tally

RESUMED = Tally(read=100, documents=10, tokens=1000)
NOW = Tally(read=400, documents=50, tokens=5000, skipped={"empty": Reason(3, "a.jsonl:1")})


def test_the_line() -> None:
    """Share of the input, totals, the pace of this process alone, and what it leaves to do."""
    work = Progress(NOW, total=1000, resumed=RESUMED, seconds=30.0)
    assert work.seconds_left == 60.0
    assert progress_line(work) == (
        " 40.0%  50 documents  5,000 tokens  3 skipped  133 tok/s  left 0:01:00"
    )


def test_no_pace_yet() -> None:
    """Nothing was read, or there is nothing to read."""
    work = Progress(RESUMED, total=1000, resumed=RESUMED, seconds=0.0)
    assert work.seconds_left is None
    assert progress_line(work).endswith("0 tok/s  left ?")
    assert progress_line(Progress(Tally(), 0, Tally(), 0.0)).startswith("100.0%")


def test_lines_where_there_is_no_terminal() -> None:
    """At once what is gone on with, then a line when one is due; brackets are no markup."""
    stream = io.StringIO()
    with ProgressView(stream, line_s=0.0) as view:
        view(Progress(RESUMED, 1000, RESUMED, 0.1))
        view(Progress(NOW, 1000, RESUMED, 30.0))
    first, *rest = stream.getvalue().splitlines()
    assert first == "going on after 10 documents of an interrupted job"
    assert len(rest) == 2 and rest[1].startswith(" 40.0%")
    stream = io.StringIO()
    with ProgressView(stream) as view:
        view(Progress(NOW, 1000, Tally(), 30.0))
    assert stream.getvalue() == ""
