"""metrics.jsonl: one JSON object a step.

Owns its fields, the writer and the reader. It knows nothing of how the figures come about.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rankmesh.errors import RankmeshError, UserError, reason
from rankmesh.obs.jsonfile import FORMAT_VERSION, decode, encode


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The figures of one step, over all ranks unless said otherwise.

    loss: mean over the valid targets of the global batch, before the update. grad_norm: before
    clipping. tokens: input tokens of this step, padding rows left out. mfu: model FLOP utilisation
    from 0 to 1, None where the peak is unknown. peak_memory_bytes: of the reporting rank.
    comm_bytes: what one rank sends in the step, by axis. eval_loss: only where the step was
    followed by an evaluation. extra: further figures, one key each.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float
    mfu: float | None
    step_time_s: float
    peak_memory_bytes: int
    comm_bytes: Mapping[str, int] = field(default_factory=dict)
    eval_loss: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """One line of metrics.jsonl; `eval_loss` only where there is one, `extra` as keys of its
        own.
        """
        record: dict[str, object] = {"format_version": FORMAT_VERSION, **vars(self), **self.extra}
        del record["extra"]
        if self.eval_loss is None:
            del record["eval_loss"]
        return record


class MetricsWriter:
    """Appends to metrics.jsonl; each step is on disk, as far as the system goes, before the
    next.

    attempt: the launch of the run. Records of attempts after the first carry it as `attempt`: a
    resumed run makes anew what an earlier attempt had not saved, and nothing is taken back.
    """

    def __init__(self, path: Path, attempt: int = 1) -> None:
        self._mark = {"attempt": attempt} if attempt > 1 else {}
        self._path = path
        try:
            self._file = path.open("a+b")
            _end_last_line(self._file)
        except OSError as error:
            raise RankmeshError(f"{path}: cannot be written: {reason(error)}") from error

    def write(self, metrics: StepMetrics) -> None:
        """Append one step. Raises RankmeshError naming the file where it cannot, as on a full
        disk.
        """
        try:
            self._file.write(encode({**metrics.to_dict(), **self._mark}).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise RankmeshError(f"{self._path}: cannot be written: {reason(error)}") from error

    def close(self) -> None:
        """Close the file; closing twice is fine. What a full disk did not take is let go."""
        with contextlib.suppress(OSError):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _end_last_line(file: Any) -> None:
    """A run that died while writing left half a line: what follows must not be glued onto it."""
    if file.seek(0, 2) > 0:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every step of a metrics.jsonl, in file order, NaN and infinity restored.

    A line that a dying run left unfinished, at the end or before a resumed part, is left out.
    Raises UserError where the file cannot be read or has lines that are no such record.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {reason(error)}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = decode(line)
        except ValueError:
            if line.startswith("{"):
                continue
            raise UserError(f"{path}: line {number} is no JSON object: {line[:60]!r}") from None
        if not isinstance(record, dict) or record.get("format_version") != FORMAT_VERSION:
            raise UserError(
                f"{path}: line {number} has no format_version {FORMAT_VERSION}: {line[:60]!r}"
            )
        records.append(record)
    return records
