"""A pipeline rank's list written as phases: a phase repeats a pattern of words.

Owns what the words mean: `F`, `B` and `I` take the next action of the stream of that name (`F0`,
`I1` ... where every chunk has streams of its own), `W` takes the weight gradient that has waited
longest. It knows no schedule by name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from rankmesh.schedule.actions import Action, Kind

# How often, and the words of one round.
Phase = tuple[int, str]
Streams = Mapping[str, Iterator[Action]]


def unroll(phases: Iterable[Phase], streams: Streams) -> Iterator[Action]:
    """The actions that the phases say, in order."""
    kept: deque[Action] = deque()
    for rounds, pattern in phases:
        for word in pattern.split() * rounds:
            action = kept.popleft() if word == "W" else next(streams[word])
            if action.kind is Kind.I:
                kept.append(Action(Kind.W, action.stage, action.microbatch))
            yield action


def stream(kind: Kind, stage: int, microbatches: int) -> Iterator[Action]:
    """`kind` of one stage, microbatch by microbatch."""
    return (Action(kind, stage, microbatch) for microbatch in range(microbatches))


def without_padding(actions: Iterable[Action], microbatches: int) -> tuple[Action, ...]:
    """What remains when only the microbatches from 0 to `microbatches` - 1 exist.

    Actions wait only for others of their own microbatch and for the rank, so what remains of a
    schedule that ends also ends, no later and with no more activations.
    """
    return tuple(action for action in actions if 0 <= action.microbatch < microbatches)
