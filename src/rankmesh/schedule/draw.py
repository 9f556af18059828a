"""Timelines as text and as SVG, simulated or measured.

Owns the pictures; colours of the text are for who prints it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape

from rankmesh.schedule.actions import Kind
from rankmesh.schedule.timeline import Span, Timeline

IDLE = "-"
# Fill colours of SVG by kind, for even and odd chunks; communication is grey.
_FILLS = {
    Kind.F: ("#9ec5fe", "#4d8df0"),
    Kind.B: ("#a3cfbb", "#479f76"),
    Kind.I: ("#ffe69c", "#e0a800"),
    Kind.W: ("#e2b8d4", "#b5619a"),
}
_GREY = ("#c4c8cb", "#c4c8cb")
# SVG, in pixels.
_ROW, _LEFT, _TOP, _WIDTH, _LEAST_LABEL = 26, 56, 34, 1200, 13


def draw_text(timeline: Timeline, width: int = 100) -> str:
    """One line a rank, at most `width` characters, time from left to right, idle time as dashes.

    An action shows as much as fits of `F4.3`, stage and microbatch. Short of that it is `F3` or
    `F`, in small letters on every other stage of the rank. Where actions are narrower than a
    letter, the last one to begin there is seen.
    """
    heads = [f"rank {rank} " for rank in range(len(timeline.ranks))]
    head = max(map(len, heads), default=0)
    columns = max(width - head, 1)
    scale = columns / timeline.makespan if timeline.makespan else 1.0
    scale = float(int(scale)) if scale >= 1 else scale
    begin = _begin(timeline)
    length = round(timeline.makespan * scale)
    return "\n".join(
        f"{name:<{head}}{_line(spans, begin, scale, length)}"
        for name, spans in zip(heads, timeline.ranks, strict=True)
    )


def _line(spans: tuple[Span, ...], begin: float, scale: float, length: int) -> str:
    cells = [IDLE] * length
    chunks = _chunks(spans)
    for span in spans:
        first = min(round((span.start - begin) * scale), max(length - 1, 0))
        last = min(max(round((span.end - begin) * scale), first + 1), length)
        cells[first:last] = _label(span, chunks, last - first)
    return "".join(cells)


def _label(span: Span, chunks: Mapping[int, int], room: int) -> str:
    """The longest name of an action that fits, filled up with spaces."""
    letter = span.kind[0] if len(span.kind) == 1 else "~"
    short = letter.lower() if chunks[span.stage] % 2 else letter
    names = [f"{short}{span.microbatch}", short]
    if len(chunks) > 1:
        names.insert(0, f"{letter}{span.stage}.{span.microbatch}")
    return next((name for name in names if len(name) <= room), "").ljust(room)


def _chunks(spans: tuple[Span, ...]) -> dict[int, int]:
    """The place of each stage among those of the rank."""
    return {stage: place for place, stage in enumerate(sorted({span.stage for span in spans}))}


def draw_svg(timeline: Timeline, *, title: str = "") -> str:
    """A picture by itself: a row a rank, a box an action with its microbatch, time below.

    Blue F, green B, yellow I, purple W, grey communication; the stages of a rank take turns in
    light and dark. Every box has its stage, microbatch and times as a tooltip.
    """
    scale = _WIDTH / timeline.makespan if timeline.makespan else 1.0
    height = _TOP + _ROW * len(timeline.ranks)
    total = _LEFT + _WIDTH + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height + 30}" '
        f'width="{total}" height="{height + 30}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{total}" height="{height + 30}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="18" font-size="14">{escape(title)}</text>',
        *_legend(timeline, total),
    ]
    for rank, spans in enumerate(timeline.ranks):
        top = _TOP + _ROW * rank
        parts.append(f'<text x="6" y="{top + 16}">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_ROW - 4}" fill="#f1f3f5"/>'
        )
        parts.extend(_boxes(spans, _begin(timeline), scale, top))
    parts.extend(_axis(timeline.makespan, height))
    return "\n".join([*parts, "</svg>\n"])


def _boxes(spans: tuple[Span, ...], begin: float, scale: float, top: int) -> Iterator[str]:
    chunks = _chunks(spans)
    for span in spans:
        left, wide = _LEFT + (span.start - begin) * scale, (span.end - span.start) * scale
        fill = _FILLS.get(span.kind, _GREY)[chunks[span.stage] % 2]
        name = f"{span.kind}{span.stage}.{span.microbatch}"
        yield (
            f'<rect x="{left:.2f}" y="{top}" width="{wide:.2f}" height="{_ROW - 4}" fill="{fill}" '
            f'stroke="#ffffff" stroke-width="0.5"><title>{name}: {span.start:g} to {span.end:g}'
            "</title></rect>"
        )
        if wide >= _LEAST_LABEL:
            yield (
                f'<text x="{left + wide / 2:.2f}" y="{top + 15}" text-anchor="middle" '
                f'pointer-events="none">{span.microbatch}</text>'
            )


def _legend(timeline: Timeline, total: int) -> Iterator[str]:
    used = [kind for kind in Kind if any(s.kind is kind for r in timeline.ranks for s in r)]
    for place, kind in enumerate(reversed(used)):
        left = total - 16 - 70 * (place + 1)
        yield f'<rect x="{left}" y="8" width="12" height="12" fill="{_FILLS.get(kind, _GREY)[0]}"/>'
        yield f'<text x="{left + 16}" y="18">{kind}</text>'


def _axis(makespan: float, height: int) -> Iterator[str]:
    """Marks of time under the rows, at most eleven and at round numbers."""
    if not makespan:
        return
    power = 10.0 ** math.floor(math.log10(makespan / 10))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= makespan / 10)
    for mark in range(int(makespan / step) + 1):
        left = _LEFT + _WIDTH * mark * step / makespan
        yield (
            f'<line x1="{left:.2f}" x2="{left:.2f}" y1="{height}" y2="{height + 5}" '
            'stroke="#868e96"/>'
        )
        yield (
            f'<text x="{left:.2f}" y="{height + 18}" text-anchor="middle" fill="#495057">'
            f"{mark * step:g}</text>"
        )


def _begin(timeline: Timeline) -> float:
    """The first start on any rank, which is time 0 of the picture."""
    return min((span.start for spans in timeline.ranks for span in spans), default=0.0)
