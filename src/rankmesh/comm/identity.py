"""Who a rank is: host, device, process, and the hashes of what all ranks must agree on.

Owns the identity that each rank hands to preflight A. It must not know process groups, and leaves
the store to `exchange` and files to `obs`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from rankmesh.comm.environ import Launch
from rankmesh.obs.rundir import RankRecord
from rankmesh.topology.plan import ParallelPlan
from rankmesh.topology.ranks import coordinate

__all__ = [
    "Identity",
    "code_digest",
    "device_identity",
    "digest",
    "identify",
    "rank_lines",
    "rank_records",
]

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One rank. device: as torch names it. device_id: of the physical accelerator, "" for a CPU.

    agree: name -> value of what must be equal on all ranks (versions, hashes).
    """

    rank: int
    local_rank: int
    host: str
    device: str
    device_id: str
    pid: int
    agree: Mapping[str, str] = field(default_factory=dict)


def identify(
    launch: Launch, device: torch.device, agree: Mapping[str, str], host: str = ""
) -> Identity:
    """This process. `agree` is added to the versions of Python and torch and the hash of our code.

    The host name is the system's unless one is given.
    """
    own = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "code": code_digest(),
    }
    return Identity(
        rank=launch.rank,
        local_rank=launch.local_rank,
        host=host or socket.gethostname(),
        device=str(device),
        device_id=device_identity(device),
        pid=os.getpid(),
        agree={**own, **agree},
    )


def device_identity(device: torch.device) -> str:
    """What tells one physical accelerator from all others; "" for a CPU, which may be shared."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {getattr(properties, 'uuid', device.index)}"


def digest(value: Any) -> str:
    """Short hash of anything that JSON can carry; equal values give equal hashes everywhere."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def code_digest(package: Path = _PACKAGE) -> str:
    """Short hash of the Python files of a package: their relative names and bytes."""
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        data = path.read_bytes()
        total.update(f"{path.relative_to(package).as_posix()} {len(data)}\n".encode())
        total.update(data)
    return total.hexdigest()[:12]


def rank_lines(plan: ParallelPlan, ranks: Sequence[Identity]) -> list[str]:
    """The rank map for the log, one line a rank: where it runs and where it stands."""
    lines = []
    for one in ranks:
        place = coordinate(plan, one.rank)
        where = " ".join(f"{axis} {getattr(place, axis)}" for axis in plan.order)
        lines.append(f"rank {one.rank}: {one.host} {one.device} pid {one.pid}: {where}")
    return lines


def rank_records(plan: ParallelPlan, ranks: Sequence[Identity]) -> list[RankRecord]:
    """Every rank as `ranks.json` holds it: who it is and where it stands."""
    return [
        RankRecord(
            rank=one.rank,
            host=one.host,
            device=f"{one.device} {one.device_id}".strip(),
            pid=one.pid,
            coordinate=asdict(coordinate(plan, one.rank)),
        )
        for one in ranks
    ]
