"""How long an all-reduce over many ranks takes, from latency, bandwidth and algorithm. Runs nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .cost import CostError, Link
from .topology import Topology

SHAPES = ("ring", "tree", "halving", "hierarchical", "parameter_server")


@dataclass(frozen=True)
class Collective:
    """An all-reduce over `ranks`, each with one full-duplex link to the network, or over nodes of a `topology`.

    - `ring`: reduce-scatter and all-gather, 2(n-1) messages of 1/n of the bytes each (Patarasuk, Yuan, 2009). A ring
      enters and leaves each node once, and a step takes as long as its slowest link;
    - `tree`: up and down a binary tree, 2 ceil(log2 n) messages of all bytes, in nodes and then between them;
    - `halving`: recursive halving and doubling, 2 ceil(log2 n) messages of 1/2, 1/4, .. of the bytes, the large ones in
      nodes (Rabenseifner, 2004; Thakur and others, 2005). Messages that an n between powers of two adds are left out;
    - `hierarchical`: a ring's reduce-scatter in each node, then rings between the nodes, one for each share, then a
      ring's all-gather in each node (Cho and others, 2019);
    - `parameter_server`: the ranks and k further `servers` sum, each its best share as in BytePS:
      2n(n-1)M / ((n^2 + kn - 2k) b). Without servers the volume is a ring's, in two messages.
    """

    ranks: int
    link: Link
    shape: str = "ring"
    servers: int = 0
    topology: Topology | None = None

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise CostError(f"unknown shape {self.shape!r} of an all-reduce; known: {', '.join(SHAPES)}")
        if self.ranks < 1 or self.servers < 0 or (self.servers and self.shape != "parameter_server"):
            raise CostError(f"a {self.shape} cannot have {self.ranks} ranks and {self.servers} servers; it needs at "
                            f"least 1 rank, and only a parameter_server has servers")
        if self.servers > self.ranks:
            raise CostError(f"{self.servers} servers for {self.ranks} ranks; at most one per rank helps")
        if self.topology is not None and self.shape == "parameter_server":
            raise CostError("a parameter_server has a link to each rank, not a topology; take another collective")

    def time(self, nbytes: float) -> float:
        """How long one all-reduce of `nbytes` takes, in the link's time unit; 0 with one rank."""
        n = self.ranks
        if n == 1:
            return 0.0
        if self.shape == "parameter_server":
            k, rate = self.servers, self.link.per_byte
            return 2 * self.link.latency + 2 * n * (n - 1) * nbytes * rate / (n * n + k * n - 2 * k)
        over = self.topology or Topology(n, across=self.link)
        # of nodes, and of the ranks in each: their number, latency, time of a byte
        levels = [(count, link.latency, link.per_byte) for count, link in ((over.per_node, over.inside),
                                                                           (over.nodes, over.across)) if count > 1]
        if self.shape == "ring":
            return 2 * (n - 1) * (max(latency for _, latency, _ in levels)
                                  + nbytes / n * max(rate for *_, rate in levels))
        if self.shape == "tree":
            return 2 * sum(math.ceil(math.log2(count)) * (latency + nbytes * rate) for count, latency, rate in levels)
        return 2 * sum((count - 1) * (latency + nbytes / count * rate) if self.shape == "hierarchical"
                       else math.ceil(math.log2(count)) * latency + nbytes * (count - 1) / count * rate
                       for count, latency, rate in levels)

    @property
    def line(self) -> tuple[float, float]:
        """Its time as (per all-reduce, per byte)."""
        each = self.time(0)
        return each, self.time(1) - each
