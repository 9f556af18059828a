"""Folders of weights: written by several ranks, read by any, damaged in every way we know."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rankmesh.checkpoint.manifest import MANIFEST
from rankmesh.checkpoint.shelf import step_folder
from rankmesh.checkpoint.source import check_same_model, open_weights
from rankmesh.checkpoint.tensorfile import Deferred, TensorFiles, write_tensors
from rankmesh.checkpoint.weights import LocalSlice, Weights, write_weights
from rankmesh.errors import CheckpointError
from rankmesh.specs.model import ModelSpec, make_spec
from rankmesh.specs.placement import param_table, parts
from rankmesh.specs.presets import preset
from rankmesh.topology.plan import ParallelPlan
from tests.checkpoints import SPEC, held, whole, write_with_ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_with_ranks(tmp_path / "w", 2, whole(SPEC))
    return tmp_path / "w"


def assert_reads(folder: Path, tensors: dict[str, Tensor], spec: ModelSpec = SPEC) -> None:
    """Every slice that any rank of several meshes would ask for."""
    source = Weights(folder)
    for tp in (1, 2, 4):
        for param in param_table(spec, ParallelPlan(tp=tp)):
            for rank in range(tp):
                slices = param.slices({"tp": rank})
                read = source.slice(param.name, slices)
                assert read.dtype == tensors[param.name].dtype
                assert torch.equal(read, tensors[param.name][slices]), (param.name, tp, rank)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_any_mesh_reads_what_any_mesh_wrote(tp: int, tmp_path: Path) -> None:
    tensors = whole(SPEC)
    write_with_ranks(tmp_path / "w", tp, tensors, idle=1)
    assert_reads(tmp_path / "w", tensors)
    source = Weights(tmp_path / "w")
    assert (source.spec, source.step, source.tokenizer) == (SPEC, 7, None)
    source.verify()
    files = sorted(path.name for path in (tmp_path / "w").iterdir())
    assert files == [*(f"data-{rank:05d}.safetensors" for rank in range(tp)), MANIFEST]
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


def test_nothing_is_written_twice(tmp_path: Path) -> None:
    """tp 4 with 2 KV heads: each replicated or shared slice is in one file alone."""
    tensors = whole(SPEC)
    write_with_ranks(tmp_path / "w", 4, tensors)
    stored = [load_file(path) for path in sorted((tmp_path / "w").glob("*.safetensors"))]
    numbers = sum(tensor.numel() for file in stored for tensor in file.values())
    assert numbers == sum(tensor.numel() for tensor in tensors.values())
    assert "norm.weight" in stored[0] and "norm.weight" not in stored[1]
    # A box carries its bounds, so that a file tells by itself what it holds.
    assert "layers.0.attn.k.weight[4:8, 0:12]" in stored[2]
    assert not any("attn.k.weight" in key for key in stored[3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = whole(SPEC, dtype)
    write_with_ranks(tmp_path / "w", 2, tensors)
    assert_reads(tmp_path / "w", tensors)


def test_a_tied_model_with_biases(tmp_path: Path) -> None:
    spec = preset("gpt2-tiny", vocab_size=31)
    tensors = whole(spec)
    write_with_ranks(tmp_path / "w", 2, tensors, spec)
    assert_reads(tmp_path / "w", tensors, spec)
    with pytest.raises(CheckpointError, match=r"no tensor head\.weight"):
        Weights(tmp_path / "w").slice("head.weight", (slice(0, 1), slice(0, 1)))


def test_our_files_are_plain_safetensors(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(7, dtype=torch.bfloat16),
        "b": torch.arange(12.0).view(3, 4).t(),
        "c": torch.tensor([True, False]),
        "d": torch.zeros(0, 3),
    }
    entry = write_tensors(tmp_path / "x.safetensors", tensors)
    assert entry.bytes == (tmp_path / "x.safetensors").stat().st_size
    read = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_a_deferred_tensor_is_made_when_its_turn_has_come(tmp_path: Path) -> None:
    """One at a time: what is converted may be larger than memory."""
    tensors = whole(SPEC)
    alive: list[str] = []

    def load(name: str) -> Tensor:
        alive.append(name)
        return tensors[name]

    local = [
        LocalSlice(
            item.name,
            item.shape,
            item.slices,
            Deferred(item.shape, torch.float32, lambda name=item.name: load(name)),
        )
        for item in held(SPEC, 1, 0, tensors)
    ]
    assert alive == []
    write_weights(tmp_path / "w", local, spec=SPEC, step=7)
    assert alive == [part.name for part in parts(SPEC)]
    assert_reads(tmp_path / "w", tensors)
    wrong = Deferred((2,), torch.float32, lambda: torch.zeros(3))
    with pytest.raises(CheckpointError, match=r"\(3,\) came where .* \(2,\) was announced"):
        write_tensors(tmp_path / "x.safetensors", {"a": wrong})


def test_a_rank_may_write_several_boxes_of_a_tensor(tmp_path: Path) -> None:
    """As shards of optimizer state are: any range of elements is a few boxes."""
    tensors = whole(SPEC)
    local = [item for item in held(SPEC, 1, 0, tensors) if item.name != "embed.weight"]
    boxes = [
        (slice(0, 1), slice(0, 12)),
        (slice(1, 2), slice(0, 5)),
        (slice(1, 2), slice(5, 12)),
        (slice(2, 23), slice(0, 12)),
    ]
    embed = tensors["embed.weight"]
    local += [LocalSlice("embed.weight", (23, 12), box, embed[box]) for box in boxes]
    write_weights(tmp_path / "w", local, spec=SPEC, step=7)
    assert_reads(tmp_path / "w", tensors)
    Weights(tmp_path / "w").verify()


def test_a_write_that_died_leaves_no_folder_and_no_trace_in_the_next(tmp_path: Path) -> None:
    tensors = whole(SPEC)
    waits = iter([None, RuntimeError("killed")])

    def die_at_the_second_barrier() -> None:
        if (failure := next(waits)) is not None:
            raise failure

    local = held(SPEC, 1, 0, tensors)
    with pytest.raises(RuntimeError, match="killed"):
        write_weights(tmp_path / "w", local, spec=SPEC, step=1, barrier=die_at_the_second_barrier)
    assert not (tmp_path / "w").exists()
    # The remains hold files of a rank that the next attempt does not have.
    (tmp_path / ".w.partial" / "pieces-00009.json").write_text("{}")
    write_weights(tmp_path / "w", local, spec=SPEC, step=1)
    assert_reads(tmp_path / "w", tensors)
    assert not (tmp_path / ".w.partial").exists()


def test_weights_are_never_overwritten(tmp_path: Path) -> None:
    local = held(SPEC, 1, 0, whole(SPEC))
    write_weights(tmp_path / "w", local, spec=SPEC, step=1)
    with pytest.raises(CheckpointError, match="exists already"):
        write_weights(tmp_path / "w", local, spec=SPEC, step=1)


def _without_last(local: list[LocalSlice]) -> list[LocalSlice]:
    return local[:-1]


def _doubled_shape(local: list[LocalSlice]) -> list[LocalSlice]:
    first = local[0]
    return [LocalSlice(first.name, (99, 12), first.slices, first.tensor), *local[1:]]


def _half(local: list[LocalSlice]) -> list[LocalSlice]:
    first = local[0]
    rows = (slice(0, 4), slice(0, 12))
    return [LocalSlice(first.name, first.shape, rows, first.tensor[:4]), *local[1:]]


def _twice(local: list[LocalSlice]) -> list[LocalSlice]:
    return [*local, local[0]]


def _stranger(local: list[LocalSlice]) -> list[LocalSlice]:
    return [*local, LocalSlice("bias", (1,), (slice(0, 1),), torch.zeros(1))]


def _complex(local: list[LocalSlice]) -> list[LocalSlice]:
    first = local[0]
    tensor = first.tensor.to(torch.complex64)
    return [LocalSlice(first.name, first.shape, first.slices, tensor), *local[1:]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without_last, "1 tensor is missing: head.weight"),
        (_doubled_shape, "embed.weight (shape (99, 12), the model needs (23, 12))"),
        (_half, "do not add up to shape (23, 12)"),
        (_twice, "came twice"),
        (_stranger, "1 tensor has no place in the model: bias"),
        (_complex, "torch.complex64 cannot be written"),
    ],
)
def test_slices_that_do_not_make_the_model_are_not_committed(
    change: Callable[[list[LocalSlice]], list[LocalSlice]], words: str, tmp_path: Path
) -> None:
    local = change(held(SPEC, 1, 0, whole(SPEC)))
    with pytest.raises(CheckpointError) as caught:
        write_weights(tmp_path / "w", local, spec=SPEC, step=1)
    assert words in str(caught.value)
    assert not (tmp_path / "w").exists()


def test_overlapping_writers_are_refused(tmp_path: Path) -> None:
    """Two ranks that both hold rows 0-1 and leave rows 2-3 out add up to the right size."""
    tensors = whole(SPEC)
    with pytest.raises(CheckpointError, match="overlap"):
        _write_overlapping(tmp_path / "w", tensors)


def _write_overlapping(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Rank 1's piece of norm.weight comes beside rank 0's, at the second barrier."""
    local = [item for item in held(SPEC, 1, 0, tensors) if item.name != "norm.weight"]
    half = LocalSlice("norm.weight", (12,), (slice(0, 6),), tensors["norm.weight"][:6])
    calls: Iterator[int] = iter(range(3))

    def rank_1_writes() -> None:
        if next(calls) == 1:
            temporary = folder.with_name(f".{folder.name}.partial")
            lists = json.loads((temporary / "pieces-00000.json").read_text())
            file = "data-00001.safetensors"
            entry = dict(lists["tensors"])["norm.weight"]
            entry = {**entry, "pieces": [{**entry["pieces"][0], "file": file}]}
            content = {**lists, "file": file, "tensors": [["norm.weight", entry]]}
            (temporary / "pieces-00001.json").write_text(json.dumps(content))

    write_weights(folder, [*local, half], spec=SPEC, step=1, barrier=rank_1_writes)


def test_slices_out_of_a_tensor_and_unknown_tensors_are_refused(folder: Path) -> None:
    source = Weights(folder)
    with pytest.raises(CheckpointError, match="no tensor nose.weight"):
        source.slice("nose.weight", (slice(0, 1),))
    with pytest.raises(CheckpointError, match=r"shape \(12,\), which does not hold \[0:13\]"):
        source.slice("norm.weight", (slice(0, 13),))
    files = TensorFiles(folder)
    with pytest.raises(CheckpointError, match="does not hold"):
        files.read("data-00000.safetensors", "norm.weight", (slice(0, 99),))
    with pytest.raises(CheckpointError, match="no tensor nose"):
        files.read("data-00000.safetensors", "nose", (slice(0, 1),))


def test_the_tokenizer_travels_along(tmp_path: Path) -> None:
    local = held(SPEC, 1, 0, whole(SPEC))
    tokenizer = tmp_path / "tok"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text('{"model": 1}')
    (tokenizer / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    write_weights(tmp_path / "a", local, spec=SPEC, step=1, tokenizer=str(tokenizer))
    assert Weights(tmp_path / "a").tokenizer == str(tmp_path / "a" / "tokenizer.json")
    assert (tmp_path / "a" / "tokenizer_config.json").read_text() == '{"eos_token": "x"}'
    Weights(tmp_path / "a").verify()
    write_weights(tmp_path / "b", local, spec=SPEC, step=1, tokenizer="bytes")
    assert Weights(tmp_path / "b").tokenizer == "bytes"
    with pytest.raises(CheckpointError, match="nowhere"):
        write_weights(
            tmp_path / "c", local, spec=SPEC, step=1, tokenizer=str(tmp_path / "nowhere.json")
        )


def test_a_run_directory_means_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    local = held(SPEC, 1, 0, whole(SPEC))
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in (9, 10):
        write_weights(step_folder(tmp_path / "run", step), local, spec=SPEC, step=step)
    (checkpoints / "step-00000011").mkdir()
    (checkpoints / ".step-00000012.partial").mkdir()
    assert open_weights(tmp_path / "run").step == 10
    assert open_weights(checkpoints / "step-00000009").step == 9


def test_folders_without_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        open_weights(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no weights here"):
        open_weights(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        open_weights(tmp_path)


def test_weights_of_another_model_are_refused(folder: Path) -> None:
    """One error lists all that is missing, all that has no place, all of another shape."""
    source = open_weights(folder)
    check_same_model(source, SPEC)
    other = make_spec(**{**SPEC.to_dict(), "vocab_size": 24})
    with pytest.raises(CheckpointError) as caught:
        check_same_model(source, other)
    assert "2 tensors have another shape: embed.weight (shape (23, 12), the model needs (24" in str(
        caught.value
    )
    names = [part.name for part in parts(SPEC) if part.name.startswith("layers.1.")]
    assert len(names) == 9
    deeper = make_spec(**{**SPEC.to_dict(), "num_layers": 3})
    with pytest.raises(CheckpointError) as caught:
        check_same_model(source, deeper)
    missing = ", ".join(name.replace("layers.1.", "layers.2.") for name in names)
    assert str(caught.value) == f"{folder}: 9 tensors are missing: {missing}"
    shallower = make_spec(**{**SPEC.to_dict(), "num_layers": 1})
    with pytest.raises(CheckpointError) as caught:
        check_same_model(source, shallower)
    strange = f"9 tensors have no place in the model: {', '.join(names)}"
    assert str(caught.value) == f"{folder}: {strange}"
