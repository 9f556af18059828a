"""Do ranks that ought to hold the same hold the same? Parameters and optimizer state, by hashes.

Owns which tensors are compared, and when in a run. The comparison inside a group is comm's.
"""

from __future__ import annotations

from collections.abc import Callable

from rankmesh.comm.exchange import Store
from rankmesh.comm.preflight import host_of, raise_fatal
from rankmesh.comm.seam import Seam, TorchTransport
from rankmesh.comm.shards import ShardDigest, check_model, check_shards, fingerprint
from rankmesh.errors import MeshError
from rankmesh.topology.params import Shard
from rankmesh.train.run import Run


def parameter_digests(run: Run, *, random: bool) -> dict[str, ShardDigest]:
    """Of every parameter here. random: whether other slices ought to have other values."""
    axis_ranks, digests = run.mesh.axis_ranks(), {}
    for name, entry in run.buffers.entries.items():
        split = any(isinstance(place, Shard) for place in entry.spec.placements.values())
        digests[name] = ShardDigest(
            slice_key=repr(entry.spec.slices(axis_ranks)),
            value=fingerprint(run.buffers.param(name)),
            random=random and split and entry.spec.init.std > 0,
        )
    return digests


def state_digests(run: Run) -> dict[str, ShardDigest]:
    """Of the optimizer state here, and of what the optimizer updates."""
    axis_ranks = run.mesh.axis_ranks()
    state = {f"{name}.main": tensor for name, tensor in run.buffers.main.items()}
    state |= run.optimizer.state()
    places = {
        one.name: repr((one.entry.spec.slices(axis_ranks), one.offset, len(one)))
        for one in run.buffers.pieces.values()
    }
    return {
        name: ShardDigest(places[name.rpartition(".")[0]], fingerprint(tensor), random=False)
        for name, tensor in state.items()
    }


def replica_check(run: Run, store: Store) -> Callable[[int], None]:
    """The check after a step: every rank calls it with the step's number.

    Parameters are compared over tp, dp * cp and both stages of a tied table, the state over the
    ranks that own the same elements. Collectives: those of `comm.shards`, outside the ledger.
    Raises MeshError that names step, tensor, ranks and hosts.
    """

    def check(step: int) -> None:
        seam, copies = Seam(TorchTransport()), run.buffers.copies
        try:
            check_model(run.mesh, parameter_digests(run, random=False), store, run.buffers.tied)
            state = state_digests(run)
            raise_fatal(check_shards(copies, state, seam, run.mesh.device, host_of(store)))
        except MeshError as error:
            raise MeshError(f"step {step}: {error}") from None

    return check
