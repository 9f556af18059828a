"""What a forked test process sees: its rank, a rendezvous store, and meshes on demand.

Owns the life of one rank of one job. It knows no test.
"""

from __future__ import annotations

import importlib
import json
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rankmesh.comm.groupfactory import make_groups
from rankmesh.comm.mesh import Mesh
from rankmesh.comm.seam import Ledger, Seam, TorchTransport
from rankmesh.topology.plan import ParallelPlan

# torch's type stubs do not export the stores.
_stores: Any = dist


@dataclass
class Worker:
    """One rank of a job. `folder` is shared by the ranks and removed after the job."""

    rank: int
    world_size: int
    folder: Path
    timeout: float

    def store(self) -> Any:
        """A rendezvous store of this job."""
        return _stores.FileStore(str(self.folder / "store"), self.world_size)

    def start(self) -> None:
        """Create the world group over Gloo; a second call does nothing."""
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo",
                store=self.store(),
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=self.timeout),
            )

    def mesh(
        self,
        plan: ParallelPlan,
        *,
        kv_replicas: int = 1,
        tied_embeddings: bool = False,
        keep_events: bool = False,
    ) -> Mesh:
        """The mesh of `plan` over all ranks of the job, on the CPU."""
        self.start()
        groups = make_groups(
            plan,
            self.rank,
            timeout=timedelta(seconds=self.timeout),
            kv_replicas=kv_replicas,
            tied_embeddings=tied_embeddings,
        )
        seam = Seam(TorchTransport(), Ledger(keep_events=keep_events))
        return Mesh(plan, self.rank, torch.device("cpu"), seam, groups)


def run_worker(job: dict[str, Any], rank: int) -> int:
    """Run the job's target on this rank and write its result; returns the exit code."""
    folder = Path(job["folder"])
    torch.set_num_threads(1)
    worker = Worker(rank, job["world_size"], folder, job["timeout"])
    module, _, name = job["target"].partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(worker, **job["kwargs"])
        (folder / f"result-{rank}.json").write_text(json.dumps(result))
        if dist.is_initialized():
            dist.barrier()
    except BaseException:
        (folder / f"failed-{rank}").touch()
        traceback.print_exc()
        return 1
    return 0
