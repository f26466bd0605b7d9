"""DeepPCR's forward pass: the activations of a chain of narrow layers by Newton's method, all layers at once.

Danieli et al., "DeepPCR" (2309.16318). The unknowns are the outputs z_l of layers z_l = f_l(z_(l-1)), from zero. An
iteration computes f_l and its Jacobian J_l at the present z_(l-1), of all layers at once, and adds d, which solves
d_l = J_l d_(l-1) + f_l(z_(l-1)) - z_l: an affine recurrence, by doubling in ceil(log2 L) levels. Each iteration makes
one more layer exact, up to rounding; it needs fewer if the chain contracts, and one for linear layers. Then the
recorded forwards run on the result, all at once, and write the activations that the backward pass reads.

A graph is static, so a run cannot stop at a tolerance: the number of iterations is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..core.graph import Launch, Role, View
from ..core.placement import Refused
from ..core.tasks import Kind, unpack
from .draft import NONE, Copies, Draft, Edit, fill
from .flow import Again, Flow
from .jacobians import Jacobians, Making, ends_of


@dataclass(frozen=True)
class Layer:
    """A layer of the chain. `tasks`: its forwards, from the storage `below` to the view `out`; `run`: the backward
    tasks between the gradients `top` and `bottom` of the two."""

    tasks: Sequence[int]
    below: int
    out: View
    run: Sequence[int]
    top: View
    bottom: View


def newton(draft: Draft, iterations: int) -> tuple[Draft, str]:
    """The step with its forward passes by so many iterations, and a remark. Raises Refused for a network that is no
    chain of narrow layers, each on one sample at a time."""
    again, exact = Again(draft.edit()), 0
    for flow in Flow.all_of(draft.graph):
        layers = _layers(again.edit, flow)
        if len(layers) < 2 or not 0 < iterations <= len(layers):
            raise Refused("newton", f"{len(layers) - 1} unknown layers leave {iterations} iterations nothing to solve",
                          "take fewer iterations, or leave it out")
        exact = max(exact, len(layers) - 1)
        _solved(again, layers, iterations)
    return again.draft, (f"activations are inexact in their last bits: {iterations} Newton iterations over all layers"
                         if iterations >= exact else f"activations are inexact: {iterations} of the {exact} Newton "
                         f"iterations after which only rounding is left")


def _layers(e: Edit, flow: Flow) -> list[Layer]:
    """The layers of the chain, from the lowest. Raises Refused."""
    graph, runs, name = e.old.graph, flow.runs, "newton"
    ends, mb = ends_of(e, flow, name), unpack(e.keys[runs[0][0]]).micro_batch
    tangled = Refused(name, "this network is not a chain of layers whose forwards depend on nothing else of a step",
                      "take a network such as mlp with layers of few units, and no dropout or norms over a batch")
    maker = {e.storage_of[b]: t for t in range(len(graph)) if graph.kind[t] == Kind.F
             and graph.micro_batch[t] == mb for b in e.writes[t]}
    unit = {s: int(graph.unit[t]) for t in range(len(graph)) if graph.kind[t] == Kind.W and t not in flow.needs
            for b in e.reads[t] if (s := e.storage_of[b]) in flow.place}
    forward = {int(graph.unit[t]): t for t in maker.values()}
    outs = [v for end in ends if (t := forward.get(unit.get(end.storage, -1))) is not None
            for v in e.launches[t][-1].writes if v == replace(end, storage=v.storage)]
    if len(outs) != len(ends):
        raise tangled
    found, used = list[Layer](), set[int]()
    for r in range(len(runs) - 1, 0, -1):
        own, todo, below = set[int](), [maker[outs[r - 1].storage]], outs[r].storage
        while todo:
            if (t := todo.pop()) not in own:
                own.add(t)
                todo += [maker[s] for b in e.reads[t] if (s := e.storage_of[b]) in maker and s != below]
        written = {e.storage_of[b] for t in own for b in e.writes[t]}
        seen = {e.storage_of[b] for t in runs[r] for b in e.reads[t]} & maker.keys()
        if own & used or seen - written - {below} or graph.persistent[[b for t in own for b in e.writes[t]]].any():
            raise tangled
        used |= own
        found.append(Layer(sorted(own), below, outs[r - 1], runs[r], ends[r - 1], ends[r]))
    return found


def _column(v: View) -> View:
    return View(v.storage, (*v.shape, 1), (v.shape[1], 1, 1), 0, v.dtype)


def _solved(again: Again, layers: Sequence[Layer], iterations: int) -> None:
    """Adds the iterations before the first of the layers, and lets its forwards run on their result."""
    e, order = again.edit, list[int]()
    make = Making(again, layers[0].tasks[0], Kind.F)

    def memory(name: str, like: View) -> tuple[View, int]:
        view, buffer = e.array(name, like.shape, like.dtype, Role.ACTIVATION)
        return replace(like, storage=view.storage), buffer

    def task(name: str, kernel: str, reads: Sequence[tuple[View, int]], like: View) -> tuple[View, int]:
        made = memory(name, like)
        order.append(make.task(name, {b for _, b in reads}, {made[1]},
                               [Launch(kernel, tuple(v for v, _ in reads), (made[0],))]))
        return made

    z = [memory("zero", layer.out) for layer in layers[:-1]]
    order += [make.task("zeros", (), {b}, [fill(v, 0.0)]) for v, b in z]

    def below(i: int) -> Copies:
        """The present input of a layer."""
        own = {b for t in layers[i].tasks for b in e.reads[t] if e.storage_of[b] == layers[i].below}
        return Copies(dict.fromkeys(own, z[i - 1][1]), {layers[i].below: z[i - 1][0].storage}) if i else NONE

    for k in range(1, iterations + 1):
        step, jacobians, values = list[tuple[View, int]](), list[Jacobians | None](), f"iteration {k}"
        for i, layer in enumerate(layers[:-1]):
            copies = below(i) | again.memory(layer.tasks, values)
            order += [again.task(t, values, copies) for t in layer.tasks]
            out = next(b for b in e.writes[layer.tasks[-1]] if e.storage_of[b] == layer.out.storage)
            made = replace(layer.out, storage=copies.storages[layer.out.storage]), copies.buffers[out]
            step.append(task(f"residual {i + 1}, {values}", "sub", [made, z[i]], layer.out))
            jacobians.append(None)
            if i:
                jacobians[i], new = make.jacobian(f"Jacobian {i + 1}, {values}", layer.run, layer.top, layer.bottom,
                                                  copies)
                order.append(new)
        far = 1
        while far < len(step):
            before, matrices = [*step], [*jacobians]
            for i in range(far, len(step)):
                m, (v, buffer), name = matrices[i], before[i - far], f"{i + 1}, {values}, over {far}"
                assert m is not None
                product = memory(f"product {name}", layers[i].out)
                order.append(make.task(f"product {name}", {m.buffer, buffer}, {product[1]}, [
                    Launch("matmul", (m.matrices(), _column(v)), (_column(product[0]),))],
                    2.0 * m.shape[0] * m.shape[1] * m.shape[2]))
                step[i] = task(f"step {name}", "add", [before[i], product], layers[i].out)
                jacobians[i] = None
                if (other := matrices[i - far]) is not None:
                    jacobians[i], new = make.product(f"Jacobians {name}", m, other, layers[i + 1 - 2 * far].bottom)
                    order.append(new)
            far *= 2
        z = [task(f"z {i + 1}, {values}", "add", [z[i], step[i]], layer.out) for i, layer in enumerate(layers[:-1])]
    for i, layer in enumerate(layers):
        e.use(below(i), *layer.tasks)
    first = min(layers[0].tasks)
    again.order[first] = [*order, first]
