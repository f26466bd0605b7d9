"""A solution of assignment 2."""


def edges(tasks):
    """(before, after) of every pair that must keep its order."""
    found, writer, readers = set(), {}, {}
    for name, reads, writes in tasks:
        found |= {(writer[value], name) for value in [*reads, *writes] if value in writer}
        found |= {(reader, name) for value in writes for reader in readers.get(value, ())}
        for value in reads:
            readers.setdefault(value, []).append(name)
        for value in writes:
            writer[value], readers[value] = name, []
    return {(a, b) for a, b in found if a != b}


def valid(tasks, lanes, waits):
    names = [name for order in lanes.values() for name in order]
    if sorted(names) != sorted(name for name, _, _ in tasks):
        return False
    awaited = {name: [] for name in names}
    for task, other in waits:
        awaited[task].append(other)
    ended, next_of = {}, dict.fromkeys(lanes, 0)  # task -> all that has ended when it has
    moved = True
    while moved:
        moved = False
        for lane, order in lanes.items():
            while next_of[lane] < len(order) and all(other in ended for other in awaited[order[next_of[lane]]]):
                i = next_of[lane]
                before = [*awaited[order[i]], *([order[i - 1]] if i else [])]
                ended[order[i]] = {order[i]}.union(*(ended[other] for other in before))
                next_of[lane] += 1
                moved = True
    return len(ended) == len(names) and all(a in ended[b] for a, b in edges(tasks))
