"""Named timers that add up.

Owns wall-clock measurement on a monotonic clock. It knows no device: what waits for one is handed
in.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timers:
    """Seconds and calls by name, until `take`.

    clock: monotonic seconds. sync: called before each reading of the clock, such as a device's
    `synchronize`; None, the default, measures the host alone and slows nothing down.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sync: Callable[[], object] | None = None,
    ) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._clock = clock
        self._sync = sync

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of the body to `name`, also where the body raises."""
        start = self._now()
        try:
            yield
        finally:
            self.add(name, self._now() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add time that was measured elsewhere."""
        self.seconds[name] += seconds
        self.calls[name] += 1

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call; the timers start anew."""
        taken = dict(self.seconds)
        self.seconds.clear()
        self.calls.clear()
        return taken

    def _now(self) -> float:
        if self._sync is not None:
            self._sync()
        return self._clock()
