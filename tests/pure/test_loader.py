"""Owns the proof of what a replica is given in a step: rows, labels, padding, evaluation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.data.indexed import TokenFile
from rankmesh.data.loader import Loader, Microbatch, eval_loader
from rankmesh.data.order import FileOrder, SampleOrder
from rankmesh.data.samples import Samples
from rankmesh.data.writer import TokenWriter
from rankmesh.topology.batch import BatchPlan

T = 6
NUM_SAMPLES = 23


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Token i of the file is i."""
    prefix = tmp_path_factory.mktemp("loader") / "text"
    with TokenWriter(prefix, 1000) as writer:
        writer.add(list(range(NUM_SAMPLES * T + 1)))
        writer.commit()
    return Samples([TokenFile(prefix)], T)


def rows(microbatches: list[Microbatch]) -> dict[int, list[int]]:
    """Sample number -> tokens and last label, of the rows that are not padding; shapes checked."""
    found: dict[int, list[int]] = {}
    for microbatch in microbatches:
        size = microbatch.samples.shape[0]
        assert microbatch.tokens.shape == microbatch.labels.shape == (size, T)
        for tensor in (microbatch.tokens, microbatch.labels, microbatch.samples):
            assert tensor.dtype == torch.int64 and tensor.device.type == "cpu"
        for number, tokens, labels in zip(
            microbatch.samples.tolist(), microbatch.tokens, microbatch.labels, strict=True
        ):
            if number == -1:
                assert tokens.eq(0).all() and labels.eq(-100).all()
            else:
                assert number not in found
                found[number] = [*tokens.tolist(), int(labels[-1])]
    return found


def test_labels_are_the_next_tokens(samples: Samples) -> None:
    """Field report X11: shifted once, inside the row; the last target is the row's own."""
    loader = Loader(samples, FileOrder(len(samples)), BatchPlan(4, 1, 4), 0)
    (microbatch,) = loader.step(2)
    first = torch.arange(8, 12)[:, None] * T + torch.arange(T)
    assert torch.equal(microbatch.tokens, first)
    assert torch.equal(microbatch.labels, first + 1)
    assert microbatch.samples.tolist() == [8, 9, 10, 11]


@given(
    global_batch=st.integers(1, 13),
    dp=st.integers(1, 4),
    microbatch=st.integers(1, 4),
    step=st.integers(0, 30),
)
def test_every_mesh_sees_the_same_step(
    samples: Samples, global_batch: int, dp: int, microbatch: int, step: int
) -> None:
    """Each sample of the step once over all replicas, the rest padding, whatever dp and size."""
    order = SampleOrder(7, len(samples))
    plan = BatchPlan(global_batch, dp, microbatch)
    found: dict[int, list[int]] = {}
    for replica in range(dp):
        microbatches = Loader(samples, order, plan, replica).step(step)
        assert len(microbatches) == plan.num_microbatches
        assert all(len(item.samples) == microbatch for item in microbatches)
        own = rows(microbatches)
        assert not own.keys() & found.keys()
        found |= own
    numbers = range(step * global_batch, (step + 1) * global_batch)
    assert found == {k: samples.sample(order.index(k)).tolist() for k in numbers}


def test_a_step_depends_on_nothing_before_it(samples: Samples) -> None:
    """A resume, also with another batch size, goes on at the next unread sample."""
    order = SampleOrder(3, len(samples))
    whole = Loader(samples, order, BatchPlan(60, 1, 60), 0)
    first = Loader(samples, order, BatchPlan(8, 1, 4), 0)
    resumed = Loader(samples, order, BatchPlan(12, 1, 5), 0)
    expected = rows(whole.step(0))
    assert (
        rows(first.step(2))
        | rows(first.step(0))
        | rows(first.step(1))
        | rows(resumed.at(24))
        | rows(resumed.at(36))
        | rows(resumed.step(4))
        == expected
    )


def test_padding_rows(samples: Samples) -> None:
    """5 samples on 2 replicas in microbatches of 2: the second replica runs empty rows."""
    order = SampleOrder(3, len(samples))
    plan = BatchPlan(5, 2, 2)
    left, right = (Loader(samples, order, plan, replica).step(0) for replica in range(2))
    assert [m.samples.tolist() for m in left] == [[0, 1], [4, -1]]
    assert [m.samples.tolist() for m in right] == [[2, 3], [-1, -1]]
    assert rows(left).keys() | rows(right).keys() == set(range(5))


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [None, 1, 10, 1000])
def test_evaluation_sees_each_sample_once(
    samples: Samples, dp: int, num_samples: int | None
) -> None:
    """Field report X16: in file order, without the training order, the same at every call."""
    expected = min(num_samples or NUM_SAMPLES, NUM_SAMPLES)
    plan = BatchPlan(4, dp, 2)
    loaders = [eval_loader(samples, plan, replica, num_samples) for replica in range(dp)]
    steps = loaders[0].num_steps
    assert steps == -(-expected // 4)
    passes = []
    for _ in range(2):
        found = [rows(loader.step(step)) for step in range(steps) for loader in loaders]
        assert sum(len(part) for part in found) == expected
        passes.append({k: tokens for part in found for k, tokens in part.items()})
    assert passes[0] == passes[1]
    assert passes[0] == {k: samples.sample(k).tolist() for k in range(expected)}


def test_evaluation_does_not_disturb_training(samples: Samples) -> None:
    """Field report X16: the training rows before and after an evaluation are the same."""
    plan = BatchPlan(4, 1, 4)
    training = Loader(samples, SampleOrder(1, len(samples)), plan, 0)
    before = rows(training.step(5))
    for step in range(3):
        eval_loader(samples, plan, 0).step(step)
    assert rows(training.step(5)) == before


def test_an_endless_loader_has_no_number_of_steps(samples: Samples) -> None:
    """Training stops by its own count."""
    with pytest.raises(ValueError, match="no number of steps"):
        _ = Loader(samples, FileOrder(len(samples)), BatchPlan(1, 1, 1), 0).num_steps
