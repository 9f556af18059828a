"""Small JSON records that ranks exchange through the rendezvous store, outside any collective.

Owns the one pattern of start-up checks: all ranks hand in a record, rank 0 judges, all read the
verdict, nobody waits for ever. It knows neither what is judged nor any process group.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from rankmesh.errors import MeshError

__all__ = ["Judge", "Store", "barrier", "consult", "put_all", "span"]

Judge = Callable[[Mapping[int, Any], Sequence[int]], Any]


class Store(Protocol):
    """What we use of torch's stores (TCPStore, FileStore, HashStore, PrefixStore)."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...

    def has_extended_api(self) -> bool: ...

    def multi_get(self, keys: list[str], /) -> list[bytes]: ...

    def multi_set(self, keys: list[str], values: list[str], /) -> None: ...

    def set_timeout(self, timeout: timedelta, /) -> None: ...

    def clone(self) -> Store: ...


def consult(
    store: Store,
    name: str,
    *,
    rank: int,
    world_size: int,
    record: Any,
    judge: Judge,
    limit_s: float,
    keeper: str = "rank 0",
) -> Any:
    """Every rank's record to rank 0, and rank 0's verdict to every rank; both travel as JSON.

    `judge(records by rank, absent ranks)` runs on rank 0 when all have come or `limit_s` is over.
    Whoever comes later still reads the verdict. Issues no collective. Raises MeshError where
    rank 0, which the text calls `keeper`, gives no verdict, or where the store is lost.
    """
    try:
        store.set(f"{name}/{rank}", json.dumps(record))
        if rank == 0:
            verdict = _verdict(store, name, world_size, judge, limit_s)
            store.set(f"{name}/verdict", json.dumps(verdict))
        # Rank 0 may have come as late as its own limit, and then waited as long for others.
        elif not _wait(store, [f"{name}/verdict"], 2 * limit_s + 5):
            raise MeshError(f"{name}: {keeper} gave no answer within {2 * limit_s + 5:g} s")
        return json.loads(store.get(f"{name}/verdict"))
    except RuntimeError as error:
        raise MeshError(f"{name}: lost the rendezvous store: {_first_line(error)}") from error


def barrier(
    store: Store,
    name: str,
    *,
    rank: int,
    world_size: int,
    limit_s: float,
    keeper: str = "rank 0",
) -> list[int]:
    """Waits for all ranks through the store; returns the ranks absent after `limit_s` (or none).

    For waits that must not run into a collective's time-out, such as for one rank's preparations.
    """

    def absent_ranks(records: Mapping[int, Any], absent: Sequence[int]) -> list[int]:
        return list(absent)

    absent: list[int] = consult(
        store,
        name,
        rank=rank,
        world_size=world_size,
        record=True,
        judge=absent_ranks,
        limit_s=limit_s,
        keeper=keeper,
    )
    return absent


def put_all(store: Store, values: Mapping[str, str]) -> None:
    """Sets many keys, in one message where the store can."""
    if store.has_extended_api():
        store.multi_set(list(values), list(values.values()))
        return
    for key, value in values.items():
        store.set(key, value)


def span(ranks: Iterable[int], shown: int = 8) -> str:
    """Ranks for a person: `rank 3`, `ranks 0-3, 6`, with an ellipsis after `shown` ranges."""
    ordered = sorted(set(ranks))
    ranges: list[list[int]] = []
    for rank in ordered:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    words = [f"{low}" if low == high else f"{low}-{high}" for low, high in ranges[:shown]]
    words += ["..."] if len(ranges) > shown else []
    return f"rank{'' if len(ordered) == 1 else 's'} {', '.join(words)}"


def _verdict(store: Store, name: str, world_size: int, judge: Judge, limit_s: float) -> Any:
    keys = [f"{name}/{rank}" for rank in range(world_size)]
    complete = _wait(store, keys, limit_s)
    there = [complete or store.check([key]) for key in keys]
    present = [rank for rank in range(world_size) if there[rank]]
    texts = _get_all(store, [keys[rank] for rank in present])
    records = {rank: json.loads(text) for rank, text in zip(present, texts, strict=True)}
    return judge(records, [rank for rank in range(world_size) if not there[rank]])


def _get_all(store: Store, keys: list[str]) -> list[bytes]:
    if keys and store.has_extended_api():
        return list(store.multi_get(keys))
    return [store.get(key) for key in keys]


def _wait(store: Store, keys: list[str], limit_s: float) -> bool:
    """Whether all keys came within the limit. A store that is lost still raises."""
    start = time.monotonic()
    try:
        store.wait(keys, timedelta(seconds=limit_s))
    except RuntimeError:
        if time.monotonic() - start < limit_s * 0.9:
            raise
        return bool(store.check(keys))
    return True


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
