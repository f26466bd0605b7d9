"""What tests of data share."""

from __future__ import annotations

import pytest

from minidl.data import DataError


def refused(*culprits: str, act) -> str:
    """The one line that `act` is refused with; it must mention all culprits."""
    with pytest.raises(DataError) as caught:
        act()
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 600
    for culprit in culprits:
        assert culprit in line
    return line


def same(a, b) -> bool:
    return all(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
               for x, y in zip(a, b, strict=True))
