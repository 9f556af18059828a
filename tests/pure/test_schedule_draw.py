"""Owns pictures of timelines and schedules as text files. Imports no torch."""

import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.errors import PlanError
from rankmesh.schedule import (
    CHUNKS,
    Costs,
    Kind,
    Span,
    Timeline,
    build_schedule,
    draw_svg,
    draw_text,
    read_schedule,
    schedule_text,
    simulate,
    with_communication,
)

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name, p, m, v=1, costs=None):
    return simulate(build_schedule(name, p, v, m), costs or Costs())


def test_text_shows_who_does_what_when():
    assert draw_text(timeline("1f1b", 2, 2), 40).splitlines() == [
        "rank 0 F0 F1 ------B0    ---B1    ",
        "rank 1 ---F0 B0    F1 B1    ------",
    ]


def test_text_of_several_stages_a_rank():
    """Names as long as fit: with the stage, else in small letters for every other chunk."""
    found = timeline("interleaved", 2, 2, 2)
    assert [draw_text(found, width).splitlines()[1] for width in (70, 40, 24)] == [
        "rank 1 ----F1.0F1.1F3.0B3.0    F3.1B3.1    B1.0    B1.1    --------",
        "rank 1 --F0F1f0B3.0f1B3.1B1.0B1.1----",
        "rank 1 -FFfb0fb1B0B1--",
    ]


@given(
    st.sampled_from(sorted(CHUNKS)), st.integers(1, 5), st.integers(1, 9),
    st.tuples(*[st.floats(0.01, 5.0)] * 4), st.integers(1, 150),
)  # fmt: skip
def test_text_keeps_to_its_width(name, p, m, costs, width):
    """Rank by rank, all lines of one length, whatever the times."""
    lines = draw_text(timeline(name, p, m, CHUNKS[name] or 2, Costs(*costs)), width).splitlines()
    assert len(lines) == p and len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= max(width, len("rank 0 ") + 1)


def test_measured_times_are_drawn_from_their_first_start():
    """Negative and odd times, nothing at all, an action of no length, communication."""
    spans = (Span(Kind.F, 3, 7, -5.0, -3.0), Span(Kind.SEND_F, 3, 7, -3.0, -2.0),
             Span(Kind.B, 3, 7, -1.0, -1.0), Span(Kind.B, 3, 8, -1.0, 3.0))  # fmt: skip
    assert draw_text(Timeline((spans, ())), 31).splitlines() == [
        "rank 0 F7    ~7 ---B8          ",
        "rank 1 " + "-" * 24,
    ]
    ElementTree.fromstring(draw_svg(Timeline((spans, ()))))
    ElementTree.fromstring(draw_svg(Timeline(())))
    assert draw_text(Timeline(())) == ""


def test_svg_has_a_box_for_each_action():
    found = timeline("zb-v", 3, 6, 2)
    root = ElementTree.fromstring(draw_svg(found, title='a <b> & "c"'))
    assert root.find(f"{SVG}title").text == 'a <b> & "c"'
    boxes = {
        title.text: box for box in root.iter(f"{SVG}rect") for title in box.iter(f"{SVG}title")
    }
    assert len(boxes) == 3 * 2 * 3 * 6
    one = boxes["F0.1: 1 to 2"]
    unit = float(one.get("width"))
    assert float(boxes["F0.2: 2 to 3"].get("x")) == pytest.approx(
        float(one.get("x")) + unit, abs=0.02
    )
    assert unit * found.makespan == pytest.approx(1200, abs=0.5)
    assert boxes["F0.1: 1 to 2"].get("fill") != next(
        box.get("fill") for name, box in boxes.items() if name.startswith("F5.1")
    )
    marks = [text.text for text in root.iter(f"{SVG}text") if text.get("fill")]
    assert marks == ["0", "5", "10", "15", "20", "25", "30", "35"]
    assert all(name.isascii() for name in draw_svg(found).splitlines())


@given(st.sampled_from(sorted(CHUNKS)), st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_a_schedule_survives_its_text(tmp_path_factory, name, p, m, paired):
    schedule = build_schedule(name, p, CHUNKS[name] or 2, m)
    schedule = with_communication(schedule) if paired else schedule
    path = tmp_path_factory.mktemp("schedule") / "own.txt"
    path.write_text("# mine\n\n" + schedule_text(schedule).replace("\n", "  # a rank\n"))
    assert read_schedule(path) == schedule


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"", "has no action; needed is one line a pipeline rank"),
        (b"# F0.0\n\n", "has no action"),
        (b"F0.0\nF1.0 X1.0", ":2: 'X1.0' is no action; allowed are F, B, I, W, SEND_F"),
        (b"F0", ":1: 'F0' is no action"),
        (b"F0.0.0", "'F0.0.0' is no action"),
        (b"F-1.0", "'F-1.0' is no action"),
        (b"f0.0", "'f0.0' is no action"),
        (b"F0.1234567", "'F0.1234567' is no action"),
        ("F\u0661.0".encode(), "is no action"),
        (b"\xff\xfe", "cannot be read: it is no UTF-8 text"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_what_is_no_schedule_is_named(tmp_path, text, line):
    path = tmp_path / "own.txt"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(PlanError) as caught:
        read_schedule(path)
    assert line in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
