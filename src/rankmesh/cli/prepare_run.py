"""The body of `rankmesh prepare`: its statistics. All work is in `data/prepare.py`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from rankmesh.cli.prepare_progress import ProgressView
from rankmesh.data.prepare import Prepared, PrepareOptions, prepare


def run(args: argparse.Namespace) -> int:
    """Prepares, prints the statistics, returns 0. Raises DataError if the input is wrong."""
    options = PrepareOptions(
        inputs=tuple(args.inputs),
        tokenizer=args.tokenizer,
        out=args.out,
        kind=args.format,
        jsonl_key=args.jsonl_key,
        append_eod=args.append_eod,
        prepend_bos=args.prepend_bos,
        eod_token=args.eod_token,
        bos_token=args.bos_token,
        strict=args.strict,
        workers=args.workers,
    )
    try:
        with ProgressView() as view:
            done = prepare(options, view)
    except KeyboardInterrupt:
        print("prepare: the same command goes on from here", file=sys.stderr)
        raise
    print(json.dumps(_figures(done, args.out)) if args.json else "\n".join(_report(done, args.out)))
    return 0


def _figures(done: Prepared, out: str) -> dict[str, object]:
    first = {name: reason.first for name, reason in done.progress.tally.skipped.items()}
    return {
        **dataclasses.asdict(done.meta),
        "skipped_first": first,
        "out": out,
        "seconds": done.seconds,
        "resumed_documents": done.progress.resumed.documents,
    }


def _report(done: Prepared, out: str) -> list[str]:
    meta, tally = done.meta, done.progress.tally
    tokens = meta.num_tokens - done.progress.resumed.tokens
    lines = [
        f"{out}.bin: {meta.num_tokens:,} tokens in {meta.num_documents:,} documents "
        f"(vocabulary {meta.vocab_size:,}, largest id {meta.max_token:,})",
        f"{meta.text_bytes:,} bytes of text, {meta.text_bytes / meta.num_tokens:.2f} a token; "
        f"{done.seconds:.1f} s, {tokens / done.seconds:,.0f} tokens/s",
        f"documents have {meta.num_tokens / meta.num_documents:,.0f} tokens on average, half of "
        f"them fewer than {_median_bound(meta.length_histogram):,}, the longest "
        f"{meta.longest_document:,}",
    ]
    if not tally.num_skipped:
        return [*lines, "skipped 0"]
    reasons = [
        f"{reason.count:,} {name} (first: {reason.first})"
        for name, reason in sorted(tally.skipped.items())
    ]
    return [*lines, f"skipped {tally.num_skipped:,}: {', '.join(reasons)}"]


def _median_bound(histogram: tuple[int, ...]) -> int:
    """The lowest power of two below which at least half of the documents lie."""
    seen, total = 0, sum(histogram)
    for exponent, count in enumerate(histogram):
        seen += count
        if 2 * seen >= total:
            return 1 << (exponent + 1)
    return 0
