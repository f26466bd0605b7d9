"""Stamps of a native lane: it reads the core's tick counter if the system's clock also uses it (at a quarter of the
clock's cost), else the clock."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from . import code
from .calls import Call
from .machines import MACHINES

SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")  #: of the system's clock


class Stamps:
    """The moments of one lane. Neighbouring moments may have one stamp, and each stamp is one word."""

    def __init__(self, moments: int) -> None:
        self.words = np.zeros(moments, np.int64)  # the first of them are used
        self.stamp = np.zeros(moments, np.int64)  # of each moment
        self._used = self._moments = 0
        self._function = code.ticks_call if counts_ticks() else code.clock_call

    def upto(self, moment: int) -> list[Call]:
        """The call for all moments from the last one up to this; none if they have a stamp, or if none is traced."""
        if moment <= self._moments or not len(self.words):
            return []
        self.stamp[self._moments : moment] = self._used
        self._moments, self._used = moment, self._used + 1
        return [Call(self._function.address, self.words.ctypes.data + 8 * (self._used - 1))]

    def passed(self) -> int:
        """How many moments of the present run have passed: each stamp is later than the one before it, until the first
        that an earlier run has left. All of them if the run has ended, or if its first moment has not come. Another
        thread may write meanwhile."""
        words = self.words[: self._used]
        earlier = np.flatnonzero(words[1:] < words[:-1])
        return int(np.searchsorted(self.stamp, int(earlier[0]) + 1 if len(earlier) else self._used))


class StampClock:
    """Turns stamps of all lanes of a run into seconds of the host's clock, all by the same two looks at both clocks: so
    the lanes' moments keep their order even if a look was disturbed."""

    def __init__(self) -> None:
        self._ticks = counts_ticks()
        self._begin = np.zeros(2, np.int64)  # ticks and clock

    def begin(self) -> None:
        """Call it when a run begins."""
        code.both(self._begin.ctypes.data)

    def seconds(self, lanes: Iterable[Stamps]) -> list[Any]:
        """Each moment of the last run, for each lane. A tick's length is the mean since `begin`."""
        if not self._ticks:
            return [lane.words[lane.stamp] / 1e9 for lane in lanes]
        now = np.zeros(2, np.int64)
        code.both(now.ctypes.data)
        tick, nanoseconds = (now - self._begin).tolist()
        length = nanoseconds / tick if tick else 0.0
        return [(self._begin[1] + (lane.words[lane.stamp] - self._begin[0]) * length) / 1e9 for lane in lanes]


@cache
def counts_ticks() -> bool:
    """Whether stamps are ticks."""
    try:
        return SOURCE.read_text().strip() == MACHINES[platform.machine()].source
    except OSError:
        return False
