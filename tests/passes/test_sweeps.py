"""Backward passes in sweeps: exact bits after enough of them, and before that the truncation which the rule says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from command_line import refusal, run_json

import minidl as ml
from minidl import models, nn, ops, optim, schedulers
from minidl.core.graph import TaskGraph
from minidl.core.placement import Refused
from minidl.core.schedule import Lane, Schedule
from minidl.core.tasks import Kind
from minidl.models.pixels import Pixels
from minidl.passes.deeppcr import deeppcr
from minidl.passes.draft import Draft
from minidl.passes.highway import highway
from minidl.passes.jacobi import jacobi
from minidl.schedulers.shared_lanes import shared
from minidl.training.job import Job
from minidl.training.recorded import Recorded
from minidl.training.trainer import Trainer

X, Y = np.random.default_rng(0).standard_normal((4, 12)), np.array([1, 0, 3, 2])


def recorded(make: Any, micro_batches: int = 1) -> tuple[Any, TaskGraph]:
    """A network in float64 and its training step."""
    ml.seed(0)
    model = make().astype("float64")
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Any, y: Any) -> Any:
        n = 4 // micro_batches
        for i in range(micro_batches):
            with ml.micro_batch(i, i * n):
                loss = nn.cross_entropy(model(x[i * n : i * n + n]), y[i * n : i * n + n])
                loss.backward()
        optimizer.step()
        return loss

    return model, ml.record(step, X, Y)


def after(model: Any, run: Any, steps: int = 2) -> dict[str, bytes]:
    for _ in range(steps):
        run(X, Y)
    return {name: a.tobytes() for name, a in model.state_dict().items()}


def compared(way: Any, make: Any, policy: str = "in_order", micro_batches: int = 1, steps: int = 2
             ) -> tuple[Any, Any, str]:
    """States after steps of the exact passes, and of a way under a policy or in any order; and the way's remark."""
    runs = []
    for found in (None, *[way] * 2):
        model, graph = recorded(make, micro_batches)
        found, remark = (Draft.of(graph), "") if found is None else found(Draft.of(graph))
        graph, cost = found.graph, ml.CostModel.analytic()
        run: Any = ml.SequentialExecutor(graph)
        if len(runs) == 1:
            options = {"streams": 4} if policy == "multi_stream" else {}
            run = ml.StreamExecutor(graph, schedulers.plan(graph, policy, **options).schedule)
        if len(runs) == 2:
            run = ml.CheckingExecutor(graph, shared(graph, cost, ["main", "a", "b"]))
        runs.append(after(model, run, steps))
    assert runs[1] == runs[2]
    return runs[0], runs[1], remark


def close(found: Any, expected: Any, tolerance: float) -> bool:
    """Whether all that two networks have differs by so little of its norm."""
    pairs = ([np.frombuffer(of[name]) for of in (found, expected)] for name in expected)
    return all(np.linalg.norm(x - y) <= tolerance * np.linalg.norm(y) for x, y in pairs)


def depth(graph: TaskGraph, products: list[str]) -> float:
    """The time if each task has a lane of its own, these products take 1 and all other tasks nothing."""
    cost = ml.CostModel(tasks=dict.fromkeys(products, 1.0), kinds={k.name: 0.0 for k in Kind})
    lanes = Schedule.of(graph, {Lane(0, f"lane{t}"): [t] for t in range(len(graph))})
    return ml.simulate(graph, lanes, cost).makespan


MLP = lambda: models.mlp(12, 8, 8, 8, 8, 4)  # noqa: E731
RESIDUAL = lambda: Blocks(3, 8, norm=True)  # noqa: E731
POLICIES = ["in_order", "multi_stream", "multi_region"]


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("way", "make"), [
    *((lambda draft, block=block: jacobi(draft, block=block), make) for block in (1, 2) for make in (MLP, RESIDUAL)),
    *((highway, make) for make in (RESIDUAL, lambda: Blocks(4, 8), lambda: Attention()))], ids=[
        "chain", "residual", "chain by two", "residual by two", "norms", "blocks", "attention"])
def test_enough_sweeps_leave_the_bits_of_the_exact_pass(way: Any, make: Any, policy: str):
    expected, found, remark = compared(way, make, policy)
    assert (found, remark) == (expected, "")


def test_micro_batches_have_sweeps_of_their_own():
    expected, found, _ = compared(lambda draft: jacobi(draft, 4), MLP, micro_batches=2)
    assert found == expected


def gradients(make: Any, sweeps: int | None, x: Any = X, way: Any = jacobi) -> list[Any]:
    """The gradients of all parameters; `sweeps`: None for the exact pass."""
    ml.seed(0)
    model = make().astype("float64")

    def step(x: Any, y: Any) -> Any:
        (model(x) if isinstance(model, Pixels) else nn.cross_entropy(model(x), y)).backward()
        return [p.grad for p in model.parameters()]

    graph = ml.record(step, x, Y)
    graph = graph if sweeps is None else way(Draft.of(graph), sweeps)[0].graph
    return [g.numpy() for g in ml.SequentialExecutor(graph)(x, Y)]


@pytest.mark.parametrize("sweeps", [1, 2, 3, 4])
def test_after_k_sweeps_the_top_k_layers_are_final_and_the_others_have_no_gradient(sweeps: int):
    exact, found = (np.array([g.tobytes() for g in gradients(MLP, k)]) for k in (None, sweeps))
    final = 2 * (1 + sweeps)  # weight and bias of the last layer, which needs no sweep, and of k more
    assert (found[-final:] == exact[-final:]).all()
    assert not any(g.any() for g in gradients(MLP, sweeps)[:-final])


def test_a_sweep_that_changes_nothing_is_left_out():
    _, graph = recorded(RESIDUAL)
    needed = next(k for k in range(1, 99) if not jacobi(Draft.of(graph), k)[1])
    assert needed == 7  # of 8 layers, the first of which passes no gradient on
    assert jacobi(Draft.of(graph), 6)[1] == (
        "gradients are inexact: 6 of the 7 sweeps of jacobi after which they are exact")
    assert len(jacobi(Draft.of(graph), 3)[0].graph) > len(graph)
    for options in ({}, {"sweeps": 10**9}, {"sweeps": 1, "block": 10**9}):  # the last one: Gauss-Seidel from the top
        found, remark = jacobi(Draft.of(graph), **options)
        assert not remark
        assert sorted(found.graph.keys.tolist()) == sorted(graph.keys.tolist())


# -------------------------------------------------------------------------------------------------------- through time
DIGIT = np.random.default_rng(1).random((1, 64))


def truncated(model: Pixels, x: Any, steps: int) -> Any:
    """The gradient of W_h if the error of every time step goes back `steps` time steps, by a backward pass for each."""
    fixed, states = Pixels(model.pixels, model.hidden.bias.size).astype("float64"), [ops.zeros(1, 6, dtype="float64")]
    for (_, p), (_, q) in zip(fixed.named_parameters(), model.named_parameters(), strict=True):
        p.assign(q.numpy())

    def following(net: Pixels, h: Any, t: int) -> Any:
        return nn.functional.softplus(net.hidden(h) + net.read(x[:, t - 1 : t]))

    for t in range(1, model.pixels):
        states.append(following(fixed, states[-1], t).detach())
    total: Any = 0.0
    for t in range(model.pixels - 1, 0, -1):
        h, loss = states[t - 1], None
        model.hidden.weight.grad = None
        for j in range(t, min(t + steps, model.pixels)):
            h = following(model if j == t else fixed, h, j)
            apart = fixed.out(h) - x[:, j : j + 1]
            own = (apart * apart).mean() * (1 / model.pixels)
            loss = own if loss is None else loss + own
        assert loss is not None
        loss.backward()
        total = total + model.hidden.weight.grad.numpy()
    return total


@pytest.mark.few(2)
@pytest.mark.parametrize("sweeps", [1, 2, 5, 11])
def test_fewer_sweeps_than_time_steps_truncate_backpropagation_bit_for_bit(sweeps: int):
    x = DIGIT[:, :12]
    ml.seed(0)
    expected = truncated(Pixels(12, 6).astype("float64"), ml.array(x), sweeps)
    found = gradients(lambda: Pixels(12, 6), sweeps, x)[0]
    assert found.tobytes() == expected.tobytes()
    exact = gradients(lambda: Pixels(12, 6), None, x)[0]
    assert (exact.tobytes() == found.tobytes()) == (sweeps == 11)  # T - 1


def by_hand(model: Pixels, x: Any, sweeps: int) -> Any:
    """The gradient of W_h after so many sweeps, by the published rule in NumPy."""
    w, u, o = (layer.weight.numpy() for layer in (model.hidden, model.read, model.out))
    states, slopes = [np.zeros(len(w))], [np.zeros(len(w))]
    for t in range(1, 64):
        a = w @ states[-1] + u[:, 0] * x[0, t - 1]
        states.append(np.log1p(np.exp(a)))
        slopes.append(1 / (1 + np.exp(-a)))
    errors = np.array([2 / 64 * (o[0] @ h - v) * o[0] for h, v in zip(states, x[0], strict=True)])
    swept = np.zeros((65, len(w)))
    for _ in range(sweeps):
        swept[:64] = errors + np.concatenate([(np.array(slopes) * swept[:64])[1:] @ w, np.zeros((1, len(w)))])
    return sum(np.outer(slopes[t] * swept[t], states[t - 1]) for t in range(1, 64))


def test_errors_shrink_with_sweeps_as_published():
    """Published setting, NumPy's figures for one digit: .26, 8e-4, 5e-7, 7e-13 after 1, 5, 10, 20 sweeps."""
    ml.seed(0)
    model = Pixels(64, 32).astype("float64")
    exact, errors = gradients(lambda: Pixels(64, 32), None, DIGIT)[0], []
    for sweeps in (1, 5, 10, 20):
        found = gradients(lambda: Pixels(64, 32), sweeps, DIGIT)[0]
        np.testing.assert_allclose(found, by_hand(model, DIGIT, sweeps), rtol=1e-9, atol=1e-15)
        errors.append(np.linalg.norm(found - exact) / np.linalg.norm(exact))
    assert all(error < 5 * figure for error, figure in zip(errors, (0.26, 8e-4, 5e-7), strict=False))
    assert errors[0] > 0.1
    assert errors[3] < 1e-10


@pytest.mark.parametrize("sweeps", [1, 4, 8])
def test_on_unlimited_lanes_a_sweep_takes_one_time_step(sweeps: int):
    ml.seed(0)
    model = Pixels(24, 4)
    graph = ml.record(lambda x: model(x).backward(), np.zeros((1, 24), np.float32))
    found = jacobi(Draft.of(graph), sweeps)[0].graph

    names = [[t.name for t in g if t.kind == Kind.O and "hidden" in t.label] for g in (graph, found)]
    # of 23 states; the first sweep has the errors of the losses, each further one a product for all states at once
    # from which the last sweep can be reached
    assert (depth(graph, names[0]), len(names[0])) == (22, 22)
    assert (depth(found, names[1]), len(names[1])) == (sweeps - 1, (24 - sweeps) * (sweeps - 1))


def test_one_sweep_of_bptt_is_sltt():
    """Both leave errors in their time step. Their sums over time have another order."""
    def found(**told: Any) -> Any:
        recorded = Recorded(Job("snn", {"hidden": 16, "steps": 4, **told.pop("model_args")}, batch_size=8, **told))
        run = Trainer(recorded, ml.CostModel.analytic())
        run.step()
        return np.concatenate([p.numpy().ravel() for p in recorded.model.parameters()])

    sltt, bptt = ({"model_args": {"backward": way}} for way in ("sltt", "bptt"))
    swept = found(**bptt, backward="jacobi", sweeps=1)
    np.testing.assert_allclose(swept, found(**sltt), rtol=0, atol=1e-6)
    assert np.abs(swept - found(**bptt)).max() > 1e-5
    assert found(**bptt, backward="jacobi").tobytes() == found(**bptt).tobytes()


# ---------------------------------------------------------------------------------------------------- along the skips
class Blocks(nn.Module):
    """Residual blocks x + W relu(V x), as in the published figures; with `norm` a batch norm of V x."""

    def __init__(self, blocks: int = 16, width: int = 32, norm: bool = False) -> None:
        self.stem, self.head = nn.Linear(12, width), nn.Linear(width, 4)
        self.first = nn.ModuleList([nn.Linear(width, width) for _ in range(blocks)])
        self.norm = nn.ModuleList([nn.BatchNorm1d(width) for _ in range(blocks if norm else 0)])
        self.last = nn.ModuleList([nn.Linear(width, width) for _ in range(blocks)])

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for i, (first, last) in enumerate(zip(self.first, self.last, strict=True)):
            inner = first(x)
            x = x + last(nn.relu(self.norm[i](inner) if len(self.norm) else inner))
        return self.head(x)


class Attention(nn.Module):
    """Two blocks of a transformer, with dropout."""

    def __init__(self) -> None:
        self.stem = nn.Linear(12, 8)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        x = self.stem(x).reshape(1, 4, 8)
        for block in self.blocks:
            x = block(x)
        return self.head(x.reshape(4, 8))


@pytest.mark.parametrize("sweeps", [0, 1, 2, 5])
def test_k_sweeps_have_all_paths_through_at_most_k_blocks(sweeps: int):
    """Terms of order j in the blocks' Jacobians: P_l[j] = P_(l+1)[j] + P_(l+1)[j-1] J, in NumPy."""
    ml.seed(0)
    model, x = Blocks(6, 8).astype("float64"), X
    states = [x @ model.stem.weight.numpy().T + model.stem.bias.numpy()]
    masks = []
    for first, last in zip(model.first, model.last, strict=True):
        inner = states[-1] @ first.weight.numpy().T + first.bias.numpy()
        masks.append(inner > 0)
        states.append(states[-1] + np.maximum(inner, 0) @ last.weight.numpy().T + last.bias.numpy())
    logits = states[-1] @ model.head.weight.numpy().T + model.head.bias.numpy()
    p = np.exp(logits - logits.max(1, keepdims=True))
    paths = [(p / p.sum(1, keepdims=True) - np.eye(4)[Y]) / 4 @ model.head.weight.numpy()]
    for first, last, mask in reversed([*zip(model.first, model.last, masks, strict=True)]):
        through = [((w @ last.weight.numpy()) * mask) @ first.weight.numpy() for w in paths]
        paths = [a + b for a, b in zip([*paths, 0.0], [0.0, *through], strict=True)]
    found = gradients(lambda: Blocks(6, 8), sweeps, way=highway)[0]
    np.testing.assert_allclose(found, sum(paths[: sweeps + 1]).T @ X, rtol=1e-10, atol=1e-14)


class Rows(nn.Module):
    """Two rows of blocks, with a layer between; `stop`: gradients leave a block by its skip alone."""

    def __init__(self, stop: bool = False) -> None:
        self.layers, self.stop = nn.ModuleList([nn.Linear(12, 12) for _ in range(6)]), stop
        self.between, self.head = nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x: Any) -> Any:
        for i, layer in enumerate(self.layers):
            x = self.between(x) if i in (0, 3) else x
            x = nn.relu(x + ops.tanh(layer(x.detach() if self.stop else x)))
        return self.head(x)


def test_without_a_sweep_gradients_take_skips_alone_in_every_row_of_blocks():
    for found, expected in zip(gradients(Rows, 0, way=highway), gradients(lambda: Rows(stop=True), None), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-16)
    for found, exact in zip(gradients(Rows, 3, way=highway), gradients(Rows, None), strict=True):
        assert found.tobytes() == exact.tobytes()


def test_gradients_turn_to_the_exact_ones_as_published():
    """16 blocks; figures of the published rule, for other weights: cosines .46 .89 .985 .9986 .9999."""
    exact, *found = (np.concatenate([g.ravel() for g in gradients(Blocks, k, way=highway)])
                     for k in (None, 0, 1, 2, 3, 4))
    cosines = [f @ exact / np.linalg.norm(f) / np.linalg.norm(exact) for f in found]
    assert cosines == sorted(cosines)
    assert all(1 - c < 2 * (1 - figure)
               for c, figure in zip(cosines, (0.46, 0.89, 0.985, 0.9986, 0.9999), strict=True))


@pytest.mark.parametrize("sweeps", [0, 1, 3])
def test_on_unlimited_lanes_a_sweep_takes_one_block(sweeps: int):
    ml.seed(0)
    model = Blocks(8, 4)
    graph = ml.record(lambda x, y: nn.cross_entropy(model(x), y).backward(), X.astype("f"), Y)

    exact, swept = graph, highway(Draft.of(graph), sweeps)[0].graph
    found = [depth(g, [t.name for t in g if t.kind == Kind.O and any(x.kernel == "matmul" for x in t.launches)])
             for g in (exact, swept)]
    assert found == [1 + 16, 1 + 2 * sweeps + 1]  # the head's, two of each block; half a block for weight gradients


# ------------------------------------------------------------------------------------------------ products of Jacobians
DEEP = lambda: models.mlp(12, *[8] * 15, 4)  # noqa: E731


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", POLICIES)
def test_doubling_is_exact_up_to_the_order_of_sums_under_every_policy(policy: str):
    expected, found, remark = compared(deeppcr, DEEP, policy, steps=1)
    assert remark == "gradients are inexact in their last bits: products of Jacobians in 4 levels"
    assert found != expected
    assert close(found, expected, 1e-14)


def test_on_unlimited_lanes_doubling_takes_log2_of_the_layers():
    found = deeppcr(Draft.of(recorded(DEEP)[1]))[0].graph
    products = [t.name for t in found if "product" in t.label]
    assert depth(found, products) == 4  # 14 Jacobians below the loss's own layer
    assert len(products) == sum(14 - (1 << level) for level in range(4))


class Mixing(nn.Module):
    """Layers of sums over samples."""

    def __init__(self) -> None:
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])
        self.head, self.among = nn.Linear(12, 4), np.random.default_rng(0).random((4, 4))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = nn.relu(ml.array(self.among).matmul(layer(x)))
        return self.head(x)


# ------------------------------------------------------------------------------------------------------- command line
def test_networks_without_these_passes_are_refused_in_one_line(capsys):
    for told, why in (
        (["train", "--model-arg", "layers=1", "--backward", "jacobi"], "jacobi: gradients of this step"),
        (["train", "--sweeps", "2"], "--sweeps has no effect here; it goes with --backward jacobi"),
        (["plan", "--backward", "highway"], "highway: this network has no two residual blocks in a row"),
        (["plan", "--backward", "jacobi", "--sweeps", "0"], "jacobi: without a sweep no gradient leaves the last")):
        assert why in refusal(capsys, *told, "--model", "mlp")


@pytest.mark.parametrize("verb", [["train", "--steps", "2"], ["plan"], ["simulate"], ["explain", "4O0"]], ids=str)
def test_commands_say_that_gradients_are_inexact(verb: list[str], capsys):
    told = [*verb, "--model", "mlp", "--batch-size", "8", "--costs", "analytic", "--backward", "jacobi"]
    assert run_json(capsys, *told)[1]["remarks"] == []
    assert run_json(capsys, *told, "--sweeps", "1")[1]["remarks"] == [
        "gradients are inexact: 1 of the 2 sweeps of jacobi after which they are exact"]


def test_gradients_that_read_sums_over_micro_batches_are_refused():
    """Batch norm's output gradient reads the sums to which the second micro-batch adds."""
    graph = Recorded(Job(model="resnet20", model_args={"preset": "tiny"}, batch_size=8, micro_batches=2)).graph
    with pytest.raises(Refused, match="sweeps: gradients of a micro-batch read sums that hold another one's"):
        jacobi(Draft.of(graph))
