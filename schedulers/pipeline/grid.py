"""A plan over time as text: ranks as rows, every task as wide as it is long, gaps visible."""

from __future__ import annotations

import numpy as np

from ...plans import Plan
from ...tasks import task_name
from ...views.report import readable_unit
from ...views.timeline import Timeline

BLOCKS = 12  #: the most blocks into which a grid is wrapped; a longer one is compressed in time
SMALL = 0.05  #: the share of all work that may be in tasks too short for their names


def grid(plan: Plan, timeline: Timeline, width: int = 110) -> str:
    """Rank x time, wrapped at `width` columns under a ruler of times in a readable unit; `·` is idle time.

    A task shows its name, and in a stale plan the weight version that it reads: `2F3v1`. Names are shortened where time
    is compressed; tasks that are much shorter than the others, such as a network's updates, may not appear. Messages
    that take no time never do.
    """
    timeline = timeline.in_unit(readable_unit(timeline)).without_free_messages()
    records = timeline.tasks
    if not len(records):
        return ""
    version = ({} if plan.versions is None
               else dict(zip(plan.schedule.keys.tolist(), plan.versions.read.tolist(), strict=True)))
    names = {}
    for key in timeline.key[records].tolist():
        names[key] = task_name(key) + (f"v{version[key]}" if key in version else "")
    begin, end = timeline.start[records], timeline.end[records]
    first, length = float(begin.min()), end - begin
    title = max(len(str(lane)) for lane in timeline.lanes) + 2
    columns = max(20, width - title)
    ascending = np.sort(length[length > 0])
    told = np.flatnonzero(np.cumsum(ascending) > SMALL * ascending.sum())
    makespan = timeline.makespan
    scale = (max(map(len, names.values())) + 1) / float(ascending[told[0]]) if told.size else 1.0
    scale = min(scale, columns * BLOCKS / makespan) if makespan else scale
    total = round(makespan * scale)
    rows = [["·"] * total for _ in timeline.lanes]
    for record, a, b in zip(records.tolist(), begin.tolist(), end.tolist(), strict=True):
        low, high = round((a - first) * scale), round((b - first) * scale)
        name = names[int(timeline.key[record])]
        room = max(0, high - low - 1)
        text = name if len(name) <= room else name.lstrip("0123456789")[:room]
        rows[int(timeline.lane[record])][low:high] = (text.ljust(high - low)) if high - low > len(text) else text
    blocks = []
    for start in range(0, total, columns):
        stop = min(start + columns, total)
        ruler = ""
        for column in range(start, stop, 20):
            ruler = ruler.ljust(column - start) + f"{first + column / scale:.4g}"
        lines = [(timeline.unit or "time").ljust(title) + ruler[: stop - start]]
        lines += [str(lane).ljust(title) + "".join(row[start:stop]).rstrip()
                  for lane, row in zip(timeline.lanes, rows, strict=True)]
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(blocks)
