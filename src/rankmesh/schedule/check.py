"""The checker of schedules: completeness, pairing and order, by playing them through.

Owns what makes a schedule right; it knows no time and no memory.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from rankmesh.errors import PlanError
from rankmesh.schedule.actions import COMPUTE, Action, Kind, Schedule
from rankmesh.schedule.communicate import partner, send_of
from rankmesh.schedule.waits import Waits, compute_only, homes_of, play, runs

_SENDS = (Kind.SEND_F, Kind.SEND_B)


def check_schedule(schedule: Schedule, stages: int, microbatches: int) -> None:
    """Raises PlanError, in one line, at the first fault of `schedule`.

    Each of F and B (or I and W) must stand exactly once for every stage and microbatch, all of a
    stage on one rank, and every rank must reach the end of its list: F waits for F of the stage
    before, B and I for their own F and for B or I of the stage behind, W for its I.

    A schedule with communication must have all of it: a SEND and its RECV for each tensor that goes
    to another rank, sent and received in the same order between any two ranks. Transfers are
    rendezvous: a run of adjacent communication actions is posted at once, and its rank goes on when
    the partner of each has been posted too. Without communication, transfers follow producers.
    """
    plain = compute_only(schedule)
    _check_complete(plain, stages, microbatches)
    if plain == schedule:
        _play_plain(plain)
    else:
        _check_pairs(schedule)
        _play_paired(schedule)


def _check_complete(schedule: Schedule, stages: int, microbatches: int) -> None:
    counts = Counter(action for rank in schedule for action in rank)
    ranks = defaultdict(set)
    for rank, actions in enumerate(schedule):
        for action in actions:
            ranks[action.stage].add(rank)
    for stage in range(stages):
        if len(ranks[stage]) > 1:
            raise PlanError(
                f"stage {stage} stands on several pipeline ranks: {sorted(ranks[stage])}"
            )
        for microbatch in range(microbatches):
            once = {kind: counts.pop(Action(kind, stage, microbatch), 0) for kind in COMPUTE}
            if tuple(once.values()) not in ((1, 1, 0, 0), (1, 0, 1, 1)):
                found = ", ".join(f"{kind} {count}" for kind, count in once.items())
                raise PlanError(
                    f"stage {stage}, microbatch {microbatch}: found {found}; needed are F 1 and "
                    "either B 1 or I 1, W 1"
                )
    if counts:
        raise PlanError(
            f"{next(iter(counts))} is outside {stages} stages and {microbatches} microbatches"
        )


def _play_plain(schedule: Schedule) -> None:
    waits, done = Waits(schedule), set[Action]()

    def able(rank: int, place: int, action: Action) -> bool:
        if not done.issuperset(waits(action)):
            return False
        done.add(action)
        return True

    play(schedule, able)


def _check_pairs(schedule: Schedule) -> None:
    """Every transfer that is needed stands there as a pair, once, in one order for two ranks."""
    homes = homes_of(compute_only(schedule))
    needed, sent, received = Counter[Action](), defaultdict(list), defaultdict(list)
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.kind in COMPUTE:
                send = send_of(action)
                if send is not None and homes.get(partner(send).stage, rank) != rank:
                    needed[send] += 1
                continue
            other = homes.get(partner(action).stage, rank)
            if homes.get(action.stage) != rank or other == rank:
                raise PlanError(f"{action} on rank {rank} has no partner on another rank")
            if action.kind in _SENDS:
                sent[rank, other].append(action)
            else:
                received[other, rank].append(partner(action))
    counts = Counter(action for queue in sent.values() for action in queue)
    for action in {**needed, **counts}:
        if counts[action] != needed[action]:
            raise PlanError(f"{action}: found {counts[action]}, needed {needed[action]}")
    for pair in {**sent, **received}:
        _check_queue(*pair, sent[pair], received[pair])


def _check_queue(source: int, target: int, sent: list[Action], received: list[Action]) -> None:
    """Between two ranks the same tensors are sent and received, in the same order."""
    for mine, theirs in zip(sent, received, strict=False):
        if mine != theirs:
            raise PlanError(
                f"rank {source} sends {mine} where rank {target} receives {partner(theirs)}; the "
                "orders must be the same"
            )
    if len(sent) != len(received):
        raise PlanError(
            f"rank {source} sends {len(sent)} tensors to rank {target}, which receives "
            f"{len(received)}"
        )


def _play_paired(schedule: Schedule) -> None:
    plain = compute_only(schedule)
    waits, homes = Waits(plain), homes_of(plain)
    starts = [dict(runs(actions)) for actions in schedule]
    posted, done = set[Action](), set[Action]()

    def needs(rank: int, action: Action) -> list[Action]:
        """What must be done: on this rank the producers, of others the receipts."""
        if action.kind in COMPUTE:
            producers = waits(action)
        elif action.kind in _SENDS:
            forward = action.kind is Kind.SEND_F
            own = Action(Kind.F, action.stage, action.microbatch)
            producers = (own if forward else waits.backward(action.stage, action.microbatch),)
        else:
            return []
        return [a if homes[a.stage] == rank else _receipt(a) for a in producers]

    def able(rank: int, place: int, action: Action) -> bool:
        if action.kind in COMPUTE:
            together: tuple[Action, ...] = (action,)
        elif place in starts[rank]:
            together = schedule[rank][place : starts[rank][place]]
        else:
            return True  # inside a run whose start has been passed
        if not done.issuperset(need for each in together for need in needs(rank, each)):
            return False
        posted.update(together)
        if action.kind not in COMPUTE and not posted.issuperset(map(partner, together)):
            return False
        done.update(together)
        return True

    play(schedule, able)


def _receipt(producer: Action) -> Action:
    """The RECV, on the neighbour's rank, of what a compute action makes."""
    send = send_of(producer)
    assert send is not None, f"{producer} makes nothing for another rank"
    return partner(send)
