"""What a Hugging Face folder holds beside its weights, and how it survives a stay in our format.

Owns which files come along (tokenizer, generation config, licence), their names among ours, and the
config.json of a folder that is written. It reads no weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankmesh.checkpoint.hf_read import CONFIG, INDEX, PICKLED, SINGLE, HFFolder
from rankmesh.checkpoint.manifest import BYTES, MANIFEST, TOKENIZER, read_json
from rankmesh.checkpoint.weights import SIDE_FILES, Weights
from rankmesh.errors import CheckpointError
from rankmesh.specs.hf import TOKEN_IDS, same_for_hf
from rankmesh.specs.hf_tensors import TIED_HEAD
from rankmesh.specs.model import ModelSpec

PREFIX = "hf-"  # of their files in one of our folders: no name of theirs is taken for one of ours

_WEIGHTS = (".safetensors", ".h5", ".msgpack", ".onnx", ".gguf", *PICKLED)
_LARGEST = 1 << 28
_TOKENIZER_CONFIG = "tokenizer_config.json"
_DTYPE_KEYS = ("dtype", "torch_dtype")


def files_beside(source: HFFolder | Weights) -> dict[str, Path]:
    """Name in a Hugging Face folder -> the file, for all that `source` holds beside weights.

    Of our own folders these are the files that came from one, and the tokenizer.
    """
    if isinstance(source, HFFolder):
        return _beside(source.folder)
    ours = [name for name in source.manifest.files if not name.endswith(_WEIGHTS)]
    return {name.removeprefix(PREFIX): source.folder / name for name in ours}


def carried(source: HFFolder | Weights) -> dict[str, bytes]:
    """Name in one of our folders -> content, for the same files but those that are copied with the
    tokenizer.
    """
    beside = files_beside(source)
    copied = (TOKENIZER, *SIDE_FILES) if source.tokenizer not in (None, BYTES) else ()
    found = {
        PREFIX + name: path.read_bytes() for name, path in beside.items() if name not in copied
    }
    if isinstance(source, HFFolder) and INDEX not in beside and source.holds(TIED_HEAD):
        # A tied head that was stored all the same: what the one file held is noted as an index.
        held_in = dict.fromkeys(source.stored_names(), SINGLE)
        found[PREFIX + INDEX] = _text({"metadata": {}, "weight_map": held_in})
    return found


def like_folder(folder: Path) -> dict[str, Path]:
    """The same of any Hugging Face folder; raises CheckpointError where it is none."""
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder}: no {CONFIG}, so it is no Hugging Face folder")
    return _beside(folder)


def _beside(folder: Path) -> dict[str, Path]:
    return {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith(_WEIGHTS)
        and (path.name == INDEX or not path.name.endswith(".index.json"))
        and path.name != MANIFEST
        and path.stat().st_size <= _LARGEST
    }


def config_bytes(
    spec: ModelSpec, fresh: Mapping[str, Any], dtype: str, beside: Mapping[str, Path]
) -> bytes:
    """config.json of `spec` with weights of `dtype`, such as bfloat16.

    The one that came along, byte for byte, where it says the same; else the `fresh` one with its
    token ids, or with those that the tokenizer names; ids beyond the vocabulary are left out.
    """
    old = read_json(beside[CONFIG]) if CONFIG in beside else {}
    if old and same_for_hf(spec, old):
        stale = [key for key in _DTYPE_KEYS if old.get(key) not in (None, dtype)]
        if not stale:
            return beside[CONFIG].read_bytes()
        return _text(old | dict.fromkeys(stale, dtype))
    ids = {key: old[key] for key in TOKEN_IDS if key in old} or _token_ids(beside)
    ids = {key: _within(value, spec.vocab_size) for key, value in ids.items()}
    return _text({**fresh, **ids, "torch_dtype": dtype})


def _within(ids: Any, vocab_size: int) -> Any:
    """An id, or a list of them, without those that the model has no row for; None for none."""
    if isinstance(ids, list):
        return [one for one in ids if _within(one, vocab_size) is not None] or None
    return ids if isinstance(ids, int) and 0 <= ids < vocab_size else None


def _token_ids(beside: Mapping[str, Path]) -> dict[str, int]:
    """Ids of the marks that tokenizer_config.json names, from the vocabulary's added tokens."""
    if _TOKENIZER_CONFIG not in beside or TOKENIZER not in beside:
        return {}
    named = read_json(beside[_TOKENIZER_CONFIG])
    added = read_json(beside[TOKENIZER]).get("added_tokens") or []
    ids = {token.get("content"): token.get("id") for token in added if isinstance(token, dict)}
    found = {}
    for key in TOKEN_IDS:
        token: Any = named.get(key.removesuffix("_id"))
        text = token.get("content") if isinstance(token, dict) else token
        number = ids.get(text) if isinstance(text, str) else None
        if isinstance(number, int):
            found[key] = number
    return found


def _text(config: Mapping[str, Any]) -> bytes:
    return (json.dumps(config, indent=2) + "\n").encode()
