"""Training under stale policies against NumPy that follows the papers' rules: workers that run 1F1B without a flush, or
LayerPipe's ticks, with the weights that each paper keeps. It uses no schedule, version or gradient of minidl; only
which rank has which part of a layer is LayerPipe's own division."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pipelines
import pytest
from helpers import together

import minidl as ml
from minidl import nn, ops, optim
from minidl.core.tasks import Kind
from minidl.runtime.executors import DistributedExecutor
from minidl.schedulers import pipeline
from minidl.schedulers.pipeline import add_communication
from minidl.training.pipeline_trainer import delays

WIDTHS, RANKS, SHARE, MICRO_BATCHES, RATE, MOMENTUM = (5, 7, 6, 8, 4), 4, 3, 8, 0.05, 0.9
BOUND = 1e-13  #: relative to a parameter's largest element


class Layers(nn.Module):
    def __init__(self):
        self.layers = nn.ModuleList([nn.Linear(*pair, dtype="float64") for pair in pairwise(WIDTHS)])

    def forward(self, x):
        for layer in self.layers:
            x = ops.tanh(layer(x))
        return x


def costs(forward=(3, 3, 3, 3), output_grad=(3, 3, 3, 3), weight_grad=(3, 3, 3, 3)):
    """Times of the linear layers; balanced stages are then one layer and its tanh each."""
    times = {"F": forward, "O": output_grad, "W": weight_grad}
    each = {kind: [t for linear in layers for t in (linear, 0.1)] + [0.0, 0.0] for kind, layers in times.items()}
    return ml.CostModel(kinds=each | {"U": 0.0}, link=ml.Link(0.0))


def examples(steps):
    random = np.random.default_rng(5)
    return [(random.standard_normal((SHARE, WIDTHS[0])), random.standard_normal((SHARE, WIDTHS[-1])))
            for _ in range(steps * MICRO_BATCHES)]


def recorded(every):
    ml.seed(2)
    model = Layers()
    opt = optim.SGD([{"params": [p]} for p in model.parameters()], RATE, momentum=MOMENTUM)

    def step(*parts):
        for i in range(MICRO_BATCHES):
            with ml.micro_batch(i, i * SHARE):
                (nn.MSELoss()(model(parts[2 * i]), parts[2 * i + 1]) * (1 / every)).backward()
                if (i + 1) % every == 0:
                    opt.step()

    first = [array for pair in examples(1) for array in pair]
    return model, ml.record(step, *first), opt


def trained(policy, told, cost, steps, grow=0):
    """(the parameters before, after training on thread ranks, the rank of each layer by kind of task). `grow`: the
    steps over which rates grow, by PipeMare's rule."""
    every = pipelines.policy(policy).update_every(MICRO_BATCHES, told.get("mini_batches", 1))
    own, data = [], examples(steps)
    for _ in range(RANKS):
        model, graph, opt = recorded(every)
        assert pipeline.balanced(graph, cost, RANKS).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3], "a layer is a stage"
        plan = ml.plan(graph, policy, cost, ml.Machine(RANKS), **told)
        own.append((model, opt, delays(plan, opt.parameters), *add_communication(plan.graph, plan.schedule)))
    before = [p.numpy().copy() for p in own[0][0].parameters()]

    def work(communicator):
        model, opt, late, graph, schedule = own[communicator.rank]
        run = DistributedExecutor(graph, schedule, communicator)
        for k in range(steps):
            for group, delay in zip(opt.param_groups, late, strict=True):
                group.lr = optim.by_delay(lambda n: RATE, delay, grow)(k) if grow else RATE
            run(*(array for pair in data[k * MICRO_BATCHES : (k + 1) * MICRO_BATCHES] for array in pair))
        run.close()
        return [p.numpy().copy() for p in model.parameters()]

    found = together(RANKS, work)
    placement = plan.placement
    home = {kind.name: (placement.table if placement.parts is None else placement.parts[kind])[0].tolist()
            for kind in (Kind.F, Kind.O, Kind.W)}
    return before, [found[home["W"][i // 2]][i] for i in range(len(before))], home


# -------------------------------------------------------------------------------------------------------- the reference
@dataclass
class Worker:
    """One layer, tanh(x w^T + b). `early`: the forwards that it runs before those that it runs in turns with weight
    gradients."""

    weights: list
    early: int
    done: list = field(default_factory=lambda: [0, 0, 0])  #: forwards, output gradients, weight gradients
    grow: int = 0  #: the steps over which the rate grows
    decay: object = None  #: of the average of updates, by the age of the weights
    versions: list = field(default_factory=list)  #: those that 2BW may read
    stash: dict = field(default_factory=dict)  #: micro-batch -> the weights, input and output of its forward
    found: dict = field(default_factory=dict)  #: micro-batch -> gradients that are not yet added

    def __post_init__(self):
        self.versions.append(self.weights)
        self.velocity, self.average, self.sum = ([np.zeros_like(a) for a in self.weights] for _ in range(3))

    def add(self, *gradients):
        self.sum = [a + g for a, g in zip(self.sum, gradients, strict=True)]

    def update(self):
        """SGD with momentum; `average` follows the changes that it applies."""
        self.velocity = [MOMENTUM * v + g for v, g in zip(self.velocity, self.sum, strict=True)]
        step = (len(self.versions) - 1) // MICRO_BATCHES
        rate = RATE / (self.early + 1) ** max(0.0, (self.grow - step) / self.grow) if self.grow else RATE
        change = [-rate * v for v in self.velocity]
        decay = self.decay(self.early) if self.early else 0
        self.average = [decay * a + (1 - decay) * c for a, c in zip(self.average, change, strict=True)]
        self.weights = [w + c for w, c in zip(self.weights, change, strict=True)]
        self.versions.append(self.weights)
        self.sum = [np.zeros_like(a) for a in self.weights]

    def past(self):
        """The weights of `early` updates ago, or the first ones, as far as the average knows them."""
        t = len(self.versions) - 1
        part = min(t, self.early) / (1 - self.decay(self.early) ** t) if t and self.early else 0
        return [w - part * a for w, a in zip(self.weights, self.average, strict=True)]


DECAYS = {"average": lambda d: (d - 1) / d, "window": lambda d: (d - 1) / (d + 1),
          "pipemare": lambda d: np.exp(np.log(0.135) / d)}


def reference(weights, data, early, every, rule, grow=0):
    """Parameters after training. `rule`: the weights of a backward: those of its forward ("stash"), of the mini-batch
    before, in the forward too ("double"), the newest ones ("newest"), the newest ones after a
    forward on an extrapolation of the last update ("predicted"), or the newest ones less d times the average of
    their changes (DECAYS), where d is the age of the forward's."""
    workers = [Worker(weights[2 * s : 2 * s + 2], ahead, grow=grow, decay=DECAYS.get(rule, DECAYS["average"]))
               for s, ahead in enumerate(early)]
    last, total = len(workers) - 1, len(data)
    up = {(0, i): x for i, (x, _) in enumerate(data)}  # (layer, micro-batch) -> its input
    down = {}  # the same -> the gradient of its output
    moved = True
    while moved:
        moved = False
        for s, worker in enumerate(workers):
            forwards, grads, updates = worker.done
            ahead = forwards < total and forwards - updates <= worker.early
            if ahead and (s, forwards) in up:
                x, read = up.pop((s, forwards)), worker.weights
                if rule == "predicted" and len(worker.versions) > 1:
                    read = [w + worker.early * (w - b)
                            for w, b in zip(worker.weights, worker.versions[-2], strict=True)]
                if rule == "double":
                    read = worker.versions[max(0, forwards // every - 1)]
                y = np.tanh(x @ read[0].T + read[1])
                worker.stash[forwards] = read, x, y
                if s < last:
                    up[s + 1, forwards] = y
                else:
                    down[s, forwards] = 2 * (y - data[forwards][1]) / y.size / every
                worker.done[0] += 1
            elif updates < grads and not ahead:
                worker.add(*worker.found.pop(updates))
                worker.done[2] += 1
                if worker.done[2] % every == 0:
                    worker.update()
            # a gradient travels on at once if it does not depend on how new the weights are
            elif (s, grads) in down and (rule == "stash" or not ahead):
                read, x, y = worker.stash.pop(grads)
                if rule in ("newest", "predicted"):
                    read = worker.weights
                if rule in DECAYS:
                    read = worker.past()
                inner = down.pop((s, grads)) * (1 - y * y)
                if s:
                    down[s - 1, grads] = inner @ read[0]
                worker.found[grads] = inner.T @ x, inner.sum(0)
                worker.done[1] += 1
            else:
                continue
            moved = True
    assert all(worker.done == [total] * 3 for worker in workers)
    return [a for worker in workers for a in worker.weights]


def ticks_between(home):
    """LayerPipe: how many ticks pass in each layer between F and W of a batch, if a result reaches another rank one
    tick later. `home[kind][layer]`: a rank. W reads the gradient inside of its layer, behind tanh, which O makes."""
    layers = len(home["F"])
    at = {("F", 0): 0}
    for layer in range(1, layers):
        at["F", layer] = at["F", layer - 1] + (home["F"][layer] != home["F"][layer - 1])
    for layer in reversed(range(layers)):
        above = [("O", layer + 1)] if layer < layers - 1 else []
        for kind, sources in (("O", [("F", layer), *above]), ("W", [("O", layer), *above])):
            at[kind, layer] = max(at[source] + (home[kind][layer] != home[source[0]][source[1]]) for source in sources)
    return [at["W", layer] - at["F", layer] for layer in range(layers)]


EQUAL, AFTER = costs(), [RANKS - 1 - s for s in range(RANKS)]  #: the ranks after each one
SPREAD = costs((4, 2, 12, 5), (3, 5, 1, 2), (2, 6, 2, 8)), costs((3, 6, 1, 1), (4, 4, 3, 8), (2, 1, 7, 3))
CASES = {  # policy, options, costs, steps, micro-batches per update, the weights of a backward
    "pipedream": ("pipedream", {}, EQUAL, 2, 1, "stash"),
    "pipedream, averaged": ("pipedream", {"history": "average"}, EQUAL, 2, 1, "average"),
    "pipedream_2bw": ("pipedream_2bw", {"mini_batches": 2}, EQUAL, 6, 4, "double"),
    "paci": ("paci", {"mini_batches": 4}, EQUAL, 3, 2, "newest"),
    "layerpipe2": ("layerpipe2", {}, EQUAL, 2, 1, "stash"),
    "layerpipe2, averaged": ("layerpipe2", {"history": "average"}, EQUAL, 2, 1, "average"),
    **{f"{policy}, {decay}": (policy, {"history": "average", "decay": decay}, EQUAL, 2, 1, decay)
       for policy in ("pipedream", "layerpipe2") for decay in ("window", "pipemare")},
    **{f"{policy}, predicted": (policy, {"history": "predicted"}, EQUAL, 2, 1, "predicted")
       for policy in ("pipedream", "layerpipe2")},
    "adl": ("adl", {"mini_batches": 4}, EQUAL, 3, 2, "stash"),
    "layerpipe": ("layerpipe", {}, EQUAL, 2, 1, "stash"),
    "layerpipe, W spread": ("layerpipe", {}, SPREAD[0], 2, 1, "stash"),
    "layerpipe, F, O and W spread": ("layerpipe", {}, SPREAD[1], 2, 1, "stash")}


def apart(found, wanted):
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_papers_rules(case):
    policy, told, cost, steps, every, rule = CASES[case]
    before, found, home = trained(policy, told, cost, steps)
    early = {"layerpipe": ticks_between(home), "layerpipe2": [2 * s for s in AFTER],
             "adl": [2 * s for s in AFTER]}.get(policy, AFTER)
    data = examples(steps)
    assert apart(found, reference(before, data, early, every, rule)) < BOUND
    # other ages and rules leave other weights
    if policy != "pipedream_2bw":  # whose weights do not depend on the order
        assert apart(found, reference(before, data, [1 + early[0], *early[1:]], every, rule)) > 1e-5
    if policy != "layerpipe":  # whose gradients may run ahead of updates, so old weights must be kept
        for other in {"stash", "newest", "average", "predicted"} - {rule}:
            assert apart(found, reference(before, data, early, every, other)) > 1e-5, other


@pytest.mark.few(1)
@pytest.mark.parametrize("case", ["pipedream", "layerpipe2", "layerpipe2, pipemare"])
def test_rates_by_delay_equal_the_papers_rule(case):
    """PipeMare, 1910.05124: the rate over tau^p in each stage, where p falls from 1 to 0 over the first steps. Under
    layerpipe2 tau is 2 (P - i) + 1, as there."""
    policy, told, cost, _, every, rule = CASES[case]
    before, found, _ = trained(policy, told, cost, 4, grow=3)
    early, data = [2 * s for s in AFTER] if policy == "layerpipe2" else AFTER, examples(4)
    assert apart(found, reference(before, data, early, every, rule, 3)) < BOUND
    for other in (0, 2):
        assert apart(found, reference(before, data, early, every, rule, other)) > 1e-5
