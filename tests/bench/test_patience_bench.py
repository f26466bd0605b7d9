"""The bench of the cost of a watch has its rows; no time is judged."""

from __future__ import annotations

import patience


def test_each_kind_of_lanes_has_a_row_with_its_own_error() -> None:
    rows = patience.measure(2)
    assert [row["lanes"] for row in rows] == ["native", "python"]
    for row in rows:
        assert row["step_us"] > 0
        assert all(len(row[name]) == 3 and min(row[name]) > 0 for name in ("watched", "again"))
