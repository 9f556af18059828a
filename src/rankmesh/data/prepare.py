"""From input files to one token file: what is read, encoded, counted and written, and in which
order.

Owns the policy for bad documents and for interruptions. It must not know the layout of token files
or of inputs, nor print. Memory is bounded by the longest document and the number of workers, not by
the number of documents or the size of a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankmesh.data.blocks import Block, read_blocks
from rankmesh.data.crew import Crew
from rankmesh.data.encode import Encoded, EncodeOptions, TokenizerFacts
from rankmesh.data.indexed import index_path, meta_path, token_dtype, tokens_path
from rankmesh.data.inputs import Input, find_inputs
from rankmesh.data.meta import TokenMeta
from rankmesh.data.sources import MISSING_KEY
from rankmesh.data.tally import Tally
from rankmesh.data.unfinished import Unfinished
from rankmesh.errors import DataError, RankmeshError, UserError

# An interrupted job loses at most what it did in this time; a killed one as well.
RECORD_S = 20.0

# Input of fewer bytes than this for each worker is not worth starting one.
_WORTH_A_WORKER = 4 << 20


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What to tokenize, with what, into what.

    inputs: files, folders and globs, one or more (see `find_inputs`). out: prefix of the files
    written. kind: "auto", "text", "jsonl" or "parquet". jsonl_key: key of the text in a JSON line,
    column of a parquet file. append_eod, prepend_bos: end and begin each document with the
    tokenizer's mark; eod_token, bos_token: the mark, where the tokenizer names none or another is
    wanted. strict: stop at the first bad document instead of leaving it out. workers: processes
    that encode, 0 for none but this one; None: as many as there are cores, fewer for little input.
    The files written do not depend on it.
    """

    inputs: tuple[Path | str, ...]
    tokenizer: str
    out: str
    kind: str = "auto"
    jsonl_key: str = "text"
    append_eod: bool = True
    prepend_bos: bool = False
    eod_token: str | None = None
    bos_token: str | None = None
    strict: bool = False
    workers: int | None = None


@dataclass(frozen=True)
class Progress:
    """How far a job is. total: bytes of all inputs. resumed: the tally that it went on from.
    seconds: since it began.
    """

    tally: Tally
    total: int
    resumed: Tally
    seconds: float

    @property
    def seconds_left(self) -> float | None:
        """By the pace of this process so far; None until there is one."""
        done = self.tally.read - self.resumed.read
        return self.seconds * (self.total - self.tally.read) / done if done > 0 else None


@dataclass(frozen=True)
class Prepared:
    """What was written (`meta`), and how: the progress at the end."""

    meta: TokenMeta
    progress: Progress

    @property
    def seconds(self) -> float:
        """What this process took."""
        return self.progress.seconds


Report = Callable[[Progress], None]


def prepare(options: PrepareOptions, report: Report | None = None) -> Prepared:
    """Writes PREFIX.bin, .idx and .meta.json, all or none of them. `report` is told after each
    block.

    A job that is interrupted, or that fails after RECORD_S, leaves its work beside PREFIX; one with
    the same options goes on there (see `Unfinished`). Raises DataError where an input is missing,
    damaged or would be overwritten, the tokenizer cannot be loaded or has no mark that was asked
    for, no document is left, or (strict) a document is bad; that one names file and line. Raises
    RankmeshError where a worker dies.
    """
    start = time.perf_counter()
    inputs = find_inputs(options.inputs, options.kind)
    _check_paths(inputs, options.out)
    total = sum(one.size for one in inputs)
    with Crew(_encode_options(options), _num_workers(options.workers, total)) as crew:
        try:
            unfinished = Unfinished(options.out)
            job = _Job(options, inputs, crew, unfinished, start, report)
            return job.run()
        except OSError as error:
            raise DataError(
                f"{options.out}: cannot be written: {error.strerror or error}"
            ) from error


def _check_paths(inputs: Sequence[Input], out: str) -> None:
    if Path(out).name in ("", "..") or out.endswith(("/", "/.")):
        raise DataError(
            f"--out {out}: is a folder; expected a prefix of files, such as "
            f"{Path(out) / 'train'} for {Path(out) / 'train.bin'}"
        )
    outputs = {path(out).resolve() for path in (tokens_path, index_path, meta_path)}
    for one in inputs:
        if one.path.resolve() in outputs:
            raise DataError(f"{one.path}: is both an input and an output of --out {out}")


def _num_workers(wanted: int | None, total: int) -> int:
    if wanted is None:
        return min(len(os.sched_getaffinity(0)), total // _WORTH_A_WORKER)
    if wanted < 0:
        raise DataError(f"--workers {wanted}: expected 0 or more")
    return wanted


def _encode_options(options: PrepareOptions) -> EncodeOptions:
    return EncodeOptions(
        tokenizer=options.tokenizer,
        key=options.jsonl_key,
        append_eod=options.append_eod,
        prepend_bos=options.prepend_bos,
        eod_token=options.eod_token,
        bos_token=options.bos_token,
    )


class _Job:
    """One run of `prepare`, from the place where it goes on to the finished file."""

    def __init__(
        self,
        options: PrepareOptions,
        inputs: Sequence[Input],
        crew: Crew,
        unfinished: Unfinished,
        start: float,
        report: Report | None,
    ) -> None:
        self._options = options
        self._inputs = inputs
        self._total = sum(one.size for one in inputs)
        self._crew = crew
        self._unfinished = unfinished
        self._start = start
        self._report = report
        self._tally = self._resumed = Tally()

    def run(self) -> Prepared:
        """Does the job, or leaves it so that it can be gone on with."""
        try:
            meta = self._write()
        except BaseException as error:
            kept = self._leave(error)
            if kept and isinstance(error, RankmeshError) and not isinstance(error, UserError):
                raise RankmeshError(
                    f"{error}; {kept:,} documents are kept: the same command goes on from there"
                ) from error
            raise
        return Prepared(meta, self._progress())

    def _write(self) -> TokenMeta:
        facts, options = self._crew.facts, self._options
        dtype = token_dtype(facts.vocab_size)
        settings = _settings(options, facts)
        self._tally = self._resumed = self._unfinished.resume(settings, self._inputs, dtype)
        blocks = read_blocks(self._inputs, options.jsonl_key, self._tally.position)
        due = time.monotonic() + RECORD_S
        for block, encoded in self._crew.encode(blocks):
            if options.strict and encoded.skipped:
                raise _first_bad(block, encoded, options.jsonl_key)
            self._unfinished.append(encoded.ids, encoded.lengths)
            self._tally = self._tally.plus(block, encoded)
            if time.monotonic() >= due:
                self._unfinished.record(self._tally)
                due = time.monotonic() + RECORD_S
            if self._report is not None:
                self._report(self._progress())
        if not self._tally.documents:
            files = "1 file" if len(self._inputs) == 1 else f"{len(self._inputs)} files"
            raise DataError(f"no document left in {files}: {self._reasons()}")
        meta = _meta(options, facts, self._tally)
        self._unfinished.publish(options.out, meta)
        return meta

    def _leave(self, error: BaseException) -> int:
        """Keeps what was done, or nothing if the user's input is at fault from the start. Returns
        how many documents are kept.
        """
        tally = self._tally
        if not tally.documents or (
            isinstance(error, UserError) and not self._unfinished.num_records
        ):
            self._unfinished.remove()
            return 0
        # A full disk is full for the journal too; what it recorded before stays good. ValueError:
        # closed already, by the last step.
        with contextlib.suppress(OSError, ValueError):
            self._unfinished.record(tally)
        self._unfinished.close()
        return tally.documents

    def _progress(self) -> Progress:
        seconds = time.perf_counter() - self._start
        return Progress(self._tally, self._total, self._resumed, seconds)

    def _reasons(self) -> str:
        reasons = sorted(self._tally.skipped.items())
        return ", ".join(f"{one.count:,} {name}" for name, one in reasons) or "no lines"


def _settings(options: PrepareOptions, facts: TokenizerFacts) -> Mapping[str, Any]:
    """All that decides about the bytes written, but the inputs."""
    return {
        **dataclasses.asdict(facts),
        "kind": options.kind,
        "key": options.jsonl_key,
        "append_eod": options.append_eod,
        "prepend_bos": options.prepend_bos,
        "strict": options.strict,
    }


def _first_bad(block: Block, encoded: Encoded, key: str) -> DataError:
    reason, first = min(encoded.skipped.items(), key=lambda pair: (pair[1].item, pair[1].line))
    name = f" {key!r}" if reason == MISSING_KEY else ""
    return DataError(f"{block.place(first.item, first.line)}: {reason}{name}")


def _meta(options: PrepareOptions, facts: TokenizerFacts, tally: Tally) -> TokenMeta:
    return TokenMeta(
        tokenizer=options.tokenizer,
        tokenizer_sha256=facts.sha256,
        vocab_size=facts.vocab_size,
        eod_id=facts.eod_id,
        append_eod=options.append_eod,
        bos_id=facts.bos_id,
        prepend_bos=options.prepend_bos,
        num_documents=tally.documents,
        num_tokens=tally.tokens,
        max_token=tally.max_token,
        text_bytes=tally.text_bytes,
        longest_document=tally.longest,
        length_histogram=tally.histogram,
        skipped={name: reason.count for name, reason in sorted(tally.skipped.items())},
    )
