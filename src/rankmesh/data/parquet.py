"""Text columns of parquet files, through the extra `pyarrow` that only this file imports.

Owns the way from a column to bytes. It must not know what a document is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rankmesh.errors import DataError

# Rows decoded at once; a row group is decoded page by page.
_ROWS = 256
NULL = -1


def num_rows(path: Path) -> int:
    """Rows of the file, from its footer. Raises DataError."""
    return int(_open(path).metadata.num_rows)


def read_column(path: Path, column: str, start: int) -> Iterator[tuple[bytes, NDArray[np.int64]]]:
    """Values of a text column from row `start` on: some rows' bytes back to back, and the length of
    each, NULL (-1) for a missing one. Raises DataError if there is no such column, or no text in
    it.
    """
    file = _open(path)
    _check_column(path, file.schema_arrow, column)
    groups, skip = _groups_from(file.metadata, start)
    try:
        for batch in file.iter_batches(
            _ROWS, row_groups=groups, columns=[column], use_threads=False
        ):
            if skip < batch.num_rows:
                yield _bytes_of(batch.column(0).slice(skip))
            skip = max(0, skip - batch.num_rows)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read: {_line(error)}") from error


def _open(path: Path) -> Any:
    try:
        return pq.ParquetFile(path, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a parquet file, or damaged: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check_column(path: Path, schema: Any, column: str) -> None:
    if column not in schema.names:
        raise DataError(f"{path}: no column {column!r}; it has {', '.join(schema.names)}")
    kind = schema.field(column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if not any(is_kind(value) for is_kind in kinds):
        raise DataError(f"{path}: column {column!r} holds {kind}, not text")


def _groups_from(metadata: Any, start: int) -> tuple[list[int], int]:
    """Row groups from the one of row `start` on, and the rows to skip in the first of them."""
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        if start < rows:
            return list(range(group, metadata.num_row_groups)), start
        start -= rows
    return [], 0


def _bytes_of(values: Any) -> tuple[bytes, NDArray[np.int64]]:
    missing = np.asarray(values.is_null())
    filled = pc.fill_null(values.cast(pa.large_string()), "").cast(pa.large_binary())
    _, offsets, content = filled.buffers()
    first, count = filled.offset, len(filled)
    bounds = np.frombuffer(offsets, dtype=np.int64, count=first + count + 1)[first:]
    sizes = np.where(missing, NULL, np.diff(bounds))
    low, high = int(bounds[0]), int(bounds[-1])
    return (b"" if content is None else bytes(memoryview(content)[low:high])), sizes
