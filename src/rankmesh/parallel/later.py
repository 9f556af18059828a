"""Weight gradients that may wait: what a split backward puts off from I to W.

Owns the queue between the two. It knows neither products nor schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch

Work = Callable[[], None]


class Later:
    """Work of a backward pass, done at once or kept under a name until it is asked for."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, list[Work]] = {}
        self._open: list[Work] | None = None

    def do(self, work: Work) -> None:
        """Do `work` now, or inside `keeping` put it off."""
        if self._open is None:
            work()
        else:
            self._open.append(work)

    @contextmanager
    def keeping(self, name: Hashable) -> Iterator[None]:
        """Inside, work is kept for `release(name)`; it holds on to the tensors that it needs."""
        self._open = self._kept[name] = []
        try:
            yield
        finally:
            self._open = None

    def release(self, name: Hashable) -> None:
        """Do what is kept under `name`, in the order in which it came. Raises KeyError without."""
        works = self._kept.pop(name)
        works.reverse()
        with torch.no_grad():
            while works:
                # Each product's tensors go as soon as it is done.
                works.pop()()
