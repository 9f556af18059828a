"""The clock of a CUDA stream: when the device did it, not when the host asked for it.

Owns the events and their place on the host's clock. Nothing here makes the host wait within a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch


class CudaClock:
    """Ticks are events on the current stream.

    A span's start is when the device comes to what follows it, its end when all before it is done;
    a collective's start is when it may begin, its end when the stream that waits for it goes on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero = torch.cuda.Event(enable_timing=True)
        self._zero_ns = 0

    def begin(self) -> None:
        """Put the device's time on the host's clock, once a step; waits for the device."""
        torch.cuda.synchronize(self._device)
        self._zero.record(torch.cuda.current_stream(self._device))
        self._zero.synchronize()
        self._zero_ns = time.monotonic_ns()

    def now(self) -> torch.cuda.Event:
        """An event that the device will reach."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, ticks: Sequence[torch.cuda.Event]) -> list[int]:
        """When the device reached them, in ns; waits for the device."""
        torch.cuda.synchronize(self._device)
        return [self._zero_ns + round(self._zero.elapsed_time(tick) * 1e6) for tick in ticks]
