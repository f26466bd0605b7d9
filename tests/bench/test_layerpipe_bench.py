"""The LayerPipe report: a readable table and a record that agree with the partition."""

import json
import subprocess
import sys

import pytest
from helpers import BENCH, PATIENCE
from layerpipe import Layers, bytes_moved, compare

from minidl.core.graph import GraphBuilder, Role
from minidl.core.tasks import Kind
from minidl.pricing.cost import CostModel
from minidl.schedulers.partition import METHODS, PartitionError, assign

BENCH = BENCH / "layerpipe.py"


def run(*arguments):
    return subprocess.run([sys.executable, str(BENCH), *arguments], capture_output=True, text=True, timeout=PATIENCE)


def test_given_costs(tmp_path):
    out = tmp_path / "record.json"
    done = run("--forward", "1", "--output-grad", "1", "--weight-grad", "1", "--activation", "8,8", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "published: mean 1.25" in done.stdout
    assert "Why our figures differ" in done.stdout
    found = json.loads(out.read_text())["networks"]["given"]
    assert [(r["method"], r["period"]) for r in found["rows"] if r["processors"] == 2] == [
        ("pipedream", 3), ("intra", 2), ("inter", 1.5)]
    assert [r["processors"] for r in found["rows"]][::3] == list(range(2, 17))
    assert found["limit"] == 3


def test_bad_costs_are_one_clear_line():
    done = run("--forward", "1,2", "--output-grad", "1", "--weight-grad", "1")
    assert done.returncode == 2
    assert "given for 2, 1, 1 layers" in done.stderr
    assert "Traceback" not in done.stderr


def test_bytes_are_those_that_cross():
    costs = Layers.sized([1, 1], [1, 1], [1, 1], activation=[10, 20, 30], weights=[7, 9])
    assert bytes_moved(costs, assign(costs, 1, "pipedream")) == 0
    assert bytes_moved(costs, assign(costs, 2, "pipedream")) == 20 + 20  # the activation up, its gradient down
    # F0 O0 | W0 F1 | O1 W1: x1 to processors 1 and 2, the gradient of the output to 2, that of x1 to 0 and 1,
    # and the weights of layer 0 from 1 to 0, of layer 1 from 2 to 1
    assert bytes_moved(costs, assign(costs, 3, "intra")) == 20 + 20 + 30 + 20 + 20 + 7 + 9


def test_a_share_of_an_output_gradient_moves_its_share():
    costs = Layers.sized([1], [1], [1], activation=[10, 20], weights=8)
    # F + O/2 | O/2 + W: the output's gradient to processor 1, and of the weights 8 to F (its half of O needs no more)
    assert bytes_moved(costs, assign(costs, 2, "inter")) == 20 + 8


def test_a_report_over_processors():
    rows = compare(Layers.sized([1] * 4, [1] * 4, [1] * 4), range(2, 17))
    assert len(rows) == 15 * 3
    best = {m: max(r["speed_up"] for r in rows if r["method"] == m) for m in METHODS}
    assert best["pipedream"] == 1
    assert best["intra"] == pytest.approx(3)  # twelve processors: each atom its own


def test_costs_of_a_graph():
    builder = GraphBuilder()
    weight = builder.buffer("w", 400, Role.PARAMETER)
    x, y, z = (builder.buffer(name, size) for name, size in (("x", 10), ("y", 20), ("z", 30)))
    gx, gy, gw = (builder.buffer(name, size, Role.GRADIENT) for name, size in (("gx", 20), ("gy", 30), ("gw", 400)))
    builder.task(1, Kind.F, writes=[x])
    builder.task(2, Kind.F, reads=[x, weight], writes=[y])
    builder.task(3, Kind.F, reads=[x, y], writes=[z])  # a skip connection
    builder.task(3, Kind.O, reads=[z], writes=[gy])
    builder.task(2, Kind.W, reads=[x, gy], writes=[gw])
    builder.task(2, Kind.O, reads=[gy, weight], writes=[gx])
    builder.task(2, Kind.U, reads=[gw], writes=[weight])
    costs = Layers.of(builder.build(), CostModel(kinds={"F": [0, 1, 2, 3], "O": 5.0, "W": 7.0, "U": 9.0}))
    assert costs.forward.tolist() == [1, 2, 3]
    assert costs.output_grad.tolist() == [0, 5, 5]
    assert costs.weight_grad.tolist() == [0, 7, 0]
    assert costs.activation.tolist() == [0, 10, 30, 0]
    assert costs.weights.tolist() == [0, 400, 0]


def test_too_many_sizes_are_one_clear_line():
    with pytest.raises(PartitionError, match="1 layers need 2 activations"):
        Layers.sized([1], [1], [1], activation=[1, 2, 3])
