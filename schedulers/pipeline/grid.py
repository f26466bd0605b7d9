"""A plan over time as text: ranks as rows, every task as wide as it is long, gaps visible."""

from __future__ import annotations

import numpy as np

from ...core.report import readable_unit
from ...core.tasks import Kind, task_name, unpack
from ...core.timeline import Timeline
from ...plans.plan import PipelinePlan

BLOCKS = 12  #: the most blocks into which a grid is wrapped; a longer one is compressed in time
SMALL = 0.05  #: the share of all work that may be in tasks too short for their names


def grid(plan: PipelinePlan, timeline: Timeline, width: int = 110) -> str:
    """Rank x time, wrapped at `width` columns under a ruler of times in a readable unit; `·` is idle time.

    A task shows its name, and in a stale plan the weight version that it reads: `2F3v1`; a pair shows both names:
    `2F3&5B1`. No name is cut: a line ends before a name that would cross its end, and a task that is too short for its
    name shows its kind. Tasks that are much shorter than the others, such as a network's updates, may not appear.
    Messages that take no time never do.
    """
    timeline = timeline.in_unit(readable_unit(timeline)).without_free_messages()
    records = timeline.tasks
    if not len(records):
        return ""
    version = ({} if plan.versions is None
               else dict(zip(plan.schedule.keys.tolist(), plan.versions.read.tolist(), strict=True)))
    names = {key: task_name(key) + (f"v{version[key]}" if key in version else "")
             for key in timeline.key[records].tolist()}
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
    rows, whole = [["·"] * total for _ in timeline.lanes], [True] * (total + 1)
    heads, _, sizes = timeline.actions
    for head, size in zip(heads.tolist(), sizes.tolist(), strict=True):
        record, keys = records[head], timeline.key[records[head : head + size]].tolist()
        low, high = round((begin[head] - first) * scale), round((end[head] - first) * scale)
        room = max(0, high - low - 1)
        full, short = (names[key] for key in keys), (Kind(unpack(key).kind).name for key in keys)
        text = next((shown for shown in map("&".join, (full, short)) if len(shown) <= room), "")
        whole[low + 1 : low + len(text)] = [False] * max(0, len(text) - 1)
        rows[int(timeline.lane[record])][low:high] = (text.ljust(high - low)) if high - low > len(text) else text
    blocks, stop = [], 0
    while stop < total:
        start, stop, ruler = stop, min(stop + columns, total), ""
        stop = next((end for end in range(stop, start, -1) if whole[end]), stop)
        for column in range(start, stop, 20):
            ruler = ruler.ljust(column - start) + f"{first + column / scale:.4g}"
        lines = [(timeline.unit or "time").ljust(title) + ruler[: stop - start]]
        lines += [str(lane).ljust(title) + "".join(row[start:stop]).rstrip()
                  for lane, row in zip(timeline.lanes, rows, strict=True)]
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(blocks)
