"""Results of a step that come to the host by themselves, with the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class Returned:
    """An array that a step writes to the host's memory, to `place`. Whoever starts a later step that writes there first
    makes a copy of the values, `own`. Any thread may ask for the values, by calling this."""

    __slots__ = ("__weakref__", "own", "place", "wait")

    def __init__(self, place: Any, wait: Callable[[], Any]) -> None:
        self.place, self.wait = place, wait
        self.own: Any = None

    def __call__(self) -> Any:
        """Waits for the step and returns a copy of the values."""
        if self.own is None:
            self.wait()
            found = self.place.copy()
            if self.own is None:  # else another step may have written in the meantime
                self.own = found
        return self.own.copy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self(), dtype)

    def astype(self, dtype: str, copy: bool = True) -> Any:
        """The values cast to this type."""
        return self().astype(dtype)
