"""One rank of a run in which ranks train weights of their own and mix layers that others send."""

from __future__ import annotations

import functools
from typing import Any

from ..autograd.initial import generator_of
from ..runtime.clocks import Clock, logged, real_time
from ..runtime.gossip import Gossip
from ..runtime.version_log import VersionRead
from ..schedulers.layup import moments
from ..schedulers.ordered import taken
from .rank_trainer import RankTrainer
from .trainer import TrainingError


class GossipTrainer(RankTrainer):
    """The whole model is the ranks' mean, weighted by their shares: what is evaluated, and what is left at the end.
    Only ranks that run all batches of a step have losses. `log`: of all ranks, after `finish`. `replays`: a log of such
    a run and its name, which says the order of all events in place of a clock."""

    replays: tuple[list[VersionRead], str] | None = None

    @functools.cached_property
    def run(self) -> Any:
        told, graph, ranks = self.plan.notes, self.program.graph, self.communicator
        clock: Clock | None = real_time if told.get("clock") == "real" else None
        if self.replays is not None:
            entries, name = self.replays
            clock = logged([e for e in entries if e.rank == ranks.rank], graph, name)
        return Gossip(self.program, moments(graph, self.cost, self._machine, **taken(moments, told)),
                      functools.partial(self._peer, told.get("share", 1.0)), ranks, self.recorded.device, clock)

    def _peer(self, share: float, step: int, update: int, rank: int) -> int:
        """The rank to which an update sends its layer, or -1; drawn by (seed, step, update, rank) alone."""
        ranks, key = self.communicator.size, int(self.program.graph.keys[update])
        sends, whom = generator_of(self.job.seed, "gossip", step, key, rank).random(2)
        return (rank + 1 + int(whom * (ranks - 1))) % ranks if sends < share and ranks > 1 else -1

    def twin_of(self, rank: int) -> int:
        return rank

    def finish(self) -> None:
        super().finish()
        if self.replays is not None and self.log != self.replays[0]:
            raise TrainingError(f"{self.replays[1]} is the log of another run: it has other versions")
