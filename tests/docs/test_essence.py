"""docs/essence.py is the engine on one page: its orders, waits, times and gradients are the engine's."""

from __future__ import annotations

import ast
import random
import re
import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest
from helpers import PATIENCE, ROOT, random_array, replicas

import minidl as ml
from minidl import nn, optim, schedulers
from minidl.core.placement import contiguous, looped
from minidl.schedulers import pipeline
from minidl.schedulers.layer_times import layers
from minidl.schedulers.pipeline.fast_forward import fast_forward_greedy
from minidl.schedulers.pipeline.looped import modulo_greedy

PAGE = ROOT / "docs" / "essence.py"
sys.path.insert(0, str(PAGE.parent))
essence = import_module("essence")
sys.path.pop(0)


def a_time(seed: int):
    """A random time for each kind; a fused backward takes both."""
    draw = random.Random(seed)
    each = {kind: draw.choice((1.0, 1.25, 2.0, 3.5)) for kind in "FOW"}
    return each | {"B": each["O"] + each["W"]}


def by_kind(each):
    return lambda task: each[essence.kind_of(task)]


def test_it_is_a_page_of_numpy_and_the_standard_library():
    tree = ast.parse(PAGE.read_text())
    imported = {name.split(".")[0] for node in ast.walk(tree) for name in (
        [a.name for a in node.names] if isinstance(node, ast.Import) else
        [node.module] if isinstance(node, ast.ImportFrom) else [])}
    assert imported - set(sys.stdlib_module_names) == {"numpy"}
    assert len(PAGE.read_text().splitlines()) <= 500


@pytest.mark.slow
def test_it_trains_the_digits_with_equal_bits():
    done = subprocess.run([sys.executable, PAGE], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all parameters have equal bits") == 2
    assert "zb_h1 on four ranks: 21 ticks" in done.stdout
    assert [line.split(": ")[1] for line in done.stdout.splitlines() if line.startswith("8 layers")] == [
        "24 ticks", "20 ticks", "17 ticks"]


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1"])
def test_its_pipeline_orders_and_their_times_are_the_engines(name):
    for ranks, micro_batches, latency, seed in ((1, 1, 0.0, 0), (2, 3, 0.5, 1), (3, 2, 0.25, 2), (4, 9, 1.0, 3)):
        each, lanes = a_time(seed), getattr(essence, name)(ranks, micro_batches)
        cost = ml.CostModel.given(each["F"], each["O"], each["W"], latency)
        plan = ml.plan(ml.Pipeline(micro_batches), name, cost, ml.Machine(ranks))
        assert list(lanes.values()) == [plan.schedule.names(rank) for rank in range(ranks)]
        preds = essence.edges(essence.stages(ranks, micro_batches, name == "one_f_one_b"))
        essence.prove(lanes, preds, essence.fewest_waits(lanes, preds))
        spans = essence.simulate(lanes, preds, by_kind(each), latency)
        assert essence.makespan(spans) == pytest.approx(pipeline.price(plan, cost).makespan, rel=1e-12)


@pytest.mark.parametrize(("theirs", "placement"), [(fast_forward_greedy, contiguous), (modulo_greedy, looped)])
def test_fast_forwarding_and_modulo_allocation_are_the_engines(theirs, placement):
    for ranks, chunks, micro_batches, latency, seed in ((2, 4, 1, 0.0, 0), (4, 2, 1, 0.0, 1), (2, 2, 3, 0.5, 2),
                                                        (3, 2, 4, 0.0, 3)):
        each, place = a_time(seed), placement(ranks, chunks)
        rank_of = place.table[0].tolist().__getitem__
        tasks = essence.stages(place.stages, micro_batches)
        lanes = essence.fast_forward(tasks, ranks, rank_of, by_kind(each), latency)
        times = [np.full(place.stages, each[kind]) for kind in "FOW"]
        schedule = theirs(pipeline.Problem(place, micro_batches, *times, latency))
        assert list(lanes.values()) == [schedule.names(rank) for rank in range(ranks)]


def test_its_data_parallel_orders_and_periods_are_the_engines():
    for seed in range(4):
        draw = random.Random(seed)
        count = draw.randint(2, 6)
        f, o, w, c = ([draw.randint(1, 4) for _ in range(count)] for _ in range(4))
        graph, cost = layers(f, o, w)
        for k in range(count + 1):
            plan = replicas(graph, "reverse_first_k", cost, lambda sizes: sum(c[u] * n / 8 for u, n in sizes.items()),  # noqa: B023
                            part_bytes=1, k=k)
            order = essence.reverse_first_k(count, k)
            each = {f"{i}{kind}0": times[i] for kind, times in (("F", f), ("O", o), ("W", w)) for i in range(count)}
            assert order == [name for name in plan.schedule.names(0) if essence.kind_of(name) in "FOW"]
            assert essence.period(order, each.__getitem__, c) == pytest.approx(plan.period)


def steps():
    """A recorded step of the page, the engine's graph of the same network, and its model."""
    model = nn.Sequential(nn.Linear(5, 7, dtype="float64"), nn.ReLU(), nn.Linear(7, 6, dtype="float64"), nn.ReLU(),
                          nn.Linear(6, 3, dtype="float64"))
    x, labels = ml.array(random_array((8, 5))), ml.array(np.arange(8) % 3)
    opt = optim.SGD(model.parameters(), lr=0.1)

    def step(x, labels):
        loss = nn.cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        return loss

    return essence.record(3), model, step, (x, labels)


def trained(model):
    """The model's parameters under the page's names; the page has a row of a weight for each input."""
    linear = [layer for layer in model if isinstance(layer, nn.Linear)]
    return {name: value for i, layer in enumerate(linear) for name, value in (
        (f"w{i}", layer.weight.numpy().T.copy()), (f"b{i}", layer.bias.numpy().copy()))}


def test_the_tape_makes_the_engines_tasks_and_gradients():
    tasks, model, step, data = steps()
    store = {"x.0": data[0].numpy(), "labels.0": data[1].numpy(), "dy5.0": 1 / 8}
    store |= trained(model)
    graph = ml.record(step, *data)
    assert [t.name for t in tasks] == [str(task) for task in graph]
    assert essence.edges(tasks) == {str(t): sorted(graph.name(p) for p in graph.preds[t.index]) for t in graph}
    preds = essence.edges(tasks)
    essence.run(tasks, {"main": list(preds)}, {}, {"main": store})
    step(*data)
    for name, value in trained(model).items():
        np.testing.assert_allclose(store[name], value, rtol=1e-12, err_msg=name)


def test_two_streams_and_their_waits_are_the_engines():
    tasks, _, step, data = steps()
    graph, preds = ml.record(step, *data), essence.edges(tasks)
    for seed in range(5):
        each = a_time(seed) | {"U": 0.5}
        cost = ml.CostModel.given(each["F"], each["O"], each["W"], update=0.5)
        lanes, theirs = essence.multi_stream(preds, by_kind(each)), schedulers.single.beside(graph, cost)
        assert list(lanes.values()) == [theirs.names(lane) for lane in range(2)]
        assert essence.makespan(essence.simulate(lanes, preds, by_kind(each))) == pytest.approx(
            ml.simulate(graph, theirs, cost).makespan)
        waits = essence.fewest_waits(lanes, preds)
        assert {(t, w) for t, some in waits.items() for w in some} == {
            (graph.name(t), graph.name(w)) for t, w in theirs.waits(graph).tolist()}
        essence.prove(lanes, preds, waits)
        for task, some in waits.items():
            for wait in some:  # each of them is needed
                with pytest.raises(ValueError, match="may start before"):
                    essence.prove(lanes, preds, waits | {task: [w for w in some if w != wait]})


def test_wrong_schedules_are_refused_and_a_lane_that_fails_is_no_hang():
    preds = essence.edges(essence.stages(2, 2))
    lanes = essence.zb_h1(2, 2)
    for bad, message in (({**lanes, "rank1": lanes["rank1"][1:]}, "not each task once: .'1F0'"),
                         ({**lanes, "rank1": [*lanes["rank1"], "1W0"]}, "some are there twice"),
                         ({**lanes, "rank0": lanes["rank0"][::-1]}, "deadlock: 0W1 waits for 0W0, 1F0 waits for 0F0")):
        with pytest.raises(ValueError, match=message):
            essence.prove(bad, preds, preds)
    task = essence.Task(0, "F", 0, ("absent",), ("y",))
    with pytest.raises(KeyError, match="absent"):
        essence.run([task], {"main": ["0F0"]}, {}, {"main": {}})


def test_readers_find_each_section_and_each_file_that_it_names():
    text = PAGE.read_text()
    names = re.findall(r"^    [1-9]  .*?  +(\S.*)$", text, re.MULTILINE)
    assert len(names) == 9
    for name in [name for row in names for name in row.split(", ")]:
        assert (ROOT / name).exists(), name


def test_the_claims_of_the_tutorial_are_in_the_lines_that_it_names():
    where = {}
    for node in ast.parse(PAGE.read_text()).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else node
        where[getattr(target, "name", getattr(target, "id", None))] = node
    named = re.findall(r"`(\w+)` (\d+)-(\d+)", (ROOT / "docs" / "tutorial" / "README.md").read_text())
    assert len(named) > 15
    assert [(name, int(a), int(b)) for name, a, b in named] == [
        (name, where[name].lineno, where[name].end_lineno) for name, *_ in named]
