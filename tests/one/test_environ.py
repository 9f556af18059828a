"""What launchers say about a process: their variables in, one value or one line out."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from rankmesh.comm.environ import Launch, alone, defaults, first_host, local_device, read_launch
from rankmesh.errors import UserError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "alpha",
    "MASTER_PORT": "29500",
}
ELASTIC = {
    **TORCHRUN,
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_ERROR_FILE": "/tmp/error.json",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODELIST": "gpu[007-008]",
    "SLURM_JOB_ID": "4242",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def read(environ: Mapping[str, str]) -> Launch:
    """The launch, which must be there."""
    launch = read_launch(environ)
    assert launch is not None
    return launch


def without(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    """A copy that lacks some variables."""
    return {name: value for name, value in environ.items() if name not in names}


def test_no_launcher_is_no_launch() -> None:
    """Variables of a job without a task (a batch script, an allocation) do not count."""
    assert read_launch({}) is None
    assert read_launch({"MASTER_ADDR": "alpha", "MASTER_PORT": "29500"}) is None
    assert read_launch(without(SLURM, "SLURM_PROCID")) is None
    assert read_launch({**SLURM, "ENVIRONMENT": "BATCH", "SLURM_PROCID": "0"}) is None
    assert alone().world_size == 1


def test_torchrun() -> None:
    """Ranks, the store that torch's agent keeps, and where it looks for an error."""
    assert read(TORCHRUN) == Launch(
        launcher="torchrun",
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        master_addr="alpha",
        master_port=29500,
    )
    launch = read(ELASTIC)
    assert launch.agent_store and launch.attempt == 2 and launch.job == "job7"
    assert launch.error_file == Path("/tmp/error.json")


def test_slurm() -> None:
    """The store is on the first host; its port follows from the job and the step."""
    launch = read(SLURM)
    assert (launch.launcher, launch.rank, launch.world_size) == ("slurm", 5, 8)
    assert (launch.local_rank, launch.local_world_size) == (1, 4)
    assert launch.master_addr == "gpu007"
    ports = {
        read({**SLURM, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).master_port
        for job in ("4242", "4243")
        for step in ("0", "1")
    }
    assert len(ports) == 4 and min(ports) >= 10_000 and max(ports) < 32_768
    own = {**SLURM, "MASTER_ADDR": "beta", "MASTER_PORT": "1234"}
    assert (read(own).master_addr, read(own).master_port) == ("beta", 1234)


def test_a_slurm_step_may_be_smaller_than_its_job() -> None:
    """srun -n 2 inside a job of 8 tasks is a world of 2."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "gpu008"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "ENVIRONMENT": "BATCH"}
    launch = read({**SLURM, **step, "SLURM_PROCID": "1", "SLURM_LOCALID": "1"})
    assert (launch.world_size, launch.master_addr, launch.local_world_size) == (2, "gpu008", 2)


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("gpu007", "gpu007"),
        ("gpu7,gpu8", "gpu7"),
        ("gpu[007-009,012],login1", "gpu007"),
        ("gpu[12,14]", "gpu12"),
        ("rack[2-3]node[01-16]", "rack2node01"),
        ("a-b-1.example,c", "a-b-1.example"),
    ],
)
def test_first_host_of_a_node_list(node_list: str, host: str) -> None:
    """Brackets, ranges with leading zeros, several brackets, plain names."""
    assert first_host(node_list) == host


def test_open_mpi() -> None:
    """One host needs no address; jobs side by side get ports of their own."""
    launch = read(MPI)
    assert (launch.launcher, launch.rank, launch.world_size) == ("mpi", 1, 2)
    assert launch.master_addr == "127.0.0.1"
    ports = {read({**MPI, "PMIX_NAMESPACE": f"prterun-{n}@1"}).master_port for n in range(4)}
    assert len(ports) == 4
    with pytest.raises(UserError, match="MASTER_ADDR is not set"):
        read_launch({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})


def test_the_inner_launcher_counts() -> None:
    """torchrun started by srun, mpirun inside a Slurm job: the outer one has its own counts."""
    node = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    assert read({**SLURM, **node, **ELASTIC}).launcher == "torchrun"
    assert read({**SLURM, **MPI}).launcher == "mpi"


def test_variables_by_hand_must_agree_with_the_launcher() -> None:
    """Two launchers that disagree are refused, with both values."""
    same = {"RANK": "5", "WORLD_SIZE": "8"}
    assert read({**SLURM, **same}).launcher == "slurm"
    with pytest.raises(UserError, match=re.escape("RANK=0 contradicts slurm, which says 5")):
        read_launch({**SLURM, "RANK": "0", "WORLD_SIZE": "8"})
    with pytest.raises(UserError, match=re.escape("WORLD_SIZE=4 contradicts mpi, which says 2")):
        read_launch({**MPI, "WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"RANK": "8"}, "RANK=8 does not fit WORLD_SIZE=8: ranks run from 0 to 7"),
        ({"WORLD_SIZE": "4"}, "RANK=5 does not fit WORLD_SIZE=4"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 does not fit LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 is more than WORLD_SIZE=8"),
        ({"RANK": "-1"}, "RANK='-1' is not a whole number"),
        ({"WORLD_SIZE": "eight"}, "WORLD_SIZE='eight' is not a whole number"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set though RANK=5"),
    ],
)
def test_contradictory_variables_are_refused(change: dict[str, str], text: str) -> None:
    """Field report U08: one line that names variable and value, and no hang."""
    with pytest.raises(UserError) as caught:
        read_launch({**TORCHRUN, **change})
    assert text in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", TORCHRUN)
def test_a_missing_variable_is_named(name: str) -> None:
    """Field report U08: LOCAL_RANK without RANK, and every other gap."""
    with pytest.raises(UserError, match=f"{name} is not set though"):
        read_launch(without(TORCHRUN, name))


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID"])
def test_a_missing_slurm_variable_is_named(name: str) -> None:
    """Field report U08, for the other launcher."""
    with pytest.raises(UserError, match=f"{name} is not set though"):
        read_launch(without(SLURM, name))


def test_local_rank_alone_is_refused() -> None:
    """Field report U08: a lone LOCAL_RANK names all that is missing with it."""
    with pytest.raises(UserError, match="RANK, WORLD_SIZE, LOCAL_WORLD_SIZE"):
        read_launch({"LOCAL_RANK": "0"})


def test_the_local_rank_chooses_the_device() -> None:
    """Field report U08: rank 5, local rank 1, 8 visible devices, 4 a host: device 1, not 5."""
    assert local_device(read(TORCHRUN), 8) == 1
    assert local_device(read({**TORCHRUN, "RANK": "4", "LOCAL_RANK": "0"}), 8) == 0


def test_a_launcher_may_show_each_process_its_own_device() -> None:
    """One visible device is this process's, whatever its local rank."""
    assert local_device(read(TORCHRUN), 1) == 0


def test_a_local_rank_without_a_device_is_refused() -> None:
    """More processes than devices on a host: the line says how many fit."""
    with pytest.raises(UserError, match="LOCAL_RANK 3 .* 2 are visible"):
        local_device(read({**TORCHRUN, "LOCAL_RANK": "3"}), 2)


def test_defaults_are_for_inside_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set already stays, what was not is gone afterwards."""
    monkeypatch.setenv("RANKMESH_TEST_A", "mine")
    monkeypatch.delenv("RANKMESH_TEST_B", raising=False)
    with defaults({"RANKMESH_TEST_A": "other", "RANKMESH_TEST_B": "new"}):
        assert os.environ["RANKMESH_TEST_A"] == "mine"
        assert os.environ["RANKMESH_TEST_B"] == "new"
    assert "RANKMESH_TEST_B" not in os.environ
