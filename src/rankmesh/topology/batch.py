"""BatchPlan: which rows of the global batch each replica processes in each microbatch.

Owns the arithmetic of (global batch, dp, microbatch size); it knows no sample, token or loss.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankmesh.errors import PlanError


@dataclass(frozen=True)
class BatchPlan:
    """Every row of the global batch once. Its size need not divide: missing rows are padding.

    global_batch: samples a step. dp: replicas. microbatch: samples of one forward and backward.
    Microbatch j of replica r holds rows (j * dp + r) * microbatch onwards, as far as they exist, so
    padding falls at the end of the last microbatch of the last replicas. Every replica runs the
    same number of microbatches. Raises PlanError for sizes below 1.
    """

    global_batch: int
    dp: int
    microbatch: int

    def __post_init__(self) -> None:
        for name in ("global_batch", "dp", "microbatch"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise PlanError(f"{name} {value!r}: a whole number of at least 1 is needed")

    @property
    def num_microbatches(self) -> int:
        """Microbatches that every replica runs in a step."""
        return -(-self.global_batch // (self.dp * self.microbatch))

    @property
    def num_padding(self) -> int:
        """Rows of a step, over all replicas, that hold no sample."""
        return self.num_microbatches * self.dp * self.microbatch - self.global_batch

    def rows(self, replica: int, index: int) -> range:
        """Rows of the global batch in microbatch `index` of `replica`; the rest is padding."""
        if not (0 <= replica < self.dp and 0 <= index < self.num_microbatches):
            raise IndexError(
                f"microbatch {index} of replica {replica}: there are {self.num_microbatches} "
                f"of {self.dp} replicas"
            )
        start = (index * self.dp + replica) * self.microbatch
        return range(min(start, self.global_batch), min(start + self.microbatch, self.global_batch))
