"""Recomputed activations: the same bits, less memory, and an R just before its first reader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_offload import Net, batches, recorded

import minidl as ml
from minidl import nn, optim, schedulers
from minidl.core.graph import TaskGraph
from minidl.core.tasks import Kind
from minidl.passes.draft import Draft
from minidl.passes.recompute import recompute
from minidl.training.job import Job
from minidl.training.recorded import Recorded


def trained(dropped: Any, policy: str = "in_order") -> tuple[list[bytes], dict[str, bytes], TaskGraph]:
    """Losses, everything that outlives the steps, and the graph."""
    ml.seed(0)
    model = Net()
    graph = recompute(Draft.of(recorded(model)), dropped).graph
    run = ml.StreamExecutor(graph, schedulers.plan(graph, policy).schedule)
    losses = [run(*batch).numpy().tobytes() for batch in batches()]
    run.close()
    return losses, {name: a.tobytes() for name, a in model.state_dict().items()}, graph


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", ["in_order", "multi_stream", "multi_region"])
@pytest.mark.parametrize("dropped", [{1}, {2, 3}, {1, 2, 3, 4}, range(9)], ids=str)
def test_bits_and_running_statistics_are_those_of_the_plain_step(dropped: Any, policy: str):
    losses, left, plain = trained(())
    again = trained(dropped, policy)
    assert (losses, left) == again[:2]
    assert len(again[2]) > len(plain)


def test_each_r_runs_just_before_its_first_reader_and_touches_no_state_that_its_forward_changes():
    """If R read such a state, the next micro-batch's forward would have to wait for R. The step keeps its results."""
    graph = trained(range(20))[2]
    tasks, names = list(graph), [t.name for t in graph]
    for t in tasks:
        if t.kind == Kind.R:
            made = {b.index for b in t.writes}
            first = next(u for u in tasks[t.index + 1 :] if made & {b.index for b in u.reads})
            assert {u.kind for u in tasks[t.index + 1 : first.index]} <= {Kind.R}, (t.name, names)
            assert f"{t.unit}F0" in names
            changed = {b.name for b in graph[f"{t.unit}F{t.micro_batch}"].writes if b.role.persistent}
            assert not any(b.role.persistent for b in t.writes)
            assert not changed & {b.name for b in t.reads}
    assert f"{max(t.unit for t in tasks if t.kind == Kind.F)}R0" not in names


def test_statistics_that_change_before_the_second_run_are_read_only_once():
    """One batch norm, first with its running statistics, then with the batch's, which changes them."""
    x, labels = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32), np.zeros(8, np.int64)

    def weights_after(dropped: Any) -> dict[str, bytes]:
        ml.seed(0)
        model = Net()
        opt = optim.SGD(model.parameters(), lr=0.1)

        def step(x: Any, y: Any) -> Any:
            model.norm.eval()
            h = model.norm(model.first(x))
            model.norm.train()
            loss = nn.cross_entropy(model.last(nn.relu(h) * model.norm(h)), y)
            loss.backward()
            opt.step()
            return loss

        graph = recompute(Draft.of(ml.record(step, x, labels)), dropped).graph
        assert bool(dropped) == any(t.kind == Kind.R for t in graph)
        run = ml.StreamExecutor(graph, schedulers.in_order(graph))
        run(x, labels)
        run.close()
        return {name: a.tobytes() for name, a in model.state_dict().items()}

    assert weights_after(()) == weights_after(range(20))


@pytest.mark.few(1)
@pytest.mark.parametrize(("model", "parts"), [("mobilenet_v3_large", 2), ("densenet121", 3), ("gpt", 2), ("rnn", 3)])
def test_each_r_is_cut_as_its_f_so_that_a_split_step_has_equal_bits(model: str, parts: int):
    graph = Recorded(Job(model=model, model_args={"preset": "tiny"}, batch_size=8)).graph
    split = ml.plan(graph, "in_order", recompute="all", split=parts).graph
    shapes: dict[tuple[int, ...], dict[int, list[Any]]] = {}
    for t in range(len(split)):
        own = split[t]
        if own.kind in (Kind.F, Kind.R):
            shapes.setdefault((own.unit, own.micro_batch, own.part), {})[own.kind] = [
                (launch.kernel, [view.shape for view in launch.writes])
                for launch in split.launches[t] if launch.kernel != "fill"]
    again = [found for found in shapes.values() if Kind.R in found]
    assert len(again) > 3 * parts
    for found in again:
        assert found[Kind.R] == found[Kind.F]
