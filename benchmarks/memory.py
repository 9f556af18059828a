"""Peak memory of a step on the CPU, by two measures.

Owns how they are taken: bytes of live tensors, from the events of torch's own allocator; and
resident memory, from the kernel, which also holds what libraries allocate by themselves and what
fragmentation costs. Either wants a process of its own, so that nothing else is in it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "the measured step"
Build = Callable[[], Callable[[], Any]]


def tensor_peak(build: Build, warm_up: int) -> dict[str, int]:
    """Bytes of live tensors before, and at most within, the step after `warm_up` steps.

    build: makes everything that a step needs, and returns the step.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as taken:
        step = build()
        for _ in range(warm_up):
            step()
        gc.collect()
        with record_function(_MARK):
            step()
    results = taken.profiler
    assert results is not None
    events = results.kineto_results.events()
    (start,) = (event.start_ns() for event in events if event.name() == _MARK)
    moves = sorted(
        (event.start_ns(), number, event.nbytes())
        for number, event in enumerate(events)
        if event.name() == "[memory]"
    )
    live = sum(size for moment, _, size in moves if moment < start)
    before = peak = live
    for moment, _, size in moves:
        if moment >= start:
            live += size
            peak = max(peak, live)
    return {"before": before, "peak": peak}


def resident_peak(build: Build, warm_up: int) -> dict[str, int]:
    """Growth of resident memory since the start of `build`: before, and at most within, the step
    after `warm_up` steps. Linux only.
    """
    gc.collect()
    empty = _status("VmRSS")
    step = build()
    for _ in range(warm_up):
        step()
    gc.collect()
    # From here on the kernel keeps the high-water mark anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    step()
    return {"before": before - empty, "peak": _status("VmHWM") - empty}


def _status(name: str) -> int:
    """A size in bytes from this process's status file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


MEASURES = {"tensors": tensor_peak, "resident": resident_peak}
