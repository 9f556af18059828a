"""Checkpoints damaged in every way we know: each is one line that names the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankmesh.checkpoint.manifest import MANIFEST, read_manifest
from rankmesh.checkpoint.shelf import step_folder
from rankmesh.checkpoint.verify import damages
from rankmesh.checkpoint.weights import Weights, write_weights
from rankmesh.errors import CheckpointError
from rankmesh.specs.placement import parts
from tests.checkpoints import SPEC, edit, held, whole, write_with_ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Written by two ranks, with a tokenizer's file beside the data."""
    write_with_ranks(tmp_path / "w", 2, whole(SPEC))
    return tmp_path / "w"


def read_all(folder: Path) -> None:
    """Every tensor, whole."""
    source = Weights(folder)
    for part in parts(SPEC):
        source.slice(part.name, tuple(slice(0, size) for size in part.shape))


def line(action: Callable[[], object]) -> str:
    """The one line of the error that `action` ends with."""
    with pytest.raises(CheckpointError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(format="other"), "format 'other'; this version reads"),
        (lambda c: c.update(format_version=99), "format_version 99 is newer"),
        (lambda c: c.pop("format_version"), "format_version None"),
        (lambda c: c.pop("model"), "damaged manifest"),
        (lambda c: c["model"].update(num_heads=5), "damaged manifest: model.num_kv_heads 2"),
        (lambda c: c["model"].update(surprise=5), "damaged manifest: model.surprise"),
        (lambda c: c["model"].update(vocab_size=24), "embed.weight (shape (23, 12), the model"),
        (lambda c: c["tensors"].pop("norm.weight"), "1 tensor is missing: norm.weight"),
        (lambda c: c["tensors"]["head.weight"]["pieces"].pop(), "do not add up"),
        (lambda c: c["tensors"]["head.weight"].pop("dtype"), "damaged manifest"),
        (
            lambda c: c["tensors"]["head.weight"]["pieces"][0].update(file="../x.safetensors"),
            "'../x.safetensors' is not the name of a file in this folder",
        ),
        (lambda c: c["files"].pop("data-00001.safetensors"), "is not in its files"),
        (lambda c: c.update(tokenizer="/etc/passwd"), "tokenizer '/etc/passwd'"),
    ],
)
def test_a_damaged_manifest_is_one_line(
    folder: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    edit(folder, change)
    with pytest.raises(CheckpointError) as caught:
        Weights(folder)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_truncated_file_is_seen_when_the_folder_is_opened(folder: Path) -> None:
    path = folder / "data-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"data-00001\.safetensors: truncated"):
        Weights(folder)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "data-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"data-00001\.safetensors: file is missing"):
        Weights(folder)


def test_a_changed_manifest_is_seen(folder: Path) -> None:
    """Also where the change makes sense, as another step does."""
    path = folder / MANIFEST
    path.write_text(path.read_text().replace('"step": 7', '"step": 8'))
    assert f"{path}: differs from its own checksum" in line(lambda: Weights(folder))
    path.write_text(path.read_text()[:-20])
    assert f"{path}: cannot be read as JSON" in line(lambda: Weights(folder))


def test_the_layout_of_the_manifest_as_text_is_free(folder: Path) -> None:
    path = folder / MANIFEST
    before = read_manifest(folder)
    path.write_text(json.dumps(json.loads(path.read_text()), indent=8))
    assert read_manifest(folder) == before
    read_all(folder)


def test_every_byte_counts(tmp_path: Path) -> None:
    """A bit flipped anywhere is found by `verify`; in the data of a tensor also by who reads it."""
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text('{"model": 1}')
    folder = tmp_path / "w"
    local = held(SPEC, 1, 0, whole(SPEC))
    write_weights(folder, local, spec=SPEC, step=1, tokenizer=str(tokenizer))
    manifest = read_manifest(folder)
    assert list(damages(folder, manifest)) == []
    first_byte = min(e.pieces[0].bytes[0] for e in manifest.tensors.values())
    for name, entry in manifest.files.items():
        raw = (folder / name).read_bytes()
        assert len(raw) == entry.bytes
        for position in {0, 9, len(raw) // 2, len(raw) - 1, first_byte - 1, first_byte} - {-1}:
            if position >= len(raw):
                continue
            changed = bytearray(raw)
            changed[position] ^= 16
            (folder / name).write_bytes(changed)
            (found,) = damages(folder, manifest)
            assert found.startswith(f"{folder / name}: ") and "differs from its checksum" in found
            if name.endswith(".safetensors") and position >= first_byte:
                assert line(lambda: read_all(folder)).startswith(f"{folder / name}: ")
        (folder / name).write_bytes(raw)
    assert list(damages(folder, manifest)) == []


def test_files_swapped_between_ranks(folder: Path) -> None:
    """Sizes made equal by hand, so that only the bytes tell."""
    one, two = (folder / f"data-0000{rank}.safetensors" for rank in (0, 1))
    first, second = one.read_bytes(), two.read_bytes()
    assert len(first) != len(second)
    edit(folder, lambda c: c["files"].update({one.name: {**c["files"][one.name],
                                                         "bytes": len(second)}}))  # fmt: skip
    edit(folder, lambda c: c["files"].update({two.name: {**c["files"][two.name],
                                                         "bytes": len(first)}}))  # fmt: skip
    one.write_bytes(second)
    two.write_bytes(first)
    assert line(lambda: read_all(folder)).startswith(f"{one}: embed.weight")


def test_a_file_of_another_step(tmp_path: Path) -> None:
    """Same names, same sizes, same header: the values are another step's."""
    for step in (1, 2):
        tensors = {name: tensor + step for name, tensor in whole(SPEC).items()}
        write_weights(step_folder(tmp_path, step), held(SPEC, 1, 0, tensors), spec=SPEC, step=step)
    one, two = (step_folder(tmp_path, step) / "data-00000.safetensors" for step in (1, 2))
    assert one.stat().st_size == two.stat().st_size
    shutil.copy(one, two)
    assert line(lambda: read_all(two.parent)).startswith(f"{two}: embed.weight")


def test_a_folder_renamed_to_another_step(tmp_path: Path) -> None:
    local = held(SPEC, 1, 0, whole(SPEC))
    write_weights(step_folder(tmp_path, 10), local, spec=SPEC, step=10)
    step_folder(tmp_path, 10).rename(step_folder(tmp_path, 20))
    assert "is of step 10, which its folder is not" in line(
        lambda: Weights(step_folder(tmp_path, 20))
    )


def test_a_partial_read_meets_a_ruined_header(folder: Path) -> None:
    path = folder / "data-00000.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    some = (slice(0, 5),)
    assert line(lambda: Weights(folder).slice("norm.weight", some)).startswith(
        f"{path}: damaged or truncated"
    )


def test_pieces_that_claim_the_same_bytes(folder: Path) -> None:
    """A manifest that makes sense but for the bytes it points to."""

    def overlap(content: dict[str, Any]) -> None:
        first, second = (
            content["tensors"][n]["pieces"][0] for n in ("norm.weight", "layers.0.attn_norm.weight")
        )
        second["bytes"] = first["bytes"]

    edit(folder, overlap)
    assert any("overlaps" in found for found in damages(folder, read_manifest(folder)))
