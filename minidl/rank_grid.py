"""The grid of a job's ranks: replicas of one plan, each on its own ranks.

Data parallelism alone is a plan for one rank with one replica per rank; a pipeline alone is one replica.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankGrid:
    """`replicas` of a plan for `ranks` ranks. A job's ranks are numbered replica by replica: rank r of the job is rank
    `r % ranks` of replica `r // ranks`."""

    ranks: int
    replicas: int = 1

    @property
    def size(self) -> int:
        """The number of ranks of the job."""
        return self.ranks * self.replicas

    def place(self, rank: int) -> tuple[int, int]:
        """(replica, rank within the replica) of a rank of the job."""
        return divmod(rank, self.ranks)

    def group(self, rank: int) -> tuple[int, ...]:
        """The ranks of the job with the same place in every replica: they hold the same stages, and sum their
        gradients."""
        return tuple(range(rank % self.ranks, self.size, self.ranks))
