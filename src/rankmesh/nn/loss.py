"""Cross entropy of one device, summed over valid labels.

Owns the definition of the token loss; dividing by the number of valid targets of the global batch
is the step's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rankmesh.nn.softcap import soft_cap

IGNORED = -100


@dataclass(frozen=True)
class LossOptions:
    """Weights of the terms beside cross entropy: `z_loss` * log(Z)^2 (PaLM, arXiv:2204.02311,
    section 5) and label smoothing (Szegedy et al. 2015, arXiv:1512.00567, section 7).

    softcap: of the logits, before anything else; 0 = none. It is the model's, which fills it in.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    softcap: float = 0.0


def plain_loss(logits: Tensor, labels: Tensor, options: LossOptions) -> Tensor:
    """Sum over labels that are not IGNORED; logits [N, V], labels [N]; in fp32 or wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if options.softcap:
        logits = soft_cap(logits, options.softcap)
    loss = F.cross_entropy(
        logits,
        labels,
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=options.label_smoothing,
    )
    if options.z_loss:
        log_z = torch.logsumexp(logits, dim=-1)
        loss = loss + options.z_loss * (log_z.square() * (labels != IGNORED)).sum()
    return loss
