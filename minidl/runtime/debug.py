"""What MINIDL_DEBUG asks for: 1 prints schedules and names the first value that is not finite, 2 adds a line per task,
3 its buffers."""

from __future__ import annotations

import os


def level() -> int:
    """0 to 3. Raises ValueError for anything else."""
    text = os.environ.get("MINIDL_DEBUG") or "0"
    if text not in ("0", "1", "2", "3"):
        raise ValueError(f"MINIDL_DEBUG is {text[:40]!r}; it must be 0, 1, 2 or 3")
    return int(text)
