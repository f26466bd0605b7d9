"""How long an all-reduce over many ranks takes, from latency, bandwidth and algorithm. Runs nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .cost import CostError, Link

SHAPES = ("ring", "tree", "parameter_server")


@dataclass(frozen=True)
class Collective:
    """An all-reduce over `ranks`, each with one full-duplex link to the network.

    - `ring`: reduce-scatter and all-gather, 2(n-1) messages of 1/n of the bytes each;
    - `tree`: up and down a binary tree, 2 ceil(log2 n) messages of all bytes;
    - `parameter_server`: the ranks and k further `servers` sum, each its best share as in BytePS:
      2n(n-1)M / ((n^2 + kn - 2k) b). Without servers the volume is a ring's, in two messages.
    """

    ranks: int
    link: Link
    shape: str = "ring"
    servers: int = 0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise CostError(f"unknown shape {self.shape!r} of an all-reduce; known: {', '.join(SHAPES)}")
        if self.ranks < 1 or self.servers < 0 or (self.servers and self.shape != "parameter_server"):
            raise CostError(f"a {self.shape} cannot have {self.ranks} ranks and {self.servers} servers; it needs at "
                            f"least 1 rank, and only a parameter_server has servers")
        if self.servers > self.ranks:
            raise CostError(f"{self.servers} servers for {self.ranks} ranks; at most one per rank helps")

    def time(self, nbytes: float) -> float:
        """How long one all-reduce of `nbytes` takes, in the link's time unit; 0 with one rank."""
        n = self.ranks
        if n == 1:
            return 0.0
        rate = 1 / self.link.bandwidth if self.link.bandwidth else 0.0
        if self.shape == "ring":
            return 2 * (n - 1) * (self.link.latency + nbytes / n * rate)
        if self.shape == "tree":
            return 2 * math.ceil(math.log2(n)) * (self.link.latency + nbytes * rate)
        k = self.servers
        return 2 * self.link.latency + 2 * n * (n - 1) * nbytes * rate / (n * n + k * n - 2 * k)

    @property
    def line(self) -> tuple[float, float]:
        """Its time as (per all-reduce, per byte)."""
        each = self.time(0)
        return each, self.time(1) - each
