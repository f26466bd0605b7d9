"""The levels of MINIDL_DEBUG: 1 prints schedules and names the first value that is not finite, 2 adds a line per task,
3 adds the buffers of each task."""

from __future__ import annotations

import os


def level() -> int:
    """The level, 0 to 3. Raises ValueError for any other value of MINIDL_DEBUG."""
    text = os.environ.get("MINIDL_DEBUG") or "0"
    if text not in ("0", "1", "2", "3"):
        raise ValueError(f"MINIDL_DEBUG is {text[:40]!r}; it must be 0, 1, 2 or 3")
    return int(text)
