"""Nodes with several ranks each, the links in and between them, and where a job's ranks lie. Runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .cost import CostError, Link

FILLS = ("pipeline", "replicas")  #: the ranks that fill a node one after the other: of a pipeline, or of a stage
FREE = Link()


@dataclass(frozen=True)
class Topology:
    """`nodes` of `per_node` ranks. `inside`: the link between two ranks of a node. `across`: one rail; each node has
    `rails` of them to the other nodes, which its ranks share. A message takes one rail, a sum all of them. `fill`: one
    of FILLS. Raises CostError for numbers below 1 and an unknown `fill`."""

    nodes: int
    per_node: int = 1
    inside: Link = FREE
    across: Link = FREE
    rails: int = 1
    fill: str = "pipeline"

    def __post_init__(self) -> None:
        for what in ("nodes", "per_node", "rails"):
            if (value := getattr(self, what)) < 1:
                raise CostError(f"topology: {what} is {value}; it must be at least 1")
        if self.fill not in FILLS:
            raise CostError(f"topology: fill is {self.fill[:40]!r}; known: {', '.join(FILLS)}")

    def _together(self, ranks: int, replicas: int) -> int:
        """How many ranks with the same stage share a node, in `replicas` pipelines of `ranks` ranks. Raises CostError
        if nodes would cut pipelines, or the replicas of a stage, in unequal pieces."""
        run, what = (ranks, "a pipeline") if self.fill == "pipeline" else (replicas, "the replicas of a stage")
        if run % self.per_node and self.per_node % run:
            raise CostError(f"topology: nodes of {self.per_node} ranks cut {what} of {run} ranks in unequal pieces; "
                            f"one number must divide the other")
        return max(1, self.per_node // ranks) if self.fill == "pipeline" else min(self.per_node, replicas)

    def of_sums(self, ranks: int, replicas: int) -> Topology:
        """The nodes of the ranks that sum the gradients of one stage, and their share of the rails while all stages sum
        at once. Raises CostError as nodes cut."""
        together = self._together(ranks, replicas)
        return Topology(replicas // together, together, self.inside, self._shared(self.per_node // together), 1)

    def of_messages(self, ranks: int, replicas: int) -> tuple[Link, Mapping[str, Link]]:
        """The link between ranks of a pipeline on different nodes, if it has any, and those in one by pairs: "0->1".
        Messages of several replicas that leave a node at once share its rails. Raises CostError as nodes cut."""
        together = self._together(ranks, replicas)
        held = min(ranks, self.per_node // together)  # ranks of a pipeline in a node
        leaving = 1 if self.fill == "pipeline" else together
        rail = self.inside if held == ranks else self.across if leaving <= self.rails else self._shared(leaving)
        return rail, {f"{a}->{b}": self.inside for a in range(ranks)
                      for b in range(a // held * held, min(ranks, (a // held + 1) * held)) if a != b}

    def _shared(self, users: int) -> Link:
        """The share of one of so many users of all rails."""
        rate = self.across.bandwidth
        return self.across if rate is None else replace(self.across, bandwidth=rate * self.rails / users)
