"""A run goes on over another mesh as if nothing had happened: levels, axes, chunks, slices."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankmesh.testing.spawn import Pool
from tests import runs

CHANGES = [
    "train.dtype=fp64", "model.num_layers=4", "model.tie_embeddings=true", "model.dropout=0.1",
    "optimizer.clip_grad=0.5", "train.resume=auto", "train.global_batch_size=4", "data.valid=[]",
]  # fmt: skip
MESHES = {
    "one": (1, []),
    "zero": (4, ["parallel.tp=2", "parallel.dp=2", "parallel.zero=1"]),
    "slices": (4, ["parallel.tp=2", "parallel.pp=2", "parallel.sequence_parallel=true"]),
    "V": (2, ["parallel.pp=2", "parallel.schedule=zb-v", "parallel.num_chunks=2"]),
    "odd": (3, ["parallel.dp=3", "parallel.zero=1"]),
    "chunks": (
        4,
        ["parallel.dp=2", "parallel.pp=2", "parallel.num_chunks=2",
         "parallel.schedule=interleaved", "parallel.zero=1"],
    ),
}  # fmt: skip


def job(pool: Pool, config: Path, name: str, mesh: str, steps: int) -> Path:
    ranks, overrides = MESHES[mesh]
    overrides = [
        *CHANGES, *overrides, f"train.steps={steps}", f"log.run_dir={config.parent / name}"
    ]  # fmt: skip
    pool.run(
        "tests.gloo.resume_jobs:run", ranks, timeout=120, config=str(config), overrides=overrides
    )
    return config.parent / name


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_config(tmp_path_factory.mktemp("mesh"))


@pytest.fixture(scope="module")
def straight(pool: Pool, config: Path) -> Path:
    return job(pool, config, "straight", "one", 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "meshes",
    [("one", "zero", "slices", "V"), ("chunks", "odd", "one", "zero"), ("V", "chunks", "slices")],
    ids="-".join,
)
def test_from_mesh_to_mesh(
    pool: Pool, config: Path, straight: Path, meshes: tuple[str, ...]
) -> None:
    """Two steps on each; losses, norms and rates of every step are those of one process."""
    name = "-".join(meshes)
    for number, mesh in enumerate(meshes, start=1):
        folder = job(pool, config, name, mesh, 2 * number)
    for figure in ("loss", "grad_norm", "lr"):
        ours, theirs = runs.figures(folder, figure), runs.figures(straight, figure)
        assert len(ours) == 2 * len(meshes)
        expected = {step: theirs[step] for step in ours}
        assert ours == pytest.approx(expected, rel=1e-9)
