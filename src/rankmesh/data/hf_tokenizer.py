"""Hugging Face `tokenizer.json` files, through the extra `tokenizers` that only this file imports.

Owns reading, the search for the marks that end and begin a document, and training. It must not know
files of tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers, trainers

from rankmesh.data.tokenizer import Ids
from rankmesh.errors import DataError

EOD_TOKEN = "<|endoftext|>"

# Characters encoded at once. The engine needs about 250 bytes for each.
PIECE = 1 << 18
OVERLAP = 1 << 12

# Files beside tokenizer.json that name the marks, then the names that well-known tokenizers use.
_SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_END_MARKS = (EOD_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
_BEGIN_MARKS = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "<|startoftext|>")


class HFTokenizer:
    """A tokenizer.json, its post-processor, truncation and padding off: see `Tokenizer`."""

    def __init__(
        self, path: Path, eod_token: str | None = None, bos_token: str | None = None
    ) -> None:
        content = path.read_bytes()
        try:
            self._engine = Engine.from_buffer(content)
        # The package raises plain Exception for a broken file.
        except Exception as error:
            raise DataError(f"{path}: not a tokenizer.json: {error}") from error
        self._engine.no_truncation()
        self._engine.no_padding()
        # A document that spells "<|endoftext|>" must not gain an end mark.
        self._engine.encode_special_tokens = True
        vocab = self._engine.get_vocab(with_added_tokens=True)
        if not vocab:
            raise DataError(f"{path}: the tokenizer has no tokens")
        self.vocab_size = max(vocab.values()) + 1
        self.eod_id = _find_mark(path, vocab, eod_token, "eos_token", _END_MARKS)
        self.bos_id = _find_mark(path, vocab, bos_token, "bos_token", _BEGIN_MARKS)
        self.sha256 = hashlib.sha256(content).hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(self._engine.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text; on all cores, except for a text of more than PIECE characters."""
        short = [text for text in texts if len(text) <= PIECE]
        found = iter(self._engine.encode_batch_fast(short, add_special_tokens=False))
        return [
            np.array(next(found).ids, dtype=np.int32)
            if len(text) <= PIECE
            else self._encode_long(text)
            for text in texts
        ]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._engine.decode([int(token) for token in ids], skip_special_tokens=True))

    def _encode_long(self, text: str) -> Ids:
        """Ids of a text that is cut into overlapping pieces, which bounds the engine's memory.

        Where two pieces overlap, the first one has seen what comes before and the second one what
        comes after. They are joined if they agree, ids and places, over the middle half of the
        overlap; if they don't, the text is encoded whole.
        """
        parts: list[Ids] = []
        ids, places = self._encode_piece(text, 0)
        for start in range(PIECE - OVERLAP, len(text) - OVERLAP, PIECE - OVERLAP):
            next_ids, next_places = self._encode_piece(text, start)
            middle = (start + OVERLAP // 4, start + OVERLAP - OVERLAP // 4)
            low, high = np.searchsorted(places, middle)
            next_low, next_high = np.searchsorted(next_places, middle)
            if low == high or not (
                np.array_equal(ids[low:high], next_ids[next_low:next_high])
                and np.array_equal(places[low:high], next_places[next_low:next_high])
            ):
                return np.array(self.encode(text), dtype=np.int32)
            parts.append(ids[:low])
            ids, places = next_ids[next_low:], next_places[next_low:]
        return np.concatenate((*parts, ids))

    def _encode_piece(self, text: str, start: int) -> tuple[Ids, NDArray[np.int64]]:
        """Ids of the piece at `start`, and where in `text` each id's characters begin."""
        found = self._engine.encode(text[start : start + PIECE], add_special_tokens=False)
        places = np.array([low for low, _ in found.offsets], dtype=np.int64) + start
        return np.array(found.ids, dtype=np.int32), places


def train_bpe(texts: Iterable[str], vocab_size: int, out: Path) -> None:
    """Trains a byte-level BPE and writes it to `out`; see `tokenizer.train_bpe`."""
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    engine.save(str(out))


def _find_mark(
    path: Path, vocab: dict[str, int], given: str | None, key: str, known: tuple[str, ...]
) -> int | None:
    """Id of the mark that was given, else of the one named beside the file, else a known one."""
    if given is not None:
        if given not in vocab:
            use = "end" if key == "eos_token" else "begin"
            raise DataError(f"{path}: has no token {given!r} to {use} documents with")
        return vocab[given]
    for name in (*(_named(path.with_name(side), key) for side in _SIDE_FILES), *known):
        if name is not None and name in vocab:
            return vocab[name]
    return None


def _named(path: Path, key: str) -> str | None:
    """The mark that a side file names, as text or as an object with `content`."""
    try:
        settings: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    mark = settings.get(key) if isinstance(settings, dict) else None
    name = mark.get("content") if isinstance(mark, dict) else mark
    return name if isinstance(name, str) else None
