"""Jacobi: the backward pass in sweeps, in which all layers, or all time steps, work at once.

Song, Meng, Liao, Ermon, "Accelerating feedforward computation via parallel nonlinear equation solving" (2002.03629).
Sweep k computes O_k(l) = J_l^T O_{k-1}(l+1) + e_l of all layers l at once, from zero; e_l is the gradient of a loss at
layer l. Weight gradients read the last sweep. After k sweeps the k top layers are final, so with L layers L-1 sweeps
are the exact pass, bit for bit; with fewer, an error goes back k layers or time steps, as in truncated backpropagation.
Within a block of layers a sweep goes from layer to layer (Gauss-Seidel); one block of all layers is the exact pass.

A graph is static, so what changes nothing is found when it is planned: a task is left out of a sweep in which its
result is still zero, was final in the one before, or reaches no weight gradient by the last one.
"""

from __future__ import annotations

from ..core.placement import Refused
from .draft import NONE, Copies, Draft
from .flow import Again, Flow


def jacobi(draft: Draft, sweeps: int | None = None, block: int = 1) -> tuple[Draft, str]:
    """The step with this many sweeps (default: until nothing changes), over blocks of so many layers or time steps;
    and a remark if its gradients are inexact. Raises Refused if no gradient goes from one layer to another."""
    if sweeps == 0:
        raise Refused("jacobi", "without a sweep no gradient leaves the last layer", "take at least 1 sweep")
    if not any(flow.run[-1] for flow in Flow.all_of(draft.graph)):
        raise Refused("jacobi", "gradients of this step flow through one layer, or are added up in place over all",
                      "leave it out")
    again = Again(draft.edit())
    needed = max(_swept(again, flow, sweeps) for flow in Flow.all_of(draft.graph, block))
    return again.draft, "" if sweeps is None or sweeps >= needed else (
        f"gradients are inexact: {sweeps} of the {needed} sweeps of jacobi after which they are exact")


def _swept(again: Again, flow: Flow, sweeps: int | None) -> int:
    """Adds the sweeps over one backward pass; returns how many make it exact."""
    e, first, last = again.edit, list[int](), list[int]()  # of each atom: the sweeps of its first and its final value
    for a, atom in enumerate(flow.atoms):
        before = {p: flow.run[p] != flow.run[a] for t in atom for s in flow.needs[t] if (p := flow.place[s]) != a}
        source = not all(flow.needs[t] for t in atom)
        first.append(1 if source else min(first[p] + step for p, step in before.items()))
        last.append(max((last[p] + step for p, step in before.items()), default=1))
    count = max(last) if sweeps is None else min(sweeps, max(last))  # later ones change nothing
    memory = dict[tuple[int, int], Copies]()  # of an atom's value after a sweep, before its last one
    others = set(range(len(e.old.graph))).difference(*flow.atoms)  # weight gradients, and updates

    def needed(task: int, sweep: int, run: int = -1) -> dict[int, tuple[int, int]]:
        """Storage -> the atom, and the sweep of its value, that a task reads: of its own run in this sweep, of all
        others after the one before."""
        return {s: (p, min(sweep - (flow.run[p] != run), last[p])) for b in e.reads[task]
                if (p := flow.place.get(s := e.storage_of[b], -1)) >= 0}

    def values(found: dict[int, tuple[int, int]]) -> Copies:
        """The memory of these values, unless it is the recorded one."""
        copies = NONE
        for s, (p, k) in found.items():
            copies |= again.zeros(s, flow.atoms[p]) if k < first[p] else memory.get((p, k), NONE)
        return copies

    used = {value for t in others for value in needed(t, count + 1).values()}
    for k in range(count, 0, -1):
        for a in reversed(range(len(flow.atoms))):
            if (a, k) in used:
                used.update(value for t in flow.atoms[a] for value in needed(t, k, flow.run[a]).values())
    order = list[int]()
    for k in range(1, count + 1):
        for a, atom in enumerate(flow.atoms):
            if (a, k) not in used or k < first[a]:
                continue
            if k < min(last[a], count):
                memory[a, k] = again.memory(atom, f"sweep {k}")
            for t in atom:
                reads = values(needed(t, k, flow.run[a]))
                order.append(again.task(t, f"sweep {k}", reads | memory[a, k]) if (a, k) in memory else t)
                if order[-1] == t:
                    e.use(reads, t)
    for t in others:
        e.use(values(needed(t, count + 1)), t)
    again.replace(flow, order)
    return max(last)
