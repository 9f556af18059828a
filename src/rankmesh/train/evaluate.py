"""Evaluation: the mean token loss of a set, changing nothing of training.

No mask is drawn, no gradient kept, no sample number consumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from rankmesh.data.loader import Microbatch, eval_loader
from rankmesh.data.samples import Samples
from rankmesh.nn import IGNORED, LossOptions
from rankmesh.parallel.execute import execute
from rankmesh.train.run import Run
from rankmesh.train.step import stage_input


def evaluate(run: Run, samples: Samples) -> float:
    """Mean cross entropy (nats a token) over the first `train.eval_steps` global batches of
    `samples`.

    Always the same samples, in file order. Collectives: those of the forward passes, and one all-
    reduce over the world of 2 fp64 values.
    """
    config = run.config.train
    place = run.mesh.coordinate
    limit = config.eval_steps * config.global_batch_size
    loader = eval_loader(samples, run.batch, place.dp, limit)
    loss, valid = loss_of(run, (loader.step(step) for step in range(loader.num_steps)))
    return loss / valid


def loss_of(run: Run, steps: Iterable[Sequence[Microbatch]]) -> tuple[float, int]:
    """(sum of token losses, valid targets) of all replicas' microbatches, equal on all ranks.

    Every replica has the same numbers of microbatches. Collectives: those of the forward passes,
    and one all-reduce over the world of 2 fp64 values.
    """
    total = torch.zeros(2, dtype=torch.float64, device=run.mesh.device)
    for batches in steps:
        inputs = [stage_input(batch, run.mesh, dropout=None) for batch in batches]
        actions = run.forward_actions(len(inputs))
        total[:1] += execute(actions, run.parallel, run.hops, inputs, LossOptions())
        total[1] += sum(int((batch.labels != IGNORED).sum()) for batch in batches)
    if not run.speaks:
        total.zero_()
    run.mesh.seam.all_reduce(total, run.mesh.group("world"), "evaluation").wait()
    loss, valid = total.tolist()
    return loss, int(valid)
