"""The line that a person reads for each step.

Owns its text: parts in a fixed order, so that it can be read down a column and cut by a script. It
knows no stream and no terminal; console.py shows it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from rankmesh.obs.metrics import StepMetrics

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def step_line(metrics: StepMetrics, total_steps: int, seconds_left: float | None) -> str:
    """One step in one line of ASCII; the MFU where it is known, the evaluation where there was
    one.
    """
    width = len(str(total_steps))
    parts = [
        f"step {metrics.step:>{width}}/{total_steps}",
        f"loss {number(metrics.loss):>8}",
        f"grad {number(metrics.grad_norm):>8}",
        f"lr {metrics.lr:.2e}",
        f"{metrics.tokens_per_s:>9,.0f} tok/s",
    ]
    if metrics.mfu is not None:
        parts.append(f"MFU {100 * metrics.mfu:>5.1f}%")
    parts.append(f"mem {metrics.peak_memory_bytes / 2**30:.2f} GiB")
    parts.append(f"left {duration(seconds_left)}")
    if metrics.eval_loss is not None:
        parts.append(f"eval {number(metrics.eval_loss)}")
    bad = not_finite(metrics)
    if bad:
        parts.append(f"<<< NOT FINITE: {', '.join(bad)} >>>")
    return "  ".join(parts)


def not_finite(metrics: StepMetrics) -> list[str]:
    """Names of the figures that are NaN or infinite."""
    figures = {
        "loss": metrics.loss,
        "grad_norm": metrics.grad_norm,
        "lr": metrics.lr,
        "eval_loss": metrics.eval_loss,
    }
    return [
        name for name, value in figures.items() if value is not None and not math.isfinite(value)
    ]


def number(value: float) -> str:
    """Four decimals while they fit, else an exponent; NaN and Inf in capitals that catch the
    eye.
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    small = 0 < abs(value) < 1e-3
    return f"{value:.1e}" if small or abs(value) >= 1e3 else f"{value:.4f}"


def duration(seconds: float | None) -> str:
    """h:mm:ss, with days before it from one day on; "?" where not known."""
    if seconds is None:
        return "?"
    left = round(seconds)
    clock = f"{left % _DAY // _HOUR}:{left % _HOUR // _MINUTE:02}:{left % _MINUTE:02}"
    return f"{left // _DAY}d {clock}" if left >= _DAY else clock


class TimeLeft:
    """Estimates the time to the last step from the pace of the latest ones, evaluations included.

    window: how many steps set the pace. clock: monotonic seconds.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        window: int = 50,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._clock = clock
        self._seen: deque[tuple[int, float]] = deque(maxlen=window + 1)

    def after(self, step: int) -> float | None:
        """Seconds left once `step` is done; None until a second step shows a pace.

        The first step, with its start-up costs, ends where the measurement begins.
        """
        self._seen.append((step, self._clock()))
        (first, start), (last, now) = self._seen[0], self._seen[-1]
        if self._total <= step:
            return 0.0
        if last == first:
            return None
        return (now - start) / (last - first) * (self._total - step)
