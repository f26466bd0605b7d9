"""One rank of a run in which ranks train weights of their own and mix layers that others send."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .. import schedulers
from ..runtime.gossip import Gossip, peers
from ..runtime.version_log import VersionRead
from ..schedulers.layup import moments
from .rank_trainer import RankTrainer


class GossipTrainer(RankTrainer):
    """The whole model is the ranks' mean, weighted by their shares: what is evaluated, and what is left at the end.
    Only ranks that run all batches of a step have losses. `log`: of all ranks, after `finish`."""

    log: list[VersionRead]

    @functools.cached_property
    def run(self) -> Any:
        known = schedulers.find(self.job.scheduler, "data").known(**self.job.scheduler_args)
        share = known.pop("share", 1.0)
        clock = moments(self.program.graph, self.cost, self._machine, **known)
        peer = peers(self.program.graph, self.communicator.size, self.job.seed, share)
        return Gossip(self.program, clock, peer, self.communicator, self.recorded.device)

    def finish(self) -> None:
        """Ends the run. Every rank then has the losses and the whole model."""
        self.share()
        _ = self.others
        shares = self.communicator.gather((self.losses, self.run.log))
        self.losses = np.mean([losses for losses, _ in shares if losses], axis=0).tolist()
        self.log = [entry for _, entries in shares for entry in entries]
