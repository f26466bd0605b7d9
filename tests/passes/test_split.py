"""Tasks in parts: all orders are bit-identical, and differ from the whole tasks by rounding alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from helpers import bits

import minidl as ml
from minidl import models, nn, optim
from minidl.core.graph import Launch, TaskGraph, View
from minidl.core.placement import Refused
from minidl.core.tasks import Cuts, Kind, parse_task, task_name, unpack, widths
from minidl.fusion import fused
from minidl.kernels import KERNELS, conv
from minidl.passes.draft import Draft
from minidl.passes.recompute import recompute
from minidl.passes.split import Part, axes_of, bounds, clash, overlap, split
from minidl.runtime.checking import random_schedule


class Norms(nn.Module):
    """Layers of most kinds: convolution, batch norm, pooling, dropout, layer norm, softmax, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.drop, self.line, self.last = nn.Dropout(0.3), nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: Any) -> Any:
        h = nn.functional.max_pool2d(nn.relu(self.norm(self.conv(x))), 2)
        h = self.drop(h.reshape(-1, 32))
        return self.last(self.line(h + nn.functional.softmax(h, -1)))


def images(n: int, *shape: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((n, *shape)), rng.integers(0, 10, n)


def tokens(*shape: int) -> tuple[Any, Any]:
    return tuple(np.random.default_rng(0).integers(0, 64, (2, *shape)))


class OneImage(nn.Module):
    """Convolutions of most kinds, for a batch of one."""

    def __init__(self) -> None:
        self.first = nn.Conv2d(3, 8, 5, stride=2, padding=2)
        self.each = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.wide = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2)
        self.last, self.head = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 10, 3, stride=3)

    def forward(self, x: Any) -> Any:
        h = nn.functional.max_pool2d(nn.relu(self.first(x)), 2)
        h = nn.functional.avg_pool2d(self.wide(nn.relu(self.each(h))), 2)
        return self.head(nn.relu(self.last(h))).reshape(-1, 10)


CASES: dict[str, tuple[Callable[[], Any], tuple[Any, Any]]] = {
    "mlp": (lambda: models.mlp(48, 64, 96, 10), images(40, 48)),
    "gpt": (lambda: models.gpt(64, 16, 32, 2, 4), tokens(4, 16)),
    "cnn": (Norms, (images(6, 8, 8, 3)[0], np.arange(6 * 16) % 10)),
    "one image": (OneImage, (images(1, 33, 27, 3)[0], np.array([3]))),
    "rnn": (lambda: models.create("rnn", vocabulary=64, length=6, width=16, layers=2), tokens(5, 6)),
    "gru": (lambda: models.create("rnn", vocabulary=64, length=6, width=16, layers=2, cell="gru"), tokens(5, 6)),
    "lstm": (lambda: models.create("rnn", vocabulary=64, length=6, width=16, layers=2, cell="lstm"), tokens(5, 6)),
}


def training(case: str, dtype: str = "float64", times: int = 1) -> tuple[Any, TaskGraph, tuple[Any, Any]]:
    """A network, its recorded step and an example, always from the same values, with each sample so many times."""
    ml.seed(0)
    make, example = CASES[case]
    x, y = (np.repeat(a, times, axis=0) for a in example)
    model = make()
    if dtype == "float64":
        model.astype("float64")
    x = x.astype(dtype) if x.dtype.kind == "f" else x
    opt = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # Adam makes steps of one size from rounding errors

    def step(x: Any, y: Any) -> Any:
        out = model(x)
        loss = nn.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))
        loss.backward()
        opt.step()
        return loss

    return model, ml.record(step, x, y), (x, y)


def left(case: str, parts: Any, run: Callable[[TaskGraph], Any], dtype: str = "float64", steps: int = 2,
         rules: Sequence[str] = ()) -> list[Any]:
    """The losses and everything that the network keeps after some steps of the split graph, after rules of fusion."""
    model, graph, example = training(case, dtype)
    graph = fused(graph, ml.device.cpu(), rules) if rules else graph
    execute = run(graph if parts == 1 else split(Draft.of(graph), parts(graph) if callable(parts) else parts).graph)
    losses = [np.array(execute(*example).numpy()) for _ in range(steps)]
    if hasattr(execute, "close"):
        execute.close()
    return [*losses, *(np.array(a) for a in model.state_dict().values())]


def in_random_order(lanes: int, seed: int) -> Callable[[TaskGraph], Any]:
    def run(graph: TaskGraph) -> Any:
        return ml.CheckingExecutor(graph, random_schedule(graph, lanes, np.random.default_rng(seed)), seed=seed)

    return run


def near_and_equal_in_any_order(whole: list[Any], run: Callable[[Callable[[TaskGraph], Any]], list[Any]],
                                lanes: tuple[int, ...]) -> None:
    """What the graph in parts leaves is close to what the whole one leaves, and has equal bits in all orders."""
    found = run(ml.SequentialExecutor)
    assert max(float(np.abs(a - b).max()) for a, b in zip(whole, found, strict=True)) < 1e-12
    for count in lanes:
        assert bits(*run(in_random_order(count, count))) == bits(*found)


@pytest.mark.few(1)
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_every_order_of_a_split_step_has_the_same_bits_close_to_the_whole_ones(case: str, parts: int):
    near_and_equal_in_any_order(left(case, 1, ml.SequentialExecutor), partial(left, case, parts), (1, 2, 5))


def elements(view: View, memory: np.ndarray) -> np.ndarray:
    """The places of a view's elements."""
    steps = tuple(s * memory.itemsize for s in view.strides)
    return np.lib.stride_tricks.as_strided(memory[view.offset:], view.shape, steps).reshape(-1)


def unordered_touches(graph: TaskGraph) -> list[tuple[str, str]]:
    """Pairs of tasks without a path between them, of which one writes elements that the other one touches: of all
    elements of all views, without the arithmetic of views."""
    memory, before = np.arange(max(s.bytes for s in graph.storages)), [set[int]() for _ in range(len(graph))]
    for t in range(len(graph)):
        before[t].update(*(before[p] | {p} for p in graph.preds[t].tolist()))
    touched: dict[tuple[int, int], list[set[int]]] = defaultdict(lambda: [set(), set()])
    for t, launches in enumerate(graph.launches):
        for launch in launches:
            for views, written in ((launch.views, False), ((*launch.writes, *launch.work), True)):
                for v in views:
                    for at in elements(v, memory).tolist():
                        touched[v.storage, at * np.dtype(v.dtype).itemsize][written].add(t)
    return sorted({(graph.name(a), graph.name(b)) for all_of, writers in touched.values()
                   for a in writers for b in all_of if a != b and a not in before[b] and b not in before[a]})


@pytest.mark.few(1)
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_parts_that_nothing_orders_share_no_element(case: str, parts: int):
    graph = fused(training(case, "float32")[1], ml.device.cpu(), ["in_place"])
    assert unordered_touches(split(Draft.of(graph), parts).graph) == []


@pytest.mark.parametrize("case", ["lstm", "gpt", "cnn"])
def test_results_in_place_have_the_same_bits_in_every_order_of_parts(case: str):
    def in_place(run: Callable[[TaskGraph], Any]) -> list[Any]:
        return left(case, 2, run, rules=["in_place"])

    near_and_equal_in_any_order(left(case, 1, ml.SequentialExecutor), in_place, (2, 3))


def test_parts_of_results_in_place_do_not_wait_for_each_other():
    """The gates are written over the input's part of them, which other parts wrote, cut along another axis."""
    whole = fused(training("lstm")[1], ml.device.cpu(), ["in_place"])
    graph = split(Draft.of(whole), 2).graph
    halves = [t for t in range(len(graph)) if {"lstm", "lstm_grad"} & {launch.kernel for launch in graph.launches[t]}
              and unpack(graph.keys[t]).part == 2]
    assert len(halves) == 4
    assert all(t - 1 not in graph.preds[t] for t in halves)
    bytes_of = [np.bincount(g.buffer_storage, g.buffer_bytes)[: len(whole.storages)] for g in (whole, graph)]
    gates = {v.storage for t in halves for v in graph.launches[t][0].writes} & {*range(len(whole.storages))}
    assert len(gates) >= 4
    assert all(bytes_of[0][s] == bytes_of[1][s] for s in gates)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", ["mlp", "cnn"])
def test_threads_leave_the_same_bits(case: str):
    found = left(case, 2, ml.SequentialExecutor, "float32")
    assert bits(*left(case, 2, lambda graph: ml.StreamExecutor(graph, random_schedule(
        graph, 2, np.random.default_rng(3))), "float32")) == bits(*found)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_some_tasks_in_different_numbers_of_parts(seed: int):
    def some(graph: TaskGraph) -> dict[int, int]:
        rng = np.random.default_rng(seed)
        return {key: int(rng.integers(1, 5)) for key in graph.keys.tolist() if rng.random() < 0.7}

    near_and_equal_in_any_order(left("gpt", 1, ml.SequentialExecutor), partial(left, "gpt", some), (3,))


def test_what_is_computed_again_is_cut_as_well():
    def again(run: Callable[[TaskGraph], Any]) -> list[Any]:
        model, graph, example = training("cnn")
        graph = split(recompute(Draft.of(graph), range(4)), 2).graph
        assert any(t.kind == Kind.R and t.part == 2 for t in graph)
        return [np.array(run(graph)(*example).numpy()), *map(np.array, model.state_dict().values())]

    near_and_equal_in_any_order(left("cnn", 1, ml.SequentialExecutor, steps=1), again, (3,))


def test_gradients_that_end_with_the_update_are_cut_with_their_rows():
    """Each part has its rows of the weight and of its momentum."""
    def updated(run: Callable[[TaskGraph], Any]) -> list[Any]:
        model, graph, example = training("mlp")
        graph = split(Draft.of(fused(graph, ml.device.cpu(), ["weight_updates"])), 2).graph
        parts = [n for own in graph.launches for n in own if n.kernel == "linear_weight_update"]
        assert len(parts) == 6
        return [np.array(run(graph)(*example).numpy()), *map(np.array, model.state_dict().values())]

    near_and_equal_in_any_order(left("mlp", 1, ml.SequentialExecutor, steps=1), updated, (2, 3))


def test_parts_have_names_and_wait_only_for_the_rows_that_they_read():
    _, graph, _ = training("mlp", times=4)  # more numbers of samples than of weights
    parted = split(Draft.of(graph), 2).graph
    names = [t.name for t in parted]
    assert {"0F0/1", "0F0/2", "2O0/1", "2O0/2", "0W0/2", "0U0/1"} <= {*names}
    assert all(task_name(parse_task(name)) == name for name in names)

    def waits(name: str) -> set[str]:
        return {parted.name(p) for p in parted.preds[parted.index(name)].tolist()}

    assert waits("1F0/1") == {"0F0/1"}
    assert waits("2F0/2") == {"1F0/2"}
    assert waits("3F0/1") == {"2F0/1"}
    assert waits("2W0/1") == {"1F0/1", "1F0/2", "3O0/1", "3O0/2"}  # all rows of the gradient's columns
    assert "2W0/2" not in waits("2U0/1")
    assert "2W0/1" in waits("2U0/1")


def test_a_product_is_cut_along_its_largest_matrix():
    """The weight where rows are few, else the rows."""
    def read(times: int, task: str) -> list[tuple[int, ...]]:
        parted = split(Draft.of(training("mlp", times=times)[1]), 2).graph
        return [v.shape for v in parted.launches[parted.index(task)][0].reads[:2]]

    assert (read(1, "0F0/1"), read(4, "0F0/2")) == ([(40, 48), (32, 48)], [(80, 48), (64, 48)])
    assert (read(1, "2O0/2"), read(4, "2O0/1")) == ([(40, 96), (96, 32)], [(80, 96), (96, 64)])


def test_parts_share_the_work():
    _, graph, _ = training("mlp")
    draft = Draft.of(graph)
    parted = split(draft, 2)
    mine = np.isin(unpack(parted.graph.keys).unit, [2])
    assert parted.graph.flops[mine].sum() == pytest.approx(graph.flops[graph.unit == 2].sum())
    assert parted.time.sum() == pytest.approx(draft.time.sum())
    assert widths(parted.graph.keys)[parse_task("2F0")] == 2
    plan = ml.plan(graph, "in_order", split=2)
    assert plan.peak_bytes[0] <= ml.plan(graph, "in_order").peak_bytes[0] * 1.2


def test_a_step_that_is_whole_stays_as_it_is_and_what_cannot_be_cut_is_refused():
    draft = Draft.of(training("mlp")[1])
    assert all(split(draft, *parts) is draft for parts in ((), ({},), ({parse_task("99F0"): 2},)))
    with pytest.raises(Refused, match="no task of this step can be cut in so many parts"):
        split(draft, 900)


@pytest.mark.few(4)
@pytest.mark.parametrize(("groups", "backward"), [(2, False), (8, False), (1, True), (2, True), (8, True)])
@pytest.mark.parametrize("seed", range(8))
def test_rows_of_a_convolution_have_the_bits_of_the_whole(seed: int, groups: int, backward: bool):
    """Random windows: of one image forward and the gradient toward the input; or (`backward`) the weight gradient for
    random numbers of outputs, dense, grouped and one filter for each channel, also in parts of groups."""
    rng = np.random.default_rng(seed)
    window = dict(zip(("kernel_size", "stride", "padding", "dilation"),
                      rng.integers((1, 1, 0, 1), (5, 3, 4, 3) if backward else (5, 4, 5, 3)).tolist(), strict=True))
    outputs = int(rng.choice([8, 24, 72])) if backward else 8
    x = rng.standard_normal((3 if backward else 1, 13, int(rng.integers(9, 24)), 8)).astype("f")
    overhang = window["padding"] - (window["kernel_size"] - 1) * window["dilation"]
    wanted = ["conv2d_weight_grad"] if backward else ["conv2d", "conv2d_input_grad"] if overhang <= 0 else []

    def run(parts: int) -> list[np.ndarray]:
        ml.seed(0)
        conv, each = nn.Conv2d(8, outputs, groups=groups, **window), ml.Parameter(x)
        trained = list(conv.parameters()) if backward else [each]
        opt = optim.SGD(trained, lr=1.0)

        def step(x: Any) -> Any:
            y = conv(x if backward else x * each)
            (y * y).sum().backward()
            opt.step()
            return y

        whole = ml.record(step, x)
        cut = whole.kind == Kind.W if backward else whole.kind >= 0
        graph = split(Draft.of(whole), dict.fromkeys(whole.keys[cut].tolist(), parts)).graph
        assert parts == 1 or {(launch.kernel, t.part) for t in graph for launch in graph.launches[t.index]} >= {
            (name, parts) for name in wanted}
        return [ml.SequentialExecutor(graph)(x).numpy().copy(), *(p.numpy().copy() for p in trained)]

    for parts in (2, 3, 5) if backward else (2, 3):
        assert bits(*run(parts)) == bits(*run(1))


@pytest.mark.parametrize(("padding", "axes"), [((2, 9), "nrWC,OTUC,O->nrWO"), ((3, 0), "nHWC,OTUC,O->nHWO")])
def test_only_the_padding_above_and_below_keeps_rows_together(padding: tuple[int, int], axes: str):
    image, weight = np.zeros((1, 12, 12, 8), "f"), np.zeros((8, 3, 3, 8), "f")
    assert conv._axes([image, weight], geometry=conv.Geometry((1, 1), padding, (1, 1), 1)) == axes


def test_bounds_are_multiples_of_a_tile_if_there_are_enough_rows():
    assert bounds(64, 2) == [0, 32, 64]
    assert bounds(100, 3) == [0, 32, 64, 100]
    assert bounds(56, 2) == [0, 32, 56]
    assert bounds(10, 3) == [0, 3, 7, 10]
    assert bounds(2, 2) == [0, 1, 2]


def test_views_overlap_if_they_share_elements():
    rows = View(0, (4, 6), (6, 1), 0, "float32")
    assert not overlap(rows.part(0, 0, 2), rows.part(0, 2, 4))
    assert not overlap(rows.part(1, 0, 3), rows.part(1, 3, 6))
    assert overlap(rows.part(1, 0, 4), rows.part(1, 3, 6))
    assert overlap(rows.part(0, 0, 3), rows.part(1, 3, 6))
    memory, rng = np.arange(4000), np.random.default_rng(0)
    for _ in range(500):
        strides = [(60, 12, 1), (1, 5, 30), (3, 0, 10), (1, 1, 4), (2, 3, 1)][rng.integers(5)]
        one, two = (View(0, tuple(rng.integers(1, 5, 3).tolist()), strides, int(rng.integers(60)), "int64")
                    for _ in range(2))
        held = [{int(memory[v.offset + int(np.dot(at, v.strides))]) for at in np.ndindex(v.shape)} for v in (one, two)]
        assert overlap(one, two) or not held[0] & held[1]  # it may say yes if it does not know, never no


def test_parts_clash_if_one_writes_what_another_one_touches():
    rng, found = np.random.default_rng(0), [0, 0]

    def views(most: int) -> tuple[View, ...]:
        rows = View(int(rng.integers(2)), (8, 6), (6, 1), 0, "float32")
        return tuple(rows.part(0, a := int(rng.integers(7)), a + 2).part(1, b := int(rng.integers(4)), b + 3)
                     for _ in range(rng.integers(most)))

    for _ in range(300):
        parts = [Part((Launch("relu", views(3), views(2)),), 0.5, ()) for _ in range(3)]
        pairs = [(v, w) for a, b in permutations(parts, 2) for v in a.launches[0].writes for w in b.launches[0].views]
        assert clash(parts) == any(overlap(v, w) for v, w in pairs)
        found[clash(parts)] += 1
    assert min(found) > 30


def test_numpy_negates_strided_columns():
    """NumPy 2.4.6 reads other elements of float32 arrays if these are 16 bytes apart, as parts may be."""
    x, y = np.arange(8, dtype=np.float32).reshape(2, 4), np.zeros((2, 4), np.float32)
    for thunk in KERNELS["neg"].bind([x[:, 1:2]], [y[:, 1:2]], [], {}):
        thunk()
    assert y.ravel().tolist() == [0, -1, 0, 0, 0, -5, 0, 0]


@pytest.mark.parametrize("axes", ["->", "m->m", "mik->mik", "mi*o->mi*o", "...mik->...mik"])
def test_axes_that_do_not_fit_the_arrays_are_told(axes: str):
    view = View(0, (4, 6), (6, 1), 0, "float32")
    with pytest.raises(ValueError, match=r"of kernel relu do not fit \(.*\); give each axis one label"):
        axes_of(Launch("relu", (view,), (view,), cuts=Cuts(axes, lambda *_: ())))


def test_a_launch_without_axes_stays_whole():
    _, graph, _ = training("mlp")
    plain = Launch("relu", (), ())
    assert plain.cuts is None
    parted = split(Draft.of(graph), 2).graph
    loss = next(t for t in graph for launch in t.launches if launch.kernel == "cross_entropy")
    assert parted[loss.name].launches == loss.launches  # it adds up all rows


def test_one_row_of_a_table_stays_whole():
    table, layer = nn.Embedding(5, 16), nn.Linear(16, 16)

    def step(x: Any, row: Any) -> Any:
        loss = (layer(x) * table(row)).sum()
        loss.backward()
        return loss, table.weight.grad

    given = images(64, 16)[0].astype("float32"), np.array(3)
    graph = ml.record(step, *given)
    plan = ml.plan(graph, "multi_stream", split=2)
    found = ml.StreamExecutor(plan.graph, plan.schedule)(*given)
    for part, whole in zip(found, ml.SequentialExecutor(graph)(*given), strict=True):
        np.testing.assert_allclose(part.numpy(), whole.numpy(), rtol=1e-5, atol=1e-4)
