"""What a person sees at a prompt and in a notebook, and the checks that are for people's own code."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pipelines
import pytest
from helpers import classified

import minidl as ml
from minidl import data, models, ops, optim, schedulers
from minidl.kernels import KERNELS
from minidl.kernels.registry import kernel


@pytest.fixture(scope="module")
def step():
    model = models.create("mlp", hidden=16)
    run = classified(model, optim.SGD(model.parameters(), lr=0.1))
    return model, ml.record(run, *next(data.digits(batch_size=64)), name="mlp")


def test_a_prompt_shows_one_short_line(step):
    model, graph = step
    schedule = schedulers.in_order(graph)
    assert repr(graph) == f"<TaskGraph mlp: {len(graph)} tasks, {len(graph.buffer_bytes)} buffers>"
    assert repr(schedule) == f"<Schedule of {len(graph)} tasks on 1 lane>"
    timeline = ml.simulate(graph, schedule, ml.CostModel.analytic())
    assert repr(timeline).startswith("<Timeline predicted: makespan ")
    assert repr(timeline).endswith(f"{len(graph)} tasks, 1 lane>")
    plan = ml.plan(graph, "multi_stream", streams=2)
    assert repr(plan).startswith(f"<Plan multi_stream: {len(graph)} tasks, a step of ")
    assert repr(plan.programs[0]) == f"<Program of rank 0 of 1: {len(graph)} tasks>"
    assert repr(pipelines.plan("zb_h1", 4, 8)) == "<Plan zb_h1: 96 tasks on 4 ranks, a step of 27 predicted>"
    assert repr(pipelines.plan("zb_h1", 4, 8).schedule) == "<Schedule of 96 tasks on 4 lanes of 4 ranks>"


def test_a_model_shows_its_layers_and_shapes(step):
    lines = repr(step[0]).splitlines()
    assert lines[0] == "MLP("
    assert lines[1] == "  (layer0): Linear(weight (16, 64), bias (16,))"
    assert lines[-1] == ")"


def test_notebooks_show_pictures(step):
    _, graph = step
    schedule = schedulers.in_order(graph)
    timeline = ml.simulate(graph, schedule, ml.CostModel.analytic())
    for thing in (schedule, timeline, ml.plan(graph, "in_order")):
        assert ET.fromstring(thing._repr_svg_()).tag.endswith("svg")
    html = graph._repr_html_()
    assert html.count("<tr>") == 1 + len(graph)
    assert "1F0" in html
    assert "mlp/layer0" in html


# ------------------------------------------------------------------------------------------------------------ gradients
def test_gradcheck_accepts_what_is_right():
    x, w = np.linspace(-1, 1, 6).reshape(2, 3), np.linspace(-1, 2, 12).reshape(3, 4)
    ml.gradcheck(lambda x, w: ops.tanh(x @ w), x, w)


def test_gradcheck_names_what_is_wrong():
    def detached(x, y):
        return x * y.detach() + y * 0.5

    with pytest.raises(ml.CheckError, match=r"the gradient toward operand 1 \(parameters, strided\): element \[\d\] "
                                            r"is .*, finite differences has .*; 3 of 3 are wrong"):
        ml.gradcheck(detached, np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0]))
    with pytest.raises(ml.CheckError, match="operand 0 is missing"):
        ml.gradcheck(lambda x, y: x.detach() * y, np.ones(2), np.ones(2))
    with pytest.raises(TypeError, match="finite differences need float64, not float32"):
        ml.gradcheck(lambda x: x, np.ones(2, np.float32))


# -------------------------------------------------------------------------------------------------------------- kernels
def test_kernelcheck_accepts_the_kernels_that_are_here():
    x = np.linspace(-2, 2, 12).reshape(3, 4)
    for name, reads in {"relu": [x], "matmul": [x, x.T.copy()], "exp": [x], "add": [x, x]}.items():
        ml.kernelcheck(name, *reads)
    ml.kernelcheck("sgd", x, x, np.array([0.1]), momentum=0.0, weight_decay=0.0, nesterov=False)


WRONG = {
    "a value": (lambda x, y: np.multiply(x, 2.0000001, out=y), r"output 0 in float64: element \[3\] is .*; 4 of 4"),
    "one element": (lambda x, y: np.multiply(x[1:], 2, out=y[1:]), r"output 0 in float64: element \[0\] is nan"),
    "what it reads": (lambda x, y: (np.copyto(y, [2, 4, 6, 8]), np.copyto(x, 0)), "changes what it reads, input 0"),
    "the second call": (lambda x, y: np.add(np.nan_to_num(y), 2 * x, out=y), r"in float64 in a second call: element"),
}


@pytest.mark.parametrize("what", WRONG)
def test_kernelcheck_names_what_is_wrong(what):
    call, message = WRONG[what]

    @kernel("test_wrong")
    def twice(xp, x):
        return 2 * x

    @twice.cpu
    def _(x, y):
        return [lambda: call(x, y)]

    try:
        with pytest.raises(ml.CheckError, match=f"kernel test_wrong.*(?:{message})"):
            ml.kernelcheck("test_wrong", np.arange(1.0, 5.0))
    finally:
        del KERNELS["test_wrong"]
