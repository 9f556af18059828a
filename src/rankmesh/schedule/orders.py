"""The published schedules, each as the phases of a rank.

Owns orders of actions alone, whatever they cost; `arrange` makes orders from costs and a memory
limit. p = pipeline ranks, r = the rank, v = chunks a rank, m = microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from rankmesh.schedule.actions import Action, Kind, Schedule
from rankmesh.schedule.phases import Phase, stream, unroll, without_padding

Order = Callable[[int, int, int, int], tuple[Action, ...]]


def _plain(phases: Callable[[int, int, int], list[Phase]]) -> Order:
    """One stage a rank; fewer microbatches than p are padded to p and left out again."""

    def order(p: int, r: int, v: int, m: int) -> tuple[Action, ...]:
        padded = max(m, p)
        streams = {kind.value: stream(kind, r, padded) for kind in (Kind.F, Kind.B, Kind.I)}
        return without_padding(unroll(phases(p, r, padded), streams), m)

    return order


def _folded(phases: Callable[[int, int, int], list[Phase]]) -> Order:
    """Two stages a rank in a V: chunk 0 goes down the ranks, chunk 1 comes back up.

    Fewer microbatches than 2p - 1 are padded to that and left out again.
    """

    def order(p: int, r: int, v: int, m: int) -> tuple[Action, ...]:
        padded = max(m, 2 * p - 1)
        streams = {
            f"{kind}{chunk}": stream(kind, stage, padded)
            for kind in (Kind.F, Kind.I)
            for chunk, stage in enumerate((r, 2 * p - 1 - r))
        }
        return without_padding(unroll(phases(p, r, padded), streams), m)

    return order


def _gpipe(p: int, r: int, m: int) -> list[Phase]:
    """All F, then all B (Huang et al. 2019, arXiv 1811.06965, figure 2c)."""
    return [(m, "F"), (m, "B")]


def _one_f_one_b(p: int, r: int, m: int) -> list[Phase]:
    """One B after each F once warm (Narayanan et al. 2021, arXiv 2104.04473, figure 4 top)."""
    warmup = p - 1 - r
    return [(warmup, "F"), (m - warmup, "F B"), (warmup, "B")]


def _split(p: int, r: int, m: int, held: int) -> list[Phase]:
    """1F1B with B split, so that a rank holds `held` activations, each from its F to its W.

    What 1F1B does not need goes into more F ahead on the first ranks and a later W on the last.
    """
    extra = min(max(held - p, 0), p - 1)
    ahead = extra * (p - 1 - r) // (p - 1) if extra else 0
    warmup = min(p - 1 - r + ahead, held - 1)
    delay = min(held, 2 * p - 1) - 1 - warmup
    whole = m - warmup - delay
    return [(warmup, "F"), (delay, "F I"), (whole, "F I W"), (warmup, "I W"), (delay, "W")]


def _zb_h1(p: int, r: int, m: int) -> list[Phase]:
    """As many F ahead as 1F1B, W put off (Qi et al. 2023, arXiv 2401.10241, section 2.1)."""
    return _split(p, r, m, p)


def _zb_h2(p: int, r: int, m: int) -> list[Phase]:
    """Up to twice as many F ahead (Qi et al. 2023, arXiv 2401.10241, section 2.2).

    The extra ones are as many as there are microbatches for: with m <= p it is ZB-H1.
    """
    return _split(p, r, m, m)


def split_within(p: int, m: int, held: int) -> Schedule:
    """The order between ZB-H1 and ZB-H2, or below, that holds at most `held` activations a rank."""
    held = min(held, max(m, p))
    order = _plain(lambda p, r, padded: _split(p, r, padded, held))
    return tuple(order(p, r, 1, m) for r in range(p))


def _zb_v(p: int, r: int, m: int) -> list[Phase]:
    """Zero bubble in a V (Qi et al. 2024, arXiv 2405.15362)."""
    return [
        (2 * (p - r) - 1, "F0"),
        (r, "F1 F0"),
        (p - r, "F1 I1 W"),
        (m - 2 * p + r + 1, "F0 I0 W F1 I1 W"),
        (p - r - 1, "I0 W F1 I1 W"),
        (r, "I0 I1"),
        (p - r, "I0 W"),
        (2 * r, "W"),
    ]


def _dualpipe_v(p: int, r: int, m: int) -> list[Phase]:
    """DualPipe cut in half and folded (DeepSeek-V3, arXiv 2412.19437, figure 5, and the DualPipe
    README). A pair that DualPipe overlaps, a forward and a backward, stands as F I W.
    """
    half, odd = divmod(r + 1, 2)
    return [
        (2 * (p - r - 1), "F0"),
        (r + 1, "F0 F1"),
        (p - r - 1, "I1 W F1"),
        (m - 2 * p + r + 1, "F0 I1 W F1 I0 W"),
        (p - r - 1, "I1 W F1 I0 W"),
        (half, "I1 W I0 W"),
        (odd, "I1 W I0"),
        (half, "I1 I0"),
        (p - r - 1, "W I0"),
        (r + 1, "W"),
    ]


def _interleaved(p: int, r: int, v: int, m: int) -> tuple[Action, ...]:
    """1F1B over several chunks (Narayanan et al. 2021, arXiv 2104.04473, figure 4 bottom).

    Microbatches go through the chunks in groups of p. Where p does not divide m > p, the first
    group is padded to p and its padding left out again: a short group among whole ones would let
    ranks wait in a circle.
    """
    if p == 1:
        return tuple(_there_and_back(v, m))
    first = -(-m % p) if m > p else 0
    groups = [range(start, min(start + p, m)) for start in range(first, m, p)]
    stages = [chunk * p + r for chunk in range(v)]
    forward = [Action(Kind.F, s, k) for group in groups for s in stages for k in group]
    backward = [Action(Kind.B, s, k) for group in groups for s in stages[::-1] for k in group]
    warmup = min(2 * (p - 1 - r) + (v - 1) * p, len(forward))
    phases = [(warmup, "F"), (len(forward) - warmup, "F B"), (warmup, "B")]
    return without_padding(unroll(phases, {"F": iter(forward), "B": iter(backward)}), m)


def _there_and_back(v: int, m: int) -> Iterator[Action]:
    """One rank with every stage: each microbatch through all of them and back."""
    for microbatch in range(m):
        yield from (Action(Kind.F, stage, microbatch) for stage in range(v))
        yield from (Action(Kind.B, stage, microbatch) for stage in reversed(range(v)))


ORDERS: Mapping[str, Order] = {
    "gpipe": _plain(_gpipe),
    "1f1b": _plain(_one_f_one_b),
    "interleaved": _interleaved,
    "zb-h1": _plain(_zb_h1),
    "zb-h2": _plain(_zb_h2),
    "zb-v": _folded(_zb_v),
    "dualpipe-v": _folded(_dualpipe_v),
}
