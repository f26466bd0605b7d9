"""Experts: routing by hand, gradients of each part by finite differences, bits of sources, micro-batches and lanes."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
from any_order import same_in_any_order
from forms import bound, on_cpu
from helpers import bits, random_array, refuses, torch_or_skip

import minidl as ml
from minidl import nn, ops, optim
from minidl.devices.device import cpu
from minidl.devices.native import no_native_lanes
from minidl.kernels import KERNELS
from minidl.measuring.lanes import probe
from minidl.testing.checks import gradcheck


def by_hand(p: Any, k: int, capacity: int, bias: Any = 0) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """(choice, place, counts), one token after the other."""
    choice = [sorted(range(p.shape[1]), key=lambda e: (-(row + bias)[e], e))[:k] for row in p]
    rows: list[list[tuple[int, int]]] = [[] for _ in range(p.shape[1])]
    for t, experts in enumerate(choice):
        for j, e in enumerate(experts):
            if not capacity or len(rows[e]) < capacity:
                rows[e].append((t, j))
    place = {pair: i for i, pair in enumerate(pair for own in rows for pair in own)}
    return choice, [[place.get((t, j), -1) for j in range(k)] for t in range(len(p))], [len(own) for own in rows]


@pytest.mark.parametrize("tokens", [1, 13])
@pytest.mark.parametrize("experts", [1, 4])
@pytest.mark.parametrize("capacity", [0, 1, 3])
def test_routes_are_those_made_by_hand(tokens: int, experts: int, capacity: int) -> None:
    """With ties, with an expert that nobody chooses, and with a bias."""
    rng = np.random.default_rng(tokens)
    for k in range(1, experts + 1):
        for p in (rng.random((tokens, experts)), rng.integers(0, 2, (tokens, experts)) / 2 + 0.5,
                  np.ones((tokens, experts)), rng.random((tokens, experts)) - 9 * (np.arange(experts) == 1)):
            for bias in (None, np.linspace(0, 1, experts)):
                total = nn.state(np.zeros((2, experts), np.int64), "total")
                found = ops.route(ml.array(p), k, capacity, k > 1, None if bias is None else ml.array(bias), total)
                choice, place, counts = by_hand(p, k, capacity, 0 if bias is None else bias)
                assert found.place.numpy().tolist() == place
                assert found.counts.numpy().tolist() == [counts]
                load = np.bincount(np.ravel(choice), minlength=experts)
                assert found.load.numpy().tolist() == load.tolist()
                assert total.numpy().tolist() == [load.tolist(), (load - counts).tolist()]
                gates = np.take_along_axis(p, np.array(choice), 1)
                wanted = gates / gates.sum(1, keepdims=True) if k > 1 else gates
                np.testing.assert_allclose(found.gate.numpy(), wanted, 1e-14)


@pytest.mark.parametrize("capacity", [0, 2])
@pytest.mark.parametrize("normalize", [False, True])
def test_gradients_of_each_part(capacity: int, normalize: bool) -> None:
    p = np.abs(random_array((6, 4), 3))
    choice, place, counts = by_hand(p, 2, capacity)
    where, many = ml.array(np.array(place)), ml.array(np.array([counts]))
    rows, x, w, b = (random_array(shape, i) for i, shape in enumerate(((12, 3), (6, 3), (4, 2, 3), (4, 2))))
    gradcheck(lambda p: ops.route(p, 2, capacity, normalize).gate, p)
    gradcheck(lambda x: ops.dispatch(x, where), x)
    gradcheck(lambda rows, gate: ops.combine(rows, gate, where), rows, random_array((6, 2), 7))
    for gelu in (False, True):
        gradcheck(lambda x, w, b, gelu=gelu: ops.grouped_linear(x, many, w, b, gelu=gelu), rows, w, b)
    gradcheck(lambda x, w: ops.grouped_linear(x, ml.array(np.array([[1, 0, 2, 0], [0, 0, 3, 2]])), w), rows, w)


def grouped(counts: Any, x: Any, dy: Any, w: Any, b: Any, gelu: str = "") -> list[Any]:
    """What a grouped layer makes: y, dx, dw, db. `gelu`: before it, in a launch of its own (apart), or not (within)."""
    x, w, b = ml.array(x).requires_grad_(), ml.Parameter(w), ml.Parameter(b)
    seen = ops.gelu(x, "tanh") if gelu == "apart" else x
    y = ops.grouped_linear(seen, ml.array(np.array(counts)), w, b, gelu=gelu == "within")
    (y * ml.array(dy)).sum().backward()
    return [t.numpy().copy() for t in (y, x.grad, w.grad, b.grad)]


@pytest.mark.parametrize("counts", [[[5, 0, 3], [1, 2, 0]], [[0, 0, 0], [4, 4, 4]], [[1, 1, 1], [0, 0, 1], [6, 0, 0]]])
def test_sources_have_the_bits_of_micro_batches(counts: list[list[int]]) -> None:
    """Rows after the last one are read by nobody, and come out as zeros."""
    ends = np.cumsum(np.sum(counts, 1)).tolist()
    x, dy = (random_array((20, 8), i, "float32") for i in (1, 2))
    w, b = random_array((3, 8, 8), 3, "float32"), random_array((3, 8), 4, "float32")
    dirty = x.copy()
    dirty[ends[-1] :] = np.nan
    whole = grouped(counts, dirty, dy, w, b)
    parts = [grouped([own], x[begin:end], dy[begin:end], w, b)
             for own, begin, end in zip(counts, [0, *ends], ends, strict=False)]
    for i in (0, 1):
        assert bits(whole[i][: ends[-1]]) == bits(np.concatenate([part[i] for part in parts]))
        assert not whole[i][ends[-1] :].any()
    for i in (2, 3):
        total = parts[0][i]
        for part in parts[1:]:
            total = total + part[i]
        assert bits(whole[i]) == bits(total)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("counts", [[[5, 0, 3], [1, 2, 0]], [[1, 1, 1], [0, 0, 1], [6, 0, 0]], [[0, 0, 0]]])
def test_gelu_within_a_product_has_the_bits_of_one_before_it(counts: list[list[int]], dtype: str) -> None:
    """Rows after the last one are read by nobody, and come out as zeros."""
    end = int(np.sum(counts))
    x, dy = (9 * random_array((20, 8), i, dtype) for i in (1, 2))
    w, b = random_array((3, 8, 8), 3, dtype), random_array((3, 8), 4, dtype)
    x[end:] = 0
    dirty = x.copy()
    dirty[end:] = np.nan
    apart, within = (grouped(counts, rows, dy, w, b, how) for rows, how in ((x, "apart"), (dirty, "within")))
    assert [*map(bits, within)] == [*map(bits, apart)]


def test_rows_after_the_last_one_may_be_left_as_they_are() -> None:
    counts, x, w = np.array([[2, 1]]), random_array((5, 3), 1, "float32"), random_array((2, 3, 3), 2, "float32")
    for name, reads, results in (("grouped_linear", [counts, x, w], 1), ("grouped_linear", [counts, x, w], 2),
                                 ("grouped_linear_input_grad", [counts, x, w, x], 1)):
        for rest in (True, False):
            made = on_cpu(name, reads, [np.full((5, 3), 7, "float32") for _ in range(results)], rest=rest,
                          **({"gelu": True} if results > 1 else {}))
            assert all((a[3:] == (0 if rest else 7)).all() and (a[:3] != 7).all() for a in made)


def dense(layer: nn.MoE, x: Any) -> Any:
    """The one expert of a layer as two linear layers."""
    w, v = layer.fc1, layer.fc2
    hidden = ops.gelu(ops.linear(x, w.weight[0], w.bias[0]), "tanh")
    return ops.linear(hidden, v.weight[0], v.bias[0])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (6, 8), (33, 8), (60, 200), (300, 100)])
def test_one_expert_is_the_dense_layer(score: str, tokens: int, width: int) -> None:
    """Also where products go by tiles (`kernels/tiles.py`)."""
    found = []
    for forward in (nn.MoE.forward, dense):
        ml.seed(0)
        layer = nn.MoE(width, 2 * width, 1, 1, score=score, normalize=True)
        x = ml.Parameter(random_array((tokens, width), 1, "float32"))
        y = forward(layer, x)
        (y * y).sum().backward()
        grads = [p.grad.numpy() for p in (x, *layer.fc1.parameters(), *layer.fc2.parameters())]
        found.append(bits(y, *grads))
    assert found[0] == found[1]


def training(micro_batches: int = 1, steps: int = 3, **given: Any) -> tuple[Any, Any, list[Any]]:
    """A step of a layer between two linear ones, its tensors, its batches."""
    ml.seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.MoE(8, 12, **{"experts": 4, "top_k": 2, "balance": 0.1, **given}),
                        nn.Linear(8, 3))
    opt = optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def step(*parts: Any) -> Any:
        losses = []
        for i in range(micro_batches):
            with ml.micro_batch(i):
                loss = nn.cross_entropy(net(parts[2 * i]), parts[2 * i + 1]) / micro_batches
                more = nn.balance_loss(net)
                loss = loss if more is None else loss + more
                loss.backward()
                losses.append(loss.detach())
        opt.step()
        return tuple(losses)

    rng = np.random.default_rng(1)
    batches = [[part for _ in range(micro_batches) for part in (
        rng.standard_normal((5, 6)).astype("float32"), rng.integers(0, 3, 5))] for _ in range(steps)]
    return net, step, batches


VARIANTS: list[dict[str, Any]] = [{}, {"capacity": 1}, {"capacity": 2, "shared": 2}, {"experts": 1, "top_k": 1},
                                  {"top_k": 1, "score": "sigmoid"}, {"bias_rate": 0.1, "balance": 0.0}, {"top_k": 4}]


def check_bits(micro_batches: int, given: dict[str, Any], seeds: Any) -> None:
    """Steps in random orders leave the bits of eager steps."""
    def make() -> tuple[Any, Any]:
        net, step, _ = training(micro_batches, **given)
        return step, [t for _, t in net.named_tensors()]

    same_in_any_order(make, training(micro_batches)[2], seeds)


@pytest.mark.few(3)
@pytest.mark.parametrize("given", VARIANTS, ids=str)
def test_lanes_and_random_orders_have_the_bits_of_eager_steps(given: dict[str, Any], both_lanes: str) -> None:
    check_bits(2, given, range(2))


@pytest.mark.campaign
def test_random_settings_have_the_bits_of_eager_steps() -> None:
    for seed in range(300):
        draw = np.random.default_rng(seed)
        experts = int(draw.integers(1, 9))
        given = {"experts": experts, "top_k": int(draw.integers(1, experts + 1)), "shared": int(draw.integers(0, 3)),
                 "capacity": int(draw.integers(1, 6)) if draw.random() < 0.5 else None, "bias": bool(draw.integers(2)),
                 "score": str(draw.choice(["softmax", "sigmoid"])), "balance": float(draw.choice([0.0, 0.1])),
                 "bias_rate": float(draw.choice([0.0, 0.1])), "normalize": bool(draw.integers(2))}
        print(seed, given)
        check_bits(int(draw.integers(1, 4)), given, [seed])


@pytest.mark.skipif(bool(no_native_lanes()), reason="this machine has no native lanes")
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_products_by_tiles_or_by_the_library_are_native(summed: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
                                                        ) -> None:
    """Groups without rows, with few, and with many: each row comes from one of both."""
    counts, (n, i, o) = np.array([[0, 5, 70], [1, 130, 16]]), (230, 96, 64)
    x, w, b, dy = (random_array(shape, 3, "float32") for shape in ((n, i), (3, o, i), (3, o), (n, o)))
    reads = [counts, x, dy] if summed else [counts, x, w, *([b] if bias else [])]
    name, constants = ("grouped_linear_weight_grad", {"bias": bias}) if summed else ("grouped_linear", {})
    shapes = [w.shape, *([b.shape] if bias else [])] if summed else [(n, o)]
    made = {}
    for lanes in ("native", "python"):
        results = [np.full(shape, 9, np.float32) for shape in shapes]
        calls = bound(name, reads, results, **constants)
        monkeypatch.setenv("MINIDL_LANES", lanes)
        with closing(cpu().lanes(probe([[0]], [], lambda *_, calls=calls: calls))) as run:
            run.run()
        made[lanes] = bits(*results)
    assert made["native"] == made["python"]


@pytest.mark.skipif(bool(no_native_lanes()), reason="this machine has no native lanes")
def test_grouped_products_are_native() -> None:
    from minidl.devices.native.calls import convert

    _, step, batches = training(shared=1, capacity=2, bias_rate=0.1)
    graph = ml.record(step, *batches[0])
    memory = {i: np.zeros(max(spec.bytes, 8), np.uint8) for i, spec in enumerate(graph.storages)}
    count = 0
    for task in graph:
        for launch in task.launches:
            if KERNELS[launch.kernel].reference.__module__ == "minidl.kernels.experts":
                count += 1
                for thunk in cpu().bind(launch, lambda v: cpu().array(memory[v.storage], v)):
                    assert convert(thunk)
    assert count == 15


def test_a_token_beyond_the_capacity_gives_nothing_and_gets_no_gradient() -> None:
    ml.seed(0)
    layer = nn.MoE(4, 8, 2, 1, capacity=1)
    layer.router.weight.assign(np.array([[1.0] * 4, [-1.0] * 4], np.float32))
    x = ml.Parameter(np.abs(random_array((3, 4), 1, "float32")))  # all choose expert 0
    y = layer(x)
    y.sum().backward()
    assert not y.numpy()[1:].any()
    assert not x.grad.numpy()[1:].any()
    assert y.numpy()[0].any()
    assert layer.load.numpy().tolist() == [[3, 0], [2, 0]]
    assert not layer.fc1.weight.grad.numpy()[1].any()


@pytest.mark.parametrize("given", [{}, {"capacity": 2}, {"top_k": 1, "shared": 1}, {"score": "sigmoid"},
                                   {"score": "sigmoid", "top_k": 1, "normalize": False, "capacity": 3}], ids=str)
def test_numbers_and_gradients_are_those_of_torch(given: dict[str, Any]) -> None:
    """Against a layer that is put together from torch's functions, one expert after the other, in float64."""
    torch = torch_or_skip()
    ml.seed(0)
    layer = nn.MoE(6, 10, 4, **{"top_k": 2, "balance": 0.3, **given}, dtype="float64")
    x = ml.Parameter(random_array((13, 6), 1))
    y = layer(x)
    ((y * y).sum() + nn.balance_loss(layer)).backward()

    own = {name: torch.tensor(p.numpy().copy(), requires_grad=True) for name, p in layer.named_parameters()}
    z = torch.tensor(x.numpy().copy(), requires_grad=True)
    scores = z @ own["router.weight"].T
    p = torch.softmax(scores, 1) if layer.score == "softmax" else torch.sigmoid(scores)
    gate, choice = p.topk(layer.top_k)
    gate = gate / gate.sum(1, keepdim=True) if layer.normalize else gate
    out = []
    taken, load = [0] * 4, [0] * 4
    for t in range(13):
        total = torch.zeros(6, dtype=torch.float64)
        for j in range(layer.top_k):
            e = int(choice[t, j])
            load[e] += 1
            if not layer.capacity or taken[e] < layer.capacity:
                taken[e] += 1
                hidden = own["fc1.weight"][e] @ z[t] + own["fc1.bias"][e]
                hidden = torch.nn.functional.gelu(hidden, approximate="tanh")
                total = total + gate[t, j] * (own["fc2.weight"][e] @ hidden + own["fc2.bias"][e])
        out.append(total)
    found = torch.stack(out)
    if hasattr(layer, "shared"):
        first, second = ((own[f"shared.{i}.weight"], own[f"shared.{i}.bias"]) for i in (0, 2))
        hidden = torch.nn.functional.gelu(torch.nn.functional.linear(z, *first), approximate="tanh")
        found = found + torch.nn.functional.linear(hidden, *second)
    share = p / p.sum(1, keepdim=True)
    balance = 4 * sum(share[:, e].mean() * n / sum(load) for e, n in enumerate(load))
    ((found * found).sum() + 0.3 * balance).backward()
    np.testing.assert_allclose(y.numpy(), found.detach().numpy(), rtol=1e-10, atol=1e-13)
    for name, p in [("x", x), *layer.named_parameters()]:
        wanted = (z if name == "x" else own[name]).grad
        np.testing.assert_allclose(p.grad.numpy(), 0 if wanted is None else wanted, rtol=1e-9, atol=1e-12, err_msg=name)


def test_even_loads_have_a_balance_loss_of_one_and_the_bias_evens_loads() -> None:
    ml.seed(0)
    layer = nn.MoE(4, 8, 4, 1, balance=1.0)
    layer.router.weight.assign(np.eye(4, dtype=np.float32) * 1e-6)
    layer(ml.array(np.eye(4, dtype=np.float32)))
    assert float(nn.balance_loss(layer)) == pytest.approx(1, abs=1e-5)
    assert nn.balance_loss(layer) is None
    layer = nn.MoE(4, 8, 4, 1, bias_rate=0.01, score="sigmoid")
    layer.router.weight.assign(np.eye(4, dtype=np.float32)[[0, 0, 0, 0]] * [[3.0], [1.0], [1.0], [1.0]])
    x = ml.array(np.random.default_rng(0).random((64, 4)).astype("float32"))
    with ml.no_grad():
        loads = []
        for _ in range(60):
            before = layer.load.numpy()[0].copy()
            layer(x)
            loads.append((layer.load.numpy()[0] - before).tolist())
    assert loads[0] == [64, 0, 0, 0]
    assert max(np.mean(loads[-20:], 0)) < 40
    bias = layer.score_bias.numpy().copy()
    layer.eval()(x)
    assert bits(bias) == bits(layer.score_bias)


def test_what_does_not_fit_is_one_line() -> None:
    x, place = ml.array(np.ones((3, 4))), ml.array(np.zeros((3, 2), np.int64))
    w = ml.array(np.ones((2, 5, 4)))
    refuses(
        (lambda: nn.MoE(4, 8, 2, 3), "top_k is 3; a token can use from 1 to 2 of 2 experts"),
        (lambda: nn.MoE(4, 8, 2, 0), "top_k is 0; it must be a whole number >= 1"),
        (lambda: nn.MoE(4, 8, 2, 1, capacity=0), "capacity is 0; it must be a whole number >= 1, or None"),
        (lambda: nn.MoE(4, 8, 2, 1, score="tanh"), "score is 'tanh'; it must be softmax or sigmoid"),
        (lambda: nn.MoE(4, 8, 2, 1, balance=-1.0), "balance is -1.0; it must be a number >= 0"),
        (lambda: nn.MoE(4, 8, 2, 1)(x[:, :3]), r"x \(3, 3\) does not fit the width 4"),
        (lambda: ops.route(x, 5), r"top_k is 5; scores \(3, 4\) must be \(tokens, experts\)"),
        (lambda: ops.dispatch(x[:2], place), r"int64 places \(3, 2\) do not fit x \(2, 4\)"),
        (lambda: ops.combine(x, ml.array(np.ones((3, 2))), place), r"rows \(3, 4\), gates \(3, 2\) and int64 places"),
        (lambda: ops.grouped_linear(x, place, w[:, :, :3]), r"rows \(3, 4\) do not fit weight \(2, 5, 3\)"),
        (lambda: ops.grouped_linear(x, place[:, :1], w), r"int64 counts \(3, 1\) do not fit the 2 experts"),
        (lambda: ops.grouped_linear(x, place, w, ml.array(np.ones((2, 4)))), r"bias \(2, 4\) does not fit weight"))


def test_scores_that_are_not_numbers_name_the_layer(both_lanes: str) -> None:
    _, step, batches = training()
    graph = ml.record(step, *batches[0])
    run = ml.StreamExecutor(graph, ml.plan(graph, "in_order").schedule)
    refuses((lambda: run(batches[0][0] * np.float32(np.nan), batches[0][1]),
             "route.*scores of a router are not numbers"), error=Exception)
    layer, bad = nn.MoE(4, 8, 2, 1), np.full((3, 4), np.nan, np.float32)
    refuses((lambda: layer(bad), "route in moe: scores of a router are not numbers"))
