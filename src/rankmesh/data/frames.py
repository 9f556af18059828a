"""Messages between a process and its workers: a JSON header and raw bytes, over a pipe.

Owns their form. It must not know what they say.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

# Lengths of header and payload.
_HEAD = struct.Struct("<IQ")


def write_frame(stream: BinaryIO, header: Mapping[str, Any], *payload: bytes) -> None:
    """Sends one message; the parts of the payload arrive as one."""
    text = json.dumps(header).encode()
    stream.write(_HEAD.pack(len(text), sum(len(part) for part in payload)) + text)
    for part in payload:
        stream.write(part)
    stream.flush()


def read_frame(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """The next message; None where the other side has gone, even in the middle of one."""
    head = stream.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    text_size, size = _HEAD.unpack(head)
    text, payload = stream.read(text_size), stream.read(size)
    if len(text) < text_size or len(payload) < size:
        return None
    return json.loads(text), payload
