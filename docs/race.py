"""Two orders of one training step race on four ranks of this machine, in about ten seconds.

    python docs/race.py

A network of 8 layers learns digits as a pipeline: each rank has two layers, and each batch comes in 8 micro-batches.
GPipe runs all forwards, then all backwards. ZB-H1 splits each backward into two tasks: the output gradient, for which
the previous rank waits, and the weight gradient, for which nobody waits. Weight gradients fill the gaps.

Ranks are threads of this process. Each task of a layer computes, then sleeps for 2 ms, as if an accelerator had done
the work. So four ranks do not need four cores, and only the order makes a difference.
"""

import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import minidl as ml
from minidl import data, models, nn, optim
from minidl.kernels.registry import kernel
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import DistributedExecutor
from minidl.views.page import Shown, page

RANKS, MICRO_BATCHES, SHARE, SECONDS, ROUNDS = 4, 8, 64, 0.002, 12
ORDERS = {"gpipe": "GPipe", "zb_h1": "ZB-H1"}
PAGE = Path("race.html")


@kernel("sleep")
def sleep(xp, *reads):
    """Computes nothing and takes time."""
    return reads[0]


@sleep.cpu
def _(*arrays):
    return [partial(time.sleep, SECONDS)]


def recorded():
    """(model, graph) of a step whose forward and gradient tasks of linear layers sleep at their end."""
    ml.seed(0)
    model = models.mlp(64, *[64] * 7, 10)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x, y):
        for i in range(MICRO_BATCHES):
            part = slice(i * SHARE, (i + 1) * SHARE)
            with ml.micro_batch(i, first_sample=i * SHARE):
                loss = nn.cross_entropy(model(x[part]), y[part]) * (1 / MICRO_BATCHES)
                loss.backward()
        optimizer.step()
        return loss

    graph = ml.record(step, *batches()[0])
    launches = tuple((*calls, replace(calls[-1], kernel="sleep", work=(), constants=())) if sleeps(graph, task)
                     else calls for task, calls in enumerate(graph.launches))
    return model, replace(graph, launches=launches)


def sleeps(graph, task):
    return graph.kind[task] <= ml.Kind.W and graph.unit_names[graph.unit[task]].endswith("linear")


def batches():
    source = data.digits(batch_size=MICRO_BATCHES * SHARE)
    return [next(source) for _ in range(ROUNDS + 1)]


def race():
    """By order: seconds of each step, the plan, the timeline of the last step, and all weights as bytes."""
    made = {order: [recorded() for _ in range(RANKS)] for order in ORDERS}
    graph = made["gpipe"][0][1]
    cost = ml.CostModel(tasks={graph.name(t): 1e6 * SECONDS * sleeps(graph, t) for t in range(len(graph))})
    plans = {order: [ml.plan(graph, order, cost, ml.Machine(RANKS)) for _, graph in made[order]] for order in ORDERS}

    def rank(comm):
        runs = {order: DistributedExecutor(*plans[order][comm.rank].with_messages, comm, trace=True)
                for order in ORDERS}
        seconds = {order: [] for order in ORDERS}
        for x, y in batches():
            for order, run in runs.items():  # in turns, so that whatever else runs here slows both
                comm.gather(None)
                begin = time.perf_counter()
                run(x, y)
                comm.gather(None)
                seconds[order].append(time.perf_counter() - begin)
        return {o: s[1:] for o, s in seconds.items()}, {o: run.timeline_of_all() for o, run in runs.items()}

    seconds, timelines = run_ranks(RANKS, rank)[0]
    weights = {order: [p.numpy().tobytes() for model, _ in made[order] for p in model.parameters()] for order in ORDERS}
    return seconds, {order: plans[order][0] for order in ORDERS}, timelines, weights


def main():
    seconds, plans, timelines, weights = race()
    gain = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
    expected = plans["gpipe"].predicted_step_ms / plans["zb_h1"].predicted_step_ms
    equal = weights["gpipe"] == weights["zb_h1"]
    for order, title in ORDERS.items():
        print(f"{title}: {statistics.median(seconds[order]) * 1000:.0f} ms a step, "
              f"predicted {plans[order].predicted_step_ms:.0f} ms")
    print(f"ZB-H1 is {gain:.2f}x as fast as GPipe on this machine (predicted {expected:.2f}x), and the weights are "
          f"{'equal bit for bit' if equal else 'NOT EQUAL: please report this'}.")
    shown = [Shown.of(plans[order], timelines[order]) for order in ORDERS]
    PAGE.write_text(page("GPipe against ZB-H1", {"speed-up": round(gain, 3), "predicted": round(expected, 3)}, shown,
                         command="python docs/race.py"))
    print(f"Open {PAGE} in a browser to see both steps, task by task.")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
