"""The bubble of textbooks: idle share of a step by its numbers alone.

Owns the closed formulas, which take all stages for equal, transfers for free and F = I = W.
"""

from __future__ import annotations


def textbook_bubble(schedule: str, ranks: int, chunks: int, microbatches: int) -> float | None:
    """Share of the makespan in which a pipeline rank idles; None where there is no such formula.

    With p ranks, v chunks each and m microbatches (p - 1) / (v m + p - 1) for gpipe, 1f1b and
    interleaved (Narayanan et al. 2021, arXiv 2104.04473, section 2.2, as a share of all time
    instead of the ideal), (p - 1) / (3 m + p - 1) for zb-h1 and zb-h2, whose ranks only start one
    after another (Qi et al. 2023, arXiv 2401.10241, table 2).
    """
    passes = {"gpipe": 1, "1f1b": 1, "interleaved": chunks, "zb-h1": 3, "zb-h2": 3}
    if schedule not in passes:
        return None
    return (ranks - 1) / (passes[schedule] * microbatches + ranks - 1)
