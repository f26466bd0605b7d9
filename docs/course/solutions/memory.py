"""A solution of assignment 6: list scheduling under many rules, the best of them."""

from itertools import product


def listed(ranks, micro_batches, latency, most, kinds, patience):
    """(makespan, orders) of one rule: at any time the rank that is free first runs, of what is ready, the first kind of
    `kinds`; it holds at most `most[rank]` activations, and runs a W rather than wait for longer than `patience`."""
    done, free, rows, held = {}, [0.0] * ranks, [[] for _ in range(ranks)], [0] * ranks
    next_of = {(kind, rank): 0 for kind in "FOW" for rank in range(ranks)}

    def ready(kind, rank):
        """When the next task of this kind may start, or None."""
        i = next_of[kind, rank]
        if i == micro_batches or (kind == "F" and held[rank] == most[rank]):
            return None
        needs = {"F": [("F", rank - 1, i)] * (rank > 0), "W": [("O", rank, i)],
                 "O": [("F", rank, i)] + [("O", rank + 1, i)] * (rank + 1 < ranks)}[kind]
        if any(other not in done for other in needs):
            return None
        return max([free[rank], *(done[other] + latency * (other[1] != rank) for other in needs)])

    for _ in range(3 * ranks * micro_batches):
        best = None
        for rank in range(ranks):
            at = {kind: start for kind in "FOW" if (start := ready(kind, rank)) is not None}
            if not at:
                continue
            soon = min(at.values())
            late = {"F": soon + patience, "O": soon + patience, "W": soon}
            kind = next(kind for kind in kinds[rank] if kind in at and at[kind] <= late[kind])
            if best is None or at[kind] < best[0]:
                best = at[kind], rank, kind
        if best is None:
            return float("inf"), rows
        start, rank, kind = best
        i = next_of[kind, rank]
        next_of[kind, rank] += 1
        held[rank] += {"F": 1, "O": 0, "W": -1}[kind]
        done[kind, rank, i] = free[rank] = start + 1
        rows[rank].append(f"{rank}{kind}{i}")
    return max(free), rows


def makespan(rows, latency, cap):
    """Of these orders; infinite if they wait for each other, or a rank holds more than `cap` activations."""
    done, free, next_of, ranks = {}, [0.0] * len(rows), [0] * len(rows), len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while next_of[rank] < len(row):
                kind, i = row[next_of[rank]]
                needs = {"F": [("F", rank - 1, i)] * (rank > 0), "W": [("O", rank, i)],
                         "O": [("F", rank, i)] + [("O", rank + 1, i)] * (rank + 1 < ranks)}[kind]
                if any(other not in done for other in needs):
                    break
                start = max([free[rank], *(done[other] + latency * (other[1] != rank) for other in needs)])
                done[kind, rank, i] = free[rank] = start + 1
                next_of[rank] += 1
                moved = True
    if any(n < len(row) for n, row in zip(next_of, rows, strict=True)):
        return float("inf")
    for row in rows:
        held = 0
        for kind, _ in row:
            held += {"F": 1, "O": 0, "W": -1}[kind]
            if held > cap:
                return float("inf")
    return max(free)


def in_turn(micro_batches, ahead, lag):
    """`ahead` forwards, then O, the W of `lag` micro-batches before, and F in turn."""
    row = [("F", i) for i in range(min(ahead, micro_batches))]
    for i in range(micro_batches):
        row += [("O", i)] + [("W", i - lag)] * (i >= lag) + [("F", i + ahead)] * (i + ahead < micro_batches)
    return row + [("W", i) for i in range(max(0, micro_batches - lag), micro_batches)]


def plan(ranks, micro_batches, cap, latency):
    limits = product(range(max(1, cap - 2), cap + 1), repeat=ranks)
    rules = product(limits, (["OFW"] * ranks, ["OWF"] * ranks, ["FOW"] * ranks), (0, 1))
    time, best = min((listed(ranks, micro_batches, latency, *rule) for rule in rules), key=lambda found: found[0])
    for first, step, lag, more in product(range(1, 2 * ranks), (0, 1, 2), (0, 1), (0, 1, 2)):
        rows = [in_turn(micro_batches, min(cap, max(1, first - step * rank)), lag + more * rank)
                for rank in range(ranks)]
        if (found := makespan(rows, latency, cap)) < time:
            time, best = found, [[f"{rank}{kind}{i}" for kind, i in row] for rank, row in enumerate(rows)]
    return best
