"""A process that encodes blocks: `python -m rankmesh.data.worker`, requests on stdin, replies on
stdout.

It owns no policy and no file: `crew.py` starts it, feeds it and ends it by closing its stdin.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any, BinaryIO

from rankmesh.data.encode import Encoded, EncodeOptions, Encoder
from rankmesh.data.frames import read_frame, write_frame
from rankmesh.errors import DataError


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answers until the other side goes.

    The first request holds the fields of EncodeOptions, its reply those of TokenizerFacts. Each
    further one is a block, its reply the ids. {"error": text} replies to what raised DataError.
    """
    encoder: Encoder | None = None
    while (request := read_frame(requests)) is not None:
        fields, payload = request
        try:
            if encoder is None:
                encoder = Encoder(EncodeOptions(**fields))
                write_frame(replies, dataclasses.asdict(encoder.facts))
            else:
                _reply(replies, encoder.encode(payload=payload, **fields))
        except DataError as error:
            write_frame(replies, {"error": str(error)})


def _reply(replies: BinaryIO, encoded: Encoded) -> None:
    header: dict[str, Any] = {
        "documents": encoded.lengths.size,
        "text_bytes": encoded.text_bytes,
        "skipped": {reason: vars(skipped) for reason, skipped in encoded.skipped.items()},
    }
    write_frame(replies, header, encoded.lengths.tobytes(), encoded.ids.tobytes())


def main() -> int:
    """Serves on the standard streams; 0 when the other side has gone."""
    # Whatever prints something must not end up among the replies.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        serve(sys.stdin.buffer, replies)
        replies.close()
    except BrokenPipeError:
        # Closing it would try to write the rest once more.
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
