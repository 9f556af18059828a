"""Messages between the stages of a pipeline: activations forward, their gradients back.

Owns which rank a message goes to, its shape and type, when it is waited for, and the check of what
arrives. It knows no model; the order of messages is the schedule's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rankmesh.comm.mesh import Mesh
from rankmesh.comm.seam import Handle, Hop
from rankmesh.errors import MeshError
from rankmesh.schedule.actions import Action, Kind

Key = tuple[Kind, int, int]

_SENDS = (Kind.SEND_F, Kind.SEND_B)
_PHASES = {
    Kind.SEND_F: "forward",
    Kind.RECV_F: "forward",
    Kind.SEND_B: "backward",
    Kind.RECV_B: "backward",
}
_NAMES = {"forward": "the activation", "backward": "the gradient"}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass
class Arrival:
    """A tensor on its way to this rank; one that never left it has no handle."""

    tensor: Tensor
    handle: Handle | None = None

    def take(self) -> Tensor:
        """The tensor, once it is here."""
        if self.handle is not None:
            self.handle.wait()
        return self.tensor


@dataclass
class Hops:
    """Sends and receives of one rank.

    ranks: pipeline rank of each stage. hidden, dtype: width and type of an activation [N, hidden].
    checked: whether each message is announced by a header that the receiver compares with what it
    expects; receives then block. So it is until the end of the first pass, and with `always` for
    ever. Of messages sent at most two a stage are kept.
    """

    mesh: Mesh
    ranks: tuple[int, ...]
    hidden: int
    dtype: torch.dtype
    always: bool = False
    checked: bool = True
    _sent: deque[Handle] = field(default_factory=deque)

    @property
    def early(self) -> bool:
        """Whether receives may start before their turn. Gloo's messages wait for one another only
        between the same two ranks; NCCL's in the order in which a rank starts them.
        """
        return not self.checked and self.mesh.device.type == "cpu"

    def commit(
        self, actions: Sequence[Action], outgoing: dict[Key, Tensor], rows: Sequence[int]
    ) -> dict[Key, Arrival]:
        """Start the communication `actions` together; returns what will arrive, by the action.

        outgoing: tensors by the sending action, taken out. rows: tokens of the residual stream held
        here, of each microbatch.
        """
        arrivals = {}
        # A checked message stands alone: its header comes first, and is read before the message.
        parts = [[action] for action in actions] if self.checked else [list(actions)]
        for part in parts:
            hops = [self._hop(action, outgoing, rows) for action in part]
            if self.checked:
                self._announce(part[0], hops[0])
            handles = self.mesh.seam.hops(hops, self.mesh.group("pp"))
            for action, hop, handle in zip(part, hops, handles, strict=True):
                if action.kind in _SENDS:
                    self._sent.append(handle)
                else:
                    key = (action.kind, action.stage, action.microbatch)
                    arrivals[key] = Arrival(hop.tensor, handle)
        self._let_go(2 * len(self.ranks))
        return arrivals

    def finish(self) -> None:
        """Wait for all that was sent: the end of a pass."""
        self._let_go(0)
        self.checked = self.always

    def _let_go(self, kept: int) -> None:
        """Wait for the oldest messages sent; a checked schedule makes sure that it ends."""
        while len(self._sent) > kept:
            self._sent.popleft().wait()

    def _hop(self, action: Action, outgoing: dict[Key, Tensor], rows: Sequence[int]) -> Hop:
        phase = _PHASES[action.kind]
        peer = self.ranks[_other(action)]
        sends = action.kind in _SENDS
        if sends:
            tensor = outgoing.pop((action.kind, action.stage, action.microbatch))
        else:
            size = (rows[action.microbatch], self.hidden)
            tensor = torch.empty(size, dtype=self.dtype, device=self.mesh.device)
        where = f"stage {action.stage}, microbatch {action.microbatch}"
        verb = f"{action.kind} ({where}) {'to' if sends else 'from'} pipeline rank {peer}"
        return Hop("send" if sends else "receive", tensor.contiguous(), peer, phase, verb)

    def _announce(self, action: Action, hop: Hop) -> None:
        """Send a header before a message, or compare the one that comes with what is expected."""
        own = self.mesh.group("pp").index
        expected = _header(own if hop.op == "send" else hop.peer, action, hop)
        header = torch.tensor(expected, dtype=torch.int64, device=self.mesh.device)
        label = f"header of {hop.label}"
        (handle,) = self.mesh.seam.hops(
            [replace(hop, tensor=header, phase="check", label=label)], self.mesh.group("pp")
        )
        if hop.op == "send":
            self._sent.append(handle)
            return
        handle.wait()
        came = tuple(header.tolist())
        if came != expected:
            raise MeshError(
                f"pipeline rank {own} at {action}: expected {_words(expected)}; came {_words(came)}"
            )


def _other(action: Action) -> int:
    """The stage at the other end."""
    forth = action.kind in (Kind.SEND_F, Kind.RECV_B)
    return action.stage + 1 if forth else action.stage - 1


def _header(sender: int, action: Action, hop: Hop) -> tuple[int, ...]:
    """(sender, sending stage, microbatch, direction, dtype, rows, width)."""
    stage = action.stage if action.kind in _SENDS else _other(action)
    forward = int(hop.phase == "forward")
    dtype = _DTYPES.index(hop.tensor.dtype)
    return (sender, stage, action.microbatch, forward, dtype, *hop.tensor.shape)


def _words(header: tuple[int, ...]) -> str:
    sender, stage, microbatch, forward, dtype, rows, width = header
    what = _NAMES["forward" if forward else "backward"]
    kind = str(_DTYPES[dtype]).removeprefix("torch.")
    return (
        f"{what} of microbatch {microbatch} by stage {stage}, [{rows}, {width}] {kind}, from "
        f"pipeline rank {sender}"
    )
