"""Evaluation: the mean token loss of a set, changing nothing of training.

No mask is drawn, no gradient kept, no sample number consumed.
"""

from __future__ import annotations

import torch

from rankmesh.data.loader import eval_loader
from rankmesh.data.samples import Samples
from rankmesh.nn import IGNORED, LossOptions
from rankmesh.parallel.execute import forward
from rankmesh.train.run import Run
from rankmesh.train.step import stage_input


@torch.no_grad()
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
    total = torch.zeros(2, dtype=torch.float64, device=run.mesh.device)
    for step in range(loader.num_steps):
        for batch in loader.step(step):
            total[0] += forward(
                run.chunk, stage_input(batch, run.mesh, dropout=None), LossOptions()
            )
            total[1] += int((batch.labels != IGNORED).sum())
    if not run.speaks:
        total.zero_()
    run.mesh.seam.all_reduce(total, run.mesh.group("world"), "evaluation").wait()
    loss, valid = total.tolist()
    return float(loss / valid)
