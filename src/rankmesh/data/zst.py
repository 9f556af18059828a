"""Zstandard streams, through the extra `zstandard` that only this file imports.

Owns decompression across frames and the refusal of a stream that stops in the middle. It must not
know what the bytes are.
"""

from __future__ import annotations

import io
from typing import Any, BinaryIO

from zstandard import ZstdDecompressor, ZstdError

_CHUNK = 1 << 17
# Frames written with --long=31 need as much; more is refused rather than allocated.
_MAX_WINDOW = 1 << 31


class ZstdReader(io.RawIOBase):
    """The content of all frames of `raw`, one after the other. Reading raises OSError where the
    stream is damaged and EOFError where it is cut off.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._engine = ZstdDecompressor(max_window_size=_MAX_WINDOW)
        self._frame: Any = None
        self._input = b""
        self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills part of `buffer`; 0 at the end."""
        while not self._output:
            if not self._input:
                self._input = self._raw.read(_CHUNK)
                if not self._input:
                    if self._frame is not None:
                        raise EOFError("the zstd stream ends in the middle of a frame")
                    return 0
            self._decode()
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _decode(self) -> None:
        """Turns the input at hand into output, up to the end of its frame."""
        if self._frame is None:
            self._frame = self._engine.decompressobj()
        try:
            self._output = self._frame.decompress(self._input)
        except ZstdError as error:
            raise OSError(f"damaged zstd stream: {error}") from error
        self._input = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None
