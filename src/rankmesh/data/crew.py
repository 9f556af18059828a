"""Workers that encode blocks, and the order in which their results come back: that of the blocks.

Owns the processes, how much is in flight and what happens when one dies. It must not know files or
policy. Without workers the same is done here, one block after the other.
"""

from __future__ import annotations

import dataclasses
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

import numpy as np

from rankmesh.data.blocks import Block
from rankmesh.data.encode import Encoded, EncodeOptions, Encoder, Skipped, TokenizerFacts
from rankmesh.data.frames import read_frame, write_frame
from rankmesh.data.indexed import token_dtype
from rankmesh.errors import DataError, RankmeshError

# One worker is one core: its tokenizer must start no threads. `env` sets the variable for the
# worker alone. -P: a file of the current folder must not pass for a module.
_COMMAND = (
    "env",
    "TOKENIZERS_PARALLELISM=false",
    sys.executable,
    "-P",
    "-m",
    "rankmesh.data.worker",
)

# Blocks in flight for each worker, waiting ones and finished ones counted, and bytes of all of
# them: enough that a slow block holds nobody up.
_AHEAD = 4
_AHEAD_BYTES = 1 << 28

_GRACE_S = 5.0


class Worker:
    """One process, used by one thread at a time."""

    def __init__(self) -> None:
        # A session of its own: Ctrl-C reaches this process alone, which ends its workers.
        try:
            self._process = subprocess.Popen(
                _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise RankmeshError(f"a worker cannot be started: {error}") from error
        self._requests = cast(BinaryIO, self._process.stdin)
        self._replies = cast(BinaryIO, self._process.stdout)

    def ask(
        self, header: dict[str, Any], payload: bytes, where: str
    ) -> tuple[dict[str, Any], bytes]:
        """Sends one request and waits for its reply. Raises DataError where the reply is one,
        RankmeshError where the worker dies.
        """
        try:
            write_frame(self._requests, header, payload)
            reply = read_frame(self._replies)
        except BrokenPipeError:
            reply = None
        if reply is None:
            raise RankmeshError(f"a worker {_ending(self._code())} at {where}")
        if "error" in reply[0]:
            raise DataError(reply[0]["error"])
        return reply

    def kill(self) -> None:
        """Ends the process at once, which wakes a thread that waits for its reply."""
        self._process.kill()

    def close(self) -> None:
        """Lets the process end, or kills it, and waits for it."""
        for stream in (self._requests, self._replies):
            try:
                stream.close()
            except BrokenPipeError:
                continue
        self._code()

    def _code(self) -> int:
        """Waits for the end, which is near, or else brings it about; returns the exit code."""
        try:
            return self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (the kernel does that when memory runs out)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def _or_failure(blocks: Iterable[Block]) -> Iterator[Block | RankmeshError]:
    """The blocks; at the end the error that stopped the reading, if one did."""
    try:
        yield from blocks
    except RankmeshError as error:
        yield error


class Crew:
    """Encodes blocks on `num_workers` processes, or here where that is 0. A context manager.

    `facts` is known once the block is entered. Entering raises DataError where `options` cannot
    be met.
    """

    facts: TokenizerFacts

    def __init__(self, options: EncodeOptions, num_workers: int) -> None:
        self._options = options
        self._num_workers = num_workers
        self._workers: list[Worker] = []
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None
        self._encoder: Encoder | None = None

    def __enter__(self) -> Self:
        if not self._num_workers:
            self._encoder = Encoder(self._options)
            self.facts = self._encoder.facts
            return self
        try:
            for _ in range(self._num_workers):
                self._workers.append(Worker())
            self._threads = ThreadPoolExecutor(self._num_workers)
            for facts in self._threads.map(self._greet, self._workers):
                self.facts = facts
        except BaseException:
            self._end(kill=True)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(kill=kind is not None)

    def encode(self, blocks: Iterable[Block]) -> Iterator[tuple[Block, Encoded]]:
        """Each block with its ids, in the order of `blocks`, of which a bounded number is held.

        Raises DataError, and RankmeshError where a worker dies, at the block that it is about.
        """
        if self._threads is None:
            for block in blocks:
                yield block, self._here(block)
            return
        waiting: deque[tuple[Block, Future[Encoded]]] = deque()
        held, failure = 0, None
        for found in _or_failure(blocks):
            if isinstance(found, RankmeshError):
                failure = found
                break
            block = found
            waiting.append((block, self._threads.submit(self._there, block)))
            held += len(block.payload)
            while waiting and (
                waiting[0][1].done()
                or len(waiting) > _AHEAD * self._num_workers
                or held > _AHEAD_BYTES
            ):
                first, future = waiting.popleft()
                held -= len(first.payload)
                yield first, future.result()
        for block, future in waiting:
            yield block, future.result()
        if failure is not None:
            raise failure

    def _greet(self, worker: Worker) -> TokenizerFacts:
        fields, _ = worker.ask(dataclasses.asdict(self._options), b"", "its start")
        self._idle.put(worker)
        return TokenizerFacts(**fields)

    def _here(self, block: Block) -> Encoded:
        assert self._encoder is not None
        return self._encoder.encode(block.kind, block.payload, block.sizes)

    def _there(self, block: Block) -> Encoded:
        worker = self._idle.get()
        fields = {"kind": block.kind, "sizes": block.sizes}
        try:
            reply, content = worker.ask(fields, block.payload, block.place(0, 1))
        finally:
            # A dead one too: the thread that takes it then fails as well, rather than wait.
            self._idle.put(worker)
        split = 4 * reply["documents"]
        return Encoded(
            lengths=np.frombuffer(content[:split], np.int32),
            ids=np.frombuffer(content, token_dtype(self.facts.vocab_size), offset=split),
            text_bytes=reply["text_bytes"],
            skipped={reason: Skipped(**fields) for reason, fields in reply["skipped"].items()},
        )

    def _end(self, kill: bool) -> None:
        if kill:
            for worker in self._workers:
                worker.kill()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()
