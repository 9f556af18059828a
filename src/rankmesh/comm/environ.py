"""The only reader of environment variables: what a launcher says about this process, as one value.

Owns the variables of torchrun, Slurm and Open MPI and the refusals where they are missing or
contradict each other. It must not know torch, processes or the network.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rankmesh.errors import UserError

__all__ = ["Launch", "alone", "defaults", "first_host", "local_device", "read_launch"]

_PLAIN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
# Below the range from which systems hand out ports to clients (32768 on Linux).
_FIRST_PORT, _NUM_PORTS = 10_000, 20_000


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process among those that a launcher started.

    launcher: torchrun, slurm, mpi, none, or group (a process group that somebody else made). rank,
    world_size: of all processes. local_rank: the place among the processes of this host, which
    alone chooses the device. local_world_size: of this host. master_addr, master_port: where the
    rendezvous store listens. agent_store: somebody else keeps that store, so that rank 0 must not.
    job: tells jobs on one host apart. attempt: restarts so far. error_file: where torch's elastic
    agent looks for a failure's text.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    agent_store: bool = False
    job: str = ""
    attempt: int = 0
    error_file: Path | None = None


def alone() -> Launch:
    """The launch of a process that nobody launched: the whole world is one rank."""
    return Launch(
        launcher="none",
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        master_addr="localhost",
        master_port=0,
    )


def read_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """What the launcher says (of `os.environ` by default), or None where none started us.

    torchrun may run inside a Slurm or MPI job, and mpirun inside a Slurm job: then the inner one
    counts. RANK and its kin set by hand must agree with the launcher's own variables. Raises
    UserError, one line, for variables that are missing, are no numbers or contradict each other.
    """
    env = os.environ if environ is None else environ
    given = [name for name in _PLAIN if name in env]
    if given and "TORCHELASTIC_RUN_ID" in env:
        return _torchrun(env)
    launch = _open_mpi(env) or _slurm(env)
    if launch is None:
        return _torchrun(env) if given else None
    _check_agreement(env, given, launch)
    return launch


def local_device(launch: Launch, visible: int) -> int:
    """Index of the accelerator of this process among the `visible` ones of its host.

    It is the local rank, never the rank modulo the number of devices, which is right only where
    every host is full. One visible device among several local ranks means that the launcher
    shows each process its own. Raises UserError where the local rank has no device.
    """
    if launch.local_rank < visible:
        return launch.local_rank
    if visible == 1:
        return 0
    raise UserError(
        f"LOCAL_RANK {launch.local_rank} (rank {launch.rank}) has no accelerator: {visible} are "
        f"visible on this host; start at most {visible} processes on it"
    )


@contextmanager
def defaults(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for the processes started inside; those that are set already stay."""
    new = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


def first_host(node_list: str) -> str:
    """First host of a Slurm node list: `gpu[007-009,012],login1` gives gpu007."""
    depth, end = 0, len(node_list)
    for place, letter in enumerate(node_list):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            end = place
            break
    host = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", node_list[:end]).strip()
    if not host or "[" in host or "]" in host:
        raise UserError(f"SLURM_NODELIST={node_list!r} is no list of hosts such as node[01-04]")
    return host


def _torchrun(env: Mapping[str, str]) -> Launch:
    names = (*_PLAIN, "MASTER_ADDR", "MASTER_PORT")
    _require(env, names, "set by torchrun; start the job with torchrun, srun or mpirun")
    error_file = env.get("TORCHELASTIC_ERROR_FILE", "")
    launch = Launch(
        launcher="torchrun",
        rank=_number(env, "RANK"),
        world_size=_number(env, "WORLD_SIZE"),
        local_rank=_number(env, "LOCAL_RANK"),
        local_world_size=_number(env, "LOCAL_WORLD_SIZE"),
        master_addr=env["MASTER_ADDR"],
        master_port=_port(env),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        job=env.get("TORCHELASTIC_RUN_ID", ""),
        attempt=_number(env, "TORCHELASTIC_RESTART_COUNT", 0),
        error_file=Path(error_file) if error_file else None,
    )
    return _checked(launch, _PLAIN)


def _open_mpi(env: Mapping[str, str]) -> Launch | None:
    if not any(name in env for name in _MPI):
        return None
    _require(env, _MPI, "set by Open MPI's mpirun")
    rank, size, local_rank, local_size = (_number(env, name) for name in _MPI)
    if "MASTER_ADDR" not in env and local_size < size:
        raise UserError(
            f"OMPI_COMM_WORLD_SIZE={size} spans hosts and MASTER_ADDR is not set: give the host "
            "of rank 0, e.g. mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ..."
        )
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
    port = _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS
    launch = Launch(
        launcher="mpi",
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_port(env, port),
        job=job,
    )
    return _checked(launch, _MPI)


def _slurm(env: Mapping[str, str]) -> Launch | None:
    batch_script = env.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in env
    # A batch script runs as process 0 of its job, though nobody has called srun yet.
    if "SLURM_PROCID" not in env or batch_script:
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    names = ("SLURM_PROCID", size_name, "SLURM_LOCALID", "SLURM_JOB_ID")
    _require(env, names, "set by srun")
    hosts = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    node_list = next((env[name] for name in hosts if name in env), "")
    if not node_list and "MASTER_ADDR" not in env:
        raise UserError("SLURM_NODELIST is not set though SLURM_PROCID is: both are set by srun")
    step = _number(env, "SLURM_STEP_ID", 0)
    # Two steps of one job may share their first host.
    port = _FIRST_PORT + (_number(env, "SLURM_JOB_ID") + 7919 * step) % _NUM_PORTS
    world_size = _number(env, size_name)
    launch = Launch(
        launcher="slurm",
        rank=_number(env, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(env, "SLURM_LOCALID"),
        local_world_size=_slurm_local_size(env, world_size),
        master_addr=env.get("MASTER_ADDR") or first_host(node_list),
        master_port=_port(env, port),
        job=f"{env['SLURM_JOB_ID']}.{step}",
        attempt=_number(env, "SLURM_RESTART_COUNT", 0),
    )
    return _checked(launch, ("SLURM_PROCID", size_name, "SLURM_LOCALID", "tasks of this host"))


def _slurm_local_size(env: Mapping[str, str], world_size: int) -> int:
    """Tasks of this host from a list such as `4(x2),3`, one entry a host; the world's otherwise."""
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    text = next((env[name] for name in names if name in env), "")
    counts: list[int] = []
    for size, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(size)] * int(repeat or 1)
    node = _number(env, "SLURM_NODEID", 0)
    return counts[node] if 0 <= node < len(counts) else world_size


def _check_agreement(env: Mapping[str, str], given: list[str], launch: Launch) -> None:
    """RANK and its kin, where a script sets them beside a launcher that does not, must agree."""
    values = (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size)
    for name, value in zip(_PLAIN, values, strict=True):
        if name in given and _number(env, name) != value:
            raise UserError(
                f"{name}={env[name]} contradicts {launch.launcher}, which says {value}: two "
                f"launchers disagree; unset {', '.join(given)} or use one launcher"
            )


def _require(env: Mapping[str, str], names: tuple[str, ...], source: str) -> None:
    missing = [name for name in names if not env.get(name)]
    if missing:
        present = ", ".join(f"{name}={env[name]}" for name in names if env.get(name))
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"{', '.join(missing)} {verb} not set though {present or 'others'} is: all of "
            f"{', '.join(names)} are {source}"
        )


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The variable as a number of at least 0; `default` where it is not set."""
    if default is not None and name not in env:
        return default
    text = env[name].strip()
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{name}={env[name]!r} is not a whole number of at least 0")
    return int(text)


def _port(env: Mapping[str, str], default: int = 0) -> int:
    port = _number(env, "MASTER_PORT", default)
    if not 0 < port < 65_536:
        raise UserError(f"MASTER_PORT={port} is not a port: 1 to 65535")
    return port


def _checked(launch: Launch, names: tuple[str, str, str, str]) -> Launch:
    rank, size, local_rank, local_size = names
    if launch.rank >= launch.world_size:
        raise UserError(
            f"{rank}={launch.rank} does not fit {size}={launch.world_size}: "
            f"ranks run from 0 to {launch.world_size - 1}"
        )
    if launch.local_world_size > launch.world_size:
        raise UserError(
            f"{local_size}={launch.local_world_size} is more than {size}={launch.world_size}"
        )
    if launch.local_rank >= launch.local_world_size:
        raise UserError(
            f"{local_rank}={launch.local_rank} does not fit {local_size}="
            f"{launch.local_world_size}: local ranks run from 0 to {launch.local_world_size - 1}"
        )
    return launch
