"""The orders that the published heuristics make on a V (Qi et al., 2024): starts for the search of `v_shape`.

V-Half and V-Min repeat a building block, the slots of one micro-batch on all ranks, and squeeze the result. ZB-V is
greedy in time: weight gradients fill waits, and ranks stay equally late. Orders are the released scheduler's, but the
oldest weight gradient runs first (its V-Half and V-Min take the second chunk's). A rank has four passes: F down the V
(from rank 0 on), F up, O down, O up. A task's code on its rank is pass * m + micro-batch, weight gradients' from 4m on.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from ...core.columns import Ints, run_loop
from ...core.schedule import Schedule
from ...core.tasks import Kind
from .problem import Problem, RankOrder, schedule_of

PERIOD = 6  #: slots between two micro-batches: F, O and W of two chunks


def half_block(ranks: int) -> Ints:
    """V-Half's building block: per rank, the slots of the four passes of the first micro-batch."""
    r, gap = np.arange(ranks), 0 if ranks % 2 else 3
    return np.stack([2 * r, 3 * ranks - 2 - r, 3 * ranks - 1 + gap + 2 * r, 6 * ranks - 2 + gap - r], 1)


def min_block(ranks: int) -> Ints:
    """V-Min's building block: per rank, the slots of the four passes of the first micro-batch."""
    r, gap = np.arange(ranks), 0 if ranks % 3 else 2
    return np.stack([r, 2 * ranks - 1 - r, 2 * ranks + gap + r, 4 * ranks - 1 + gap - r], 1)


def repeated(problem: Problem, block: Ints, cap: int) -> Schedule | None:
    """The block, repeated and squeezed twice: tasks move to the first free slot after their inputs where the peak does
    not rise. First the tasks before and after the steady state move, also weight gradients; then the tasks after it,
    while weight gradients fill the slots that are left. The order does not depend on the times. None if a rank would
    hold more than `cap` live chunks."""
    p, m = problem.ranks, problem.micro_batches
    slot = np.zeros((p, 6 * m), np.int64)
    slot[:, : 4 * m] = (block[:, :, None] + PERIOD * np.arange(m)).reshape(p, 4 * m)
    grid, peak = _filled(slot)
    _move(slot, grid, peak, early=True)
    # every task as early as the order of each rank permits; a task takes one slot, a hop none
    _, after = run_loop(_start_early, slot.size, p, m, _in_order(grid, 6 * m), slot.ravel(), np.zeros(p, np.int64))
    slot[:] = after.slot.reshape(slot.shape)
    grid, peak = _filled(slot)
    grid[grid >= 4 * m] = -1
    _move(slot, grid, peak, early=False)
    grid, peak = _filled(slot)
    return None if peak > cap else _schedule(grid[grid >= 0].reshape(p, 6 * m), m)


def _filled(slot: Ints) -> tuple[Ints, int]:
    """(the code in each slot of each rank or -1, the peak) with weight gradients in the first slots that are free, the
    oldest first. Writes their slots."""
    p, m = slot.shape[0], slot.shape[1] // 6
    length = int(slot[:, : 4 * m].max()) + 1 + 2 * m
    _, after = run_loop(_fill, p * length, p, m, length, slot.ravel(), np.full(p * length, -1))
    slot[:] = after.slot.reshape(slot.shape)
    grid = after.grid.reshape(p, length)
    return grid, int((np.cumsum((grid >= 0) & (grid < 2 * m), 1) - np.cumsum(grid >= 4 * m, 1)).max())


def _fill(p, m, length, slot, grid):  # type: ignore[no-untyped-def]
    for r in range(p):
        for code in range(4 * m):
            grid[r * length + slot[r * 6 * m + code]] = code
        computed, placed = 0, 4 * m
        for t in range(r * length, r * length + length):
            if grid[t] >= 2 * m:
                computed += 1
            elif grid[t] < 0 and placed < 4 * m + computed:
                slot[r * 6 * m + placed] = t - r * length
                grid[t] = placed
                placed += 1


def _in_order(grid: Ints, each: int) -> Ints:
    """The tasks in the grid, rank * each + code, by slot, then rank."""
    rank, at = np.nonzero(grid >= 0)
    return (rank * each + grid[rank, at])[np.lexsort((rank, at))]


def _move(slot: Ints, grid: Ints, peak: int, early: bool) -> None:
    """Squeezes in place, no rank above `peak`. `early`: also before the steady state."""
    (p, each), length = slot.shape, grid.shape[1]
    _, after = run_loop(_squeeze, p * each * length, p, each // 6, length, peak, early, _in_order(grid, each),
                        slot.ravel(), grid.ravel())
    slot[:], grid[:] = after.slot.reshape(slot.shape), after.grid.reshape(grid.shape)


def _squeeze(p, m, length, peak, early, order, slot, grid):  # type: ignore[no-untyped-def]
    """The steady state is from the first O up on rank 0 to the last F down. Without `early`, weight gradients are not
    in the grid: they fill free slots."""
    phase = 0
    for task in order:
        r, code = task // (6 * m), task % (6 * m)
        lane, i, now = code // m, code % m, slot[task]
        if phase == 0 and lane == 3 and r == 0:
            phase = 1
        if phase == 1:
            if code == m - 1:
                phase = 2
            continue
        if phase == 0 and not early:
            continue
        first = 0
        if lane >= 4:
            k = code - 4 * m
            if k > 0:
                first = slot[task - 1] + 1
            for t in range(length):
                if 2 * m <= grid[r * length + t] < 4 * m:
                    if k == 0:
                        first = max(first, t + 1)
                        break
                    k -= 1
        else:
            source = r - 1 if lane % 2 == 0 else r + 1
            if 0 <= source < p:
                first = slot[source * 6 * m + code] + 1
            if lane > 0:
                first = max(first, slot[task - m] + 1)
            if i > 0:
                first = max(first, slot[task - 1] + 1)
        for t in range(first, now):
            if grid[r * length + t] >= 0:
                continue
            grid[r * length + t], grid[r * length + now] = code, -1
            live, pending, fits = 0, 0, True
            for at in range(r * length, r * length + length):
                if grid[at] >= 4 * m:
                    live -= 1
                elif grid[at] >= 2 * m:
                    pending += 1
                elif grid[at] >= 0:
                    live += 1
                    if live > peak:
                        fits = False
                        break
                elif pending > 0 and not early:
                    pending -= 1
                    live -= 1
            if fits:
                slot[task] = t
                break
            grid[r * length + t], grid[r * length + now] = -1, code


def _start_early(p, m, order, slot, free):  # type: ignore[no-untyped-def]
    for task in order:
        r, code = task // (6 * m), task % (6 * m)
        lane, first = code // m, free[r]
        if lane < 4:
            source = r - 1 if lane % 2 == 0 else r + 1
            if 0 <= source < p:
                first = max(first, slot[source * 6 * m + code] + 1)
        slot[task] = first
        free[r] = first + 1


def greedy(problem: Problem, cap: int) -> Schedule | None:
    """ZB-V's heuristic: the order with the smallest largest idle time of a rank after its first task, over forced
    weight gradients before F or not, before O or not, and repeats in which a rank may idle as long as the rank that was
    latest before. None if it finds no order with at most `cap` live chunks per rank."""
    p, m = problem.ranks, problem.micro_batches
    best, least = None, np.inf
    for before_output, before_forward in product((True, False), (True, False)):
        spare, latest = np.zeros(p), np.inf
        while True:
            complete, after = run_loop(
                _greedy, 6 * p * m, p, m, problem.forward, problem.output_grad, problem.weight_grad,
                float(problem.latency), cap, before_output, before_forward, spare, np.full(4 * p * m, -1.0),
                np.zeros(p), np.zeros(p), np.zeros(5 * p, np.int64), np.zeros(p, np.int64), np.zeros(p, np.int64),
                np.zeros(2 * p, np.int64), np.zeros(2 * p, np.int64), np.full(6 * p * m, 4 * m))
            if not complete or after.idle.max() >= latest:
                break
            latest = after.idle.max()
            spare = latest - after.idle
            if latest < least:
                best, least = after.order, latest
    return None if best is None else _schedule(best.reshape(p, 6 * m), m)


def _greedy(p, m, forward, output, weight, latency, cap, before_output, before_forward, spare, end, free, idle, count,  # type: ignore[no-untyped-def]
            live, oldest, item_rank, item_lane, order):
    """Returns whether all F and O have a place; a rank's remaining weight gradients follow. `end[lane * p * m + rank *
    m + i]`; `count[rank * 5 + lane]`; `oldest`: where a rank's order has the O of its next weight gradient."""
    phase, i, lane = 0, 0, 0
    while True:
        # the next F and O, decided together
        items = 0
        if phase == 0:  # every rank begins with an F down
            for r in range(p):
                item_rank[items], item_lane[items] = r, 0
                items += 1
            phase, i = 1, p - 1
        elif phase == 1:  # the first F up; more F down that end before it can start
            n = count[5 * i]
            wait = end[p * m + (i + 1) * m] + latency if i < p - 1 else 0.0
            if i < p - 1 and n < m and live[i] + 2 + 2 * i <= cap and free[i] + forward[i] <= wait:
                for r in range(i + 1):
                    item_rank[items], item_lane[items] = r, 0
                    items += 1
            else:
                item_rank[0], item_lane[0] = i, 1
                items, i = 1, i - 1
                if i < 0:
                    phase, i = 2, 1
        elif phase == 2:  # every rank gets as many F as the rank before, down and up in turn
            if i >= p:
                phase, i = 3, 0
            else:
                here, there = 5 * i, 5 * (i - 1)
                fewer = count[here] + count[here + 1] < count[there] + count[there + 1]
                if fewer or (count[here + 1] <= count[there + 1] and count[there + 1] < m):
                    for r in range(p - 1, i - 1, -1):
                        if count[5 * r + lane] < m:
                            item_rank[items], item_lane[items] = r, lane
                            items += 1
                    lane = 1 - lane
                else:
                    i += 1
        elif phase == 3:  # one O on every rank: up if it can run, else down
            if count[2] + count[3] == 2 * m:
                return True
            for down in range(2):
                for at in range(p):
                    r = at if down == 1 else p - 1 - at
                    n = count[5 * r + 3]
                    up = n < count[5 * r + 2] and (
                        r == p - 1 or count[5 * r + 2] >= m or end[3 * p * m + (r + 1) * m + n] >= 0)
                    if up == (down == 0):
                        item_rank[items], item_lane[items] = r, 2 + (down == 0)
                        items += 1
            phase, i = 4, 0
        elif i >= p:
            phase = 3
        else:  # one F: up if it can run, else down if that can
            n, k = count[5 * i + 1], count[5 * i]
            if n < m:
                if n < k and (i == p - 1 or end[p * m + (i + 1) * m + n] >= 0):
                    item_rank[0], item_lane[0] = i, 1
                    items = 1
                elif n >= k or (k < m and (i == 0 or end[(i - 1) * m + k] >= 0)):
                    item_rank[0], item_lane[0] = i, 0
                    items = 1
            i += 1
        # place them, after the weight gradients that should run first
        for item in range(items):
            r, to = item_rank[item], item_lane[item]
            n, first = count[5 * r + to], 6 * m * r
            source, arrival = (r - 1 if to % 2 == 0 else r + 1), -1.0
            if n >= m or (to > 0 and count[5 * r + to - 1] <= n):
                return False
            if 0 <= source < p:
                arrival = end[to * p * m + source * m + n]
                if arrival < 0:
                    return False
                arrival += latency
            largest = spare[r]
            for other in range(p):
                largest = max(largest, idle[other])
            forced, ran = False, False
            while not ran:
                at = count[5 * r] + count[5 * r + 1] + count[5 * r + 2] + count[5 * r + 3] + count[5 * r + 4]
                full, early = to < 2 and live[r] >= cap, False
                if count[5 * r + 2] + count[5 * r + 3] > count[5 * r + 4]:
                    while order[first + oldest[r]] < 2 * m or order[first + oldest[r]] >= 4 * m:
                        oldest[r] += 1
                    time = weight[2 * p - 1 - r] if order[first + oldest[r]] < 3 * m else weight[r]
                    if full or (not forced and arrival >= free[r] + time):
                        early = True
                    elif not forced and arrival >= 0 and arrival - free[r] > largest - idle[r]:
                        early = forced = to == 3 or (to == 2 and before_output) or (to < 2 and before_forward)
                elif full:
                    return False
                if early:
                    order[first + at] = 4 * m
                    oldest[r] += 1
                    free[r] += time
                    live[r] -= 1
                    count[5 * r + 4] += 1
                else:
                    stage = r if to == 0 or to == 3 else 2 * p - 1 - r
                    begin = max(free[r], arrival)
                    if count[5 * r] > 0:
                        idle[r] += begin - free[r]
                    free[r] = begin + (forward[stage] if to < 2 else output[stage])
                    end[to * p * m + r * m + n] = free[r]
                    order[first + at] = to * m + n
                    live[r] += to < 2
                    count[5 * r + to] += 1
                    ran = True


def _schedule(rows: Ints, m: int) -> Schedule:
    """The schedule of codes per rank. A rank's k-th weight gradient is the one of its k-th output gradient."""
    p, rows = len(rows), rows.copy()
    rows[rows >= 4 * m] = rows[(rows >= 2 * m) & (rows < 4 * m)] + 2 * m
    kind, r = np.repeat([Kind.F, Kind.O, Kind.W], 2), np.arange(p)
    stage = np.stack([r, 2 * p - 1 - r, 2 * p - 1 - r, r, 2 * p - 1 - r, r])
    return schedule_of([RankOrder(kind[row // m], stage[row // m, rank], row % m) for rank, row in enumerate(rows)])
