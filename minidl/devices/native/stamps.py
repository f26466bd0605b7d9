"""Stamps of a native lane: it reads the core's tick counter if the system's clock also uses it (at a quarter of the
clock's cost), else the clock."""

from __future__ import annotations

import platform
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
        self._words = np.zeros(moments, np.int64)  # the first of them are used
        self._stamp = np.zeros(moments, np.int64)  # of each moment
        self._used = self._moments = 0
        self._begin = np.zeros(2, np.int64)  # ticks and clock when the lane began
        self._ticks = counts_ticks()

    def begin(self) -> list[Call]:
        """The calls with which a lane begins."""
        return [Call(code.both_call.address, self._begin.ctypes.data)] if self._ticks else []

    def upto(self, moment: int) -> list[Call]:
        """The call for all moments from the last one up to this; none if they have a stamp."""
        if moment <= self._moments:
            return []
        self._stamp[self._moments : moment] = self._used
        self._moments, self._used = moment, self._used + 1
        function = code.ticks_call if self._ticks else code.clock_call
        return [Call(function.address, self._words.ctypes.data + 8 * (self._used - 1))]

    def seconds(self) -> Any:
        """Each moment of the last run, in seconds of the host's clock. The length of a tick is that between the begin
        of the lane and now."""
        if not self._ticks:
            return self._words[self._stamp] / 1e9
        now = np.zeros(2, np.int64)
        code.both(now.ctypes.data)
        tick, nanoseconds = (now - self._begin).tolist()
        length = nanoseconds / tick if tick else 0.0
        return (self._begin[1] + (self._words[self._stamp] - self._begin[0]) * length) / 1e9


@cache
def counts_ticks() -> bool:
    """Whether stamps are ticks."""
    try:
        return SOURCE.read_text().strip() == MACHINES[platform.machine()].source
    except OSError:
        return False
