"""From input files to one token file: read, tokenize, mark, write, count.

Owns the policy for bad documents and the statistics. It must not know the layout of token files
or of inputs, nor print. Memory is bounded by the longest document, not by the number of documents
or the size of a file of lines.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rankmesh.data.indexed import TokenWriter, index_path, meta_path, tokens_path
from rankmesh.data.meta import TokenMeta
from rankmesh.data.sources import MISSING_KEY, NO_TOKENS, BadDocument, Document, read_documents
from rankmesh.data.tokenizer import Ids, Tokenizer, load_tokenizer
from rankmesh.errors import DataError

# A batch is tokenized at once: large enough to keep a tokenizer's threads busy, small enough to
# forget.
_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 1024


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What to tokenize, with what, into what.

    inputs: files, one or more. out: prefix of the files written. kind: "auto", "text" or "jsonl".
    jsonl_key: key of the text in a JSON line. append_eod: end each document with the tokenizer's
    mark; eod_token: the mark, where the tokenizer names none or another is wanted. strict: stop
    at the first bad document instead of leaving it out.
    """

    inputs: tuple[Path, ...]
    tokenizer: str
    out: str
    kind: str = "auto"
    jsonl_key: str = "text"
    append_eod: bool = True
    eod_token: str | None = None
    strict: bool = False


@dataclass(frozen=True)
class Prepared:
    """What was written (`meta`), and how long it took."""

    meta: TokenMeta
    seconds: float


def prepare(options: PrepareOptions) -> Prepared:
    """Writes PREFIX.bin, .idx and .meta.json, or raises DataError and leaves nothing behind.

    DataError: an input is missing or would be overwritten, the tokenizer cannot be loaded or has
    no end mark that was asked for, no document is left, or (strict) a document is bad; that one
    names file and line.
    """
    start = time.perf_counter()
    _check_paths(options)
    tokenizer = load_tokenizer(options.tokenizer, options.eod_token)
    if options.append_eod and tokenizer.eod_id is None:
        raise DataError(
            f"tokenizer {options.tokenizer!r} names no end-of-document token: "
            "give --eod-token or --no-append-eod"
        )
    try:
        meta = _write(options, tokenizer)
    except OSError as error:
        raise DataError(f"{options.out}: cannot be written: {error.strerror}") from error
    return Prepared(meta, time.perf_counter() - start)


def _check_paths(options: PrepareOptions) -> None:
    outputs = {path(options.out).resolve() for path in (tokens_path, index_path, meta_path)}
    for path in options.inputs:
        if not path.is_file():
            raise DataError(
                f"{path}: {'a folder, not a file' if path.is_dir() else 'no such file'}"
            )
        if path.resolve() in outputs:
            raise DataError(f"{path}: is both an input and an output of --out {options.out}")


def _write(options: PrepareOptions, tokenizer: Tokenizer) -> TokenMeta:
    skipped: Counter[str] = Counter()
    text_bytes = 0
    mark = [tokenizer.eod_id] if options.append_eod and tokenizer.eod_id is not None else []
    with TokenWriter(options.out, tokenizer.vocab_size) as writer:
        for document, ids in _tokenized(_good(options, skipped), tokenizer):
            # Some tokenizers turn a text of unknown characters into nothing.
            if ids.size:
                writer.add(np.concatenate((ids, np.array(mark, dtype=ids.dtype))))
                text_bytes += document.num_bytes
            else:
                _leave_out(BadDocument(NO_TOKENS, document.path, document.line), options, skipped)
        if not writer.num_tokens:
            raise DataError(f"no document left in {len(options.inputs)} files: {_words(skipped)}")
        meta = TokenMeta(
            tokenizer=options.tokenizer,
            tokenizer_sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            append_eod=options.append_eod,
            num_documents=writer.num_documents,
            num_tokens=writer.num_tokens,
            max_token=writer.max_token,
            text_bytes=text_bytes,
            skipped=dict(sorted(skipped.items())),
        )
        writer.commit(meta)
    return meta


def _good(options: PrepareOptions, skipped: Counter[str]) -> Iterator[Document]:
    """The usable documents; counts the others, or (strict) raises DataError at the first."""
    for path in options.inputs:
        for found in read_documents(path, options.kind, options.jsonl_key):
            if isinstance(found, BadDocument):
                _leave_out(found, options, skipped)
            else:
                yield found


def _leave_out(found: BadDocument, options: PrepareOptions, skipped: Counter[str]) -> None:
    if options.strict:
        key = f" {options.jsonl_key!r}" if found.reason == MISSING_KEY else ""
        raise DataError(f"{found.path}:{found.line}: {found.reason}{key}")
    skipped[found.reason] += 1


def _tokenized(
    documents: Iterable[Document], tokenizer: Tokenizer
) -> Iterator[tuple[Document, Ids]]:
    for batch in _batches(documents):
        ids = tokenizer.encode_batch([document.text for document in batch])
        yield from zip(batch, ids, strict=True)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.num_bytes
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _words(skipped: Counter[str]) -> str:
    return (
        ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items())) or "no lines"
    )
