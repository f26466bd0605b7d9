"""How much of a machine other processes use while a run goes on. It knows no run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from socket import gethostname

from ..runtime.comm import Communicator

STAT = Path("/proc/stat")  #: of Linux; elsewhere nothing is known


class Bystanders:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._begin = _now()

    def cores(self, communicator: Communicator | None = None) -> float:
        """The mean number of cores that other processes, and other guests of the machine, have used; 0 if the system
        does not say. All ranks call it together; ranks on this machine do not count as others."""
        busy, own, moment = (now - then for now, then in zip(_now(), self._begin, strict=True))
        if communicator is not None and communicator.own_process:
            own = sum(used for host, used in communicator.gather((gethostname(), own)) if host == gethostname())
        return max(0.0, busy - own) / moment if busy > 0 and moment > 0 else 0.0


def _now() -> tuple[float, float, float]:
    """Seconds for which all cores have worked since the machine started, and for which this process has; the clock."""
    try:
        user, nice, system, _, _, interrupt, soft, stolen = map(int, STAT.read_text().split()[1:9])
        busy = (user + nice + system + interrupt + soft + stolen) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        busy = 0.0
    return busy, time.process_time(), time.monotonic()
