"""Highway-BP: the backward pass of a residual network in sweeps over all blocks at once.

Fagnou, Caillon, Delattre, Allauzen, "Accelerated training through iterative gradient propagation along the residual
path" (ICLR 2025, 2501.17086). A layer's Jacobian is a block's plus its skip's, which is cheap. Gradients that take only
skips are there at once. A sweep sends the gradient w of each block's output through that block, of all blocks at once,
and adds the results along the skips from the top (a scan, one task). After k sweeps w has all paths through at most k
blocks; with L blocks, L sweeps are exact, with sums in the same order, so bit for bit. Weight gradients read the last.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..core.graph import Launch, moved_views
from ..core.placement import Refused
from ..core.tasks import Kind, unpack
from .draft import NONE, Copies, Draft, Edit
from .flow import Again, Flow, between


@dataclass(frozen=True)
class Block:
    """The backward tasks of a residual block. `top`, `bottom`: storages of the gradients of its output and its input;
    `tasks`: between them, whose last one ends with their sum; `skip`: the tasks from the bottom of the block above to
    this top."""

    top: int
    bottom: int
    tasks: Sequence[int]
    skip: Sequence[int] = ()


def highway(draft: Draft, sweeps: int | None = None) -> tuple[Draft, str]:
    """The step with this many sweeps over each row of residual blocks (default: as many as there are blocks), and a
    remark if its gradients are inexact. Raises Refused for a network without at least two such blocks in a row."""
    again, needed, along = Again(draft.edit()), 0, NONE
    for flow in Flow.all_of(draft.graph):
        order = [t for atom in flow.atoms for t in atom]
        for row in _rows(again.edit, flow):
            needed, own, at = max(needed, len(row)), _tasks(row), order.index(min(_tasks(row)))
            made, along = _swept(again, row, len(row) if sweeps is None else min(sweeps, len(row)), along)
            order = [*order[:at], *made, *(t for t in order[at:] if t not in own)]
        again.replace(flow, order)
    if not needed:
        raise Refused("highway", "this network has no two residual blocks in a row, with skips that only add",
                      "take jacobi, or a network such as gpt")
    return again.draft, "" if sweeps is None or sweeps >= needed else (
        f"gradients are inexact: {sweeps} of the {needed} sweeps of highway after which they are exact")


def _rows(e: Edit, flow: Flow) -> list[list[Block]]:
    """Residual blocks one below the other, at least two in a row, from the top. A skip between two of them has at most
    half of the flops of a block."""
    makers, readers = defaultdict[int, list[int]](list), defaultdict[int, set[int]](set)
    for t in range(len(e.old.graph)):
        for b in e.reads[t]:
            readers[e.storage_of[b]].add(t)
        for b in e.writes[t] if t in flow.needs else ():
            makers[e.storage_of[b]].append(t)
    rows, parts = list[list[Block]](), Counter(e.storage_of)
    for t in sorted(flow.needs):
        add = e.launches[t][-1]
        bottom, own = add.writes[0].storage, e.places(e.writes[t])
        for top in (v.storage for v in add.reads if add.kernel == "add" and v.storage in flow.needs[t] - own
                    and replace(v, storage=bottom) == add.writes[0] and parts[v.storage] == parts[bottom] == 1):
            tasks = between(e, flow, makers, [t], top) or []
            used = {v.storage for u in tasks for call in e.launches[u] if call is not add for v in call.reads}
            if top in used and tasks[-1] == t and not any(readers[s] - {t} for s in own - {bottom}):
                for row in rows:
                    above = row[-1].bottom
                    skip = between(e, flow, makers, makers[top] if top != above else (), above)
                    if skip is not None and 2 * sum(e.flops[u] for u in skip) <= sum(e.flops[u] for u in tasks):
                        row.append(Block(top, bottom, tasks, skip))
                        break
                else:
                    rows.append([Block(top, bottom, tasks)])
    chosen = list[list[Block]]()  # a block within a block has no sweeps of its own
    for row in sorted(rows, key=len, reverse=True):
        if len(row) > 1 and not any(_tasks(row) & _tasks(other) for other in chosen):
            chosen.append(row)
    return sorted(chosen, key=lambda row: min(_tasks(row)))


def _tasks(row: Sequence[Block]) -> set[int]:
    return {t for block in row for t in (*block.skip, *block.tasks)}


def _swept(again: Again, row: Sequence[Block], sweeps: int, along: Copies) -> tuple[list[int], Copies]:
    """The tasks of a row of blocks, in their order; and `along`, the copies that all others read, with its own."""
    e, order = again.edit, list[int]()
    values = dict[tuple[int, int], Copies]()  # what a block makes of a sweep's gradients
    base = along
    for k in range(sweeps + 1):
        now = {i: values[i, min(k, i + 1) - 1] for i in range(len(row)) if k}
        along, made = _scan(again, row, k, sweeps, base, now)
        order += made
        for i, block in enumerate(row):
            *inner, last = block.tasks
            if k > i:
                continue
            final = k == min(sweeps, i)
            values[i, k] = again.memory([last] if final else block.tasks, f"sweep {k + 1}")
            for t in inner:
                order.append(t if final else again.task(t, f"sweep {k + 1}", along | values[i, k]))
                if final:
                    e.use(along, t)
            if k < sweeps and len(e.launches[last]) > 1:
                order.append(again.task(last, f"sweep {k + 1}", along | values[i, k], e.launches[last][:-1]))
    e.use(along, *set(range(len(e.old.graph))) - _tasks(row))
    return order, along


def _scan(again: Again, row: Sequence[Block], k: int, sweeps: int, found: Copies, values: Mapping[int, Copies]
          ) -> tuple[Copies, list[int]]:
    """The gradients of all blocks after sweep k, as copies of the recorded ones, and the task that makes them along the
    skips, if there is one. `values`: what each block has made in this sweep; none in sweep 0."""
    e = again.edit
    reads, writes, launches = set[int](), set[int](), list[Launch]()
    for i, block in enumerate(row):
        for t in block.skip:
            if k < sweeps:
                found |= again.memory([t], f"sweep {k}")
            reads |= found.of(e.reads[t])
            writes |= found.of(e.writes[t])
            launches += [launch.moved(found.storages) for launch in e.launches[t]]
        last = block.tasks[-1]
        bottom = {b for b in e.writes[last] if e.storage_of[b] == block.bottom}
        top = next(b for b in e.old.graph.reads[last].tolist() if e.storage_of[b] == block.top)
        if not k:  # the skip alone
            above = {block.bottom: found.storages.get(block.top, block.top)}
            found |= Copies(dict.fromkeys(bottom, found.buffers.get(top, top)), above)
            continue
        if k < sweeps:
            found |= e.copies(bottom, f"sweep {k}")
        add, here = e.launches[last][-1], values[i]
        added = {v.storage for v in add.reads}
        reads |= (found | here).of(b for b in e.reads[last] | e.writes[last] if e.storage_of[b] in added)
        writes |= found.of(bottom)
        launches.append(replace(add, reads=moved_views(add.reads, (found | here).storages),
                                writes=moved_views(add.writes, found.storages)))
    if not launches:
        return found, []
    first = row[0].tasks[-1]
    return found, [e.task(-1, e.unit(f"scan along skips, sweep {k}"), Kind.O, unpack(e.keys[first]).micro_batch,
                          stage=e.stage[first], reads=reads - writes, writes=writes, launches=launches,
                          nbytes=sum(e.specs[v.storage].bytes for launch in launches for v in launch.views))]
