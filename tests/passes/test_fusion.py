"""Launches put together: the same mathematics under every schedule; on the CPU with the same bits."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import cuda_runtime
import numpy as np
import pytest
from helpers import bits, kernels

import minidl as ml
from minidl import models, nn, optim
from minidl.autograd.tape import Tape, current, use
from minidl.cli import main
from minidl.core.graph import Role, TaskGraph
from minidl.core.placement import Refused
from minidl.fusion import RULES, fused
from minidl.kernels import KERNELS
from minidl.runtime.checking import random_schedule
from minidl.runtime.executors import CheckingExecutor, GraphExecutor, SequentialExecutor, StreamExecutor

TINY = {"resnet20": {"preset": "tiny"}, "resnet50": {"preset": "tiny"}, "densenet121": {"preset": "tiny"},
        "mobilenet_v3_large": {"preset": "tiny"}, "mlp": {"hidden": 24}, "lenet": {}}
RNG = np.random.default_rng(0)


class Job:
    """A network with an optimizer, and two batches."""

    def __init__(self, name: str, optimizer: Any = lambda p: optim.SGD(p, 0.05, momentum=0.9), batch: int = 4,
                 device: Any = None, low: str = "float32") -> None:
        self.device, self.low = device or ml.device.cpu(), low
        with use(Tape(self.device)):
            ml.seed(3)
            self.model = models.create(name, **TINY[name])
            self.optimizer = optimizer(self.model.parameters())
            rng = np.random.default_rng(1)
            self.batches = [(rng.standard_normal((batch, *self.model.input_shape)).astype(np.float32),
                             rng.integers(0, self.model.classes, batch)) for _ in range(2)]
            self.graph = ml.record(self.step, *self.batches[0])

    def step(self, x: Any, y: Any) -> Any:
        with ml.autocast(self.low) if self.low != "float32" else nullcontext():
            loss = nn.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
        return loss

    def run(self, executor: Any) -> tuple[list[float], list[Any]]:
        losses = [float(executor(*batch)) for batch in self.batches]
        return losses, [t.numpy() for _, t in self.model.named_tensors()]

    def in_random_order(self, graph: TaskGraph) -> tuple[list[float], bytes]:
        """Losses, and the bits of all that is left."""
        schedule = random_schedule(graph, 3, np.random.default_rng(5))
        losses, left = self.run(StreamExecutor(graph, schedule, device=self.device))
        return losses, bits(*left)


#: of each rule that alone changes a step in float32 on the CPU, a network that it changes
WHERE = {"batch_norm_act": "densenet121", "batch_norm_grad": "resnet20", "squeeze_excite": "mobilenet_v3_large",
         "epilogue": "lenet", "slopes": "mlp", "weight_updates": "mlp", "updates": "lenet", "in_place": "resnet50"}


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "rules"), [*((name, [*RULES]) for name in TINY),
                                             *((name, [rule]) for rule, name in WHERE.items())], ids=str)
def test_on_the_cpu_the_bits_are_the_same(name, rules):
    plain, job = Job(name), Job(name)
    graph = fused(job.graph, job.device, rules)
    assert (kernels(graph), over(graph)) != (kernels(plain.graph), over(plain.graph))
    assert job.in_random_order(graph) == plain.in_random_order(plain.graph)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["resnet20", "densenet121", "mobilenet_v3_large"])
def test_any_legal_order_reads_what_it_means(name, seed):
    job = Job(name)
    graph = fused(job.graph, job.device)
    for _ in range(2):
        CheckingExecutor(graph, random_schedule(graph, 3, np.random.default_rng(seed)), seed=seed)(*job.batches[0])


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "batch"), [("resnet20", 2), ("densenet121", 2), ("mlp", 2),
                                             pytest.param("mobilenet_v3_large", 8, marks=pytest.mark.slow)])
def test_on_cuda_all_schedules_have_the_same_bits_and_the_mathematics_is_that_of_the_parts(name, batch):
    """Batch norm over two pixels, as the last ones of mobilenet would be of a batch of two, makes much of little."""
    plain = Job(name, batch=batch, device=cuda_runtime.device(0))
    wanted = plain.run(SequentialExecutor(plain.graph, plain.device))
    found = []
    for seed, kind in enumerate((StreamExecutor, GraphExecutor)):
        job = Job(name, batch=batch, device=cuda_runtime.device(seed))
        graph = fused(job.graph, job.device)
        found.append(job.run(kind(graph, random_schedule(graph, 3, np.random.default_rng(seed)), device=job.device)))
    assert found[0][0] == found[1][0]
    assert bits(*found[0][1]) == bits(*found[1][1])
    np.testing.assert_allclose(found[0][0], wanted[0], rtol=1e-4)
    for a, b in zip(found[0][1], wanted[1], strict=True):
        assert np.linalg.norm(a - b) <= 1e-3 * max(np.linalg.norm(b), 1e-3)


def test_what_is_left():
    count = {name: (kernels(Job(name).graph), kernels(fused(Job(name).graph, ml.device.cpu()))) for name in TINY}
    before, after = count["resnet20"]
    assert after["relu"] == after["relu_grad"] == 0
    assert after["sgd"] == after["linear_weight_update"] == after["sgd_many"] == 1  # of the bias beside its weight
    assert after["batch_norm_act"] + after["batch_norm"] == before["batch_norm"]
    before, after = count["densenet121"]
    assert after["batch_norm"] == after["relu"] == after["relu_grad"] == 0
    before, after = count["mlp"]
    assert after["relu"] == after["relu_grad"] == 0
    assert after["matmul_slope"] == before["relu"]
    before, after = count["mobilenet_v3_large"]
    assert after["hardswish"] <= 1
    assert after["batch_norm_act"] > 2 * after["batch_norm"]
    assert after["squeeze_excite"] == after["squeeze_excite_input_grad"] == 8
    assert after["hardsigmoid"] == after["mul"] == 0


@pytest.mark.parametrize(("low", "fewer"), [("float32", 2 * 4), ("bfloat16", 0)])
def test_slabs_take_the_copies_away_where_convolutions_take_gaps(low: str, fewer: int):
    """Of the second layer of each block; the first concat copies two things. With a growth of 4 channels in 16 bits,
    that layer begins 8 bytes after a multiple of 16, where cuDNN has few engines."""
    there = cuda_runtime.device()
    job = Job("densenet121", batch=2, device=there, low=low)
    found = fused(job.graph, there, ["slabs"])
    assert kernels(job.graph)["copy"] - kernels(found)["copy"] == fewer
    begins = [view.offset * 2 % 16 for task in found.launches for launch in task for view in launch.views
              if launch.kernel.startswith("conv2d") and view.dtype == "bfloat16"]
    assert (len(begins) > 50) == (low == "bfloat16")
    assert not any(begins)


@pytest.mark.few(1)
@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_one_launch_rounds_all_parameters(low):
    plain, job = (Job("mlp", device=cuda_runtime.device(seed), low=low) for seed in range(2))
    before, after = kernels(job.graph), kernels(found := fused(job.graph, job.device, ["casts"]))
    (many,) = [launch for task in found.launches for launch in task if launch.kernel == "cast_many"]
    weights = [view for view in many.reads if found.storages[view.storage].role == Role.PARAMETER]
    assert len(weights) == len(many.reads) >= 2
    assert {view.dtype for view in many.writes} == {low}
    assert before["cast"] - after["cast"] >= len(weights)
    assert job.in_random_order(found) == plain.in_random_order(plain.graph)


@pytest.mark.few(2)
@pytest.mark.parametrize("rule", [optim.AdamW, optim.NAdamW, optim.RMSprop, optim.SGD])
def test_gradients_of_few_samples_end_with_updates_part_by_part(rule: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("minidl.kernels.product_update.SIZE", 100)
    plain, job = (Job("mlp", lambda p: rule(p, 0.01), batch) for batch in (1, 1))
    before, found = kernels(job.graph), fused(job.graph, job.device, ["weight_updates"])
    assert kernels(found)["linear_weight_update"] == before["linear_weight_grad"] == 3
    assert max(ml.plan(found, "in_order").peak_bytes) < max(ml.plan(plain.graph, "in_order").peak_bytes)
    assert job.in_random_order(found) == plain.in_random_order(plain.graph)


def test_gradients_that_others_read_or_of_many_samples_stay():
    for job in (Job("mlp", lambda p: optim.SGD(p, 0.01, max_norm=1.0)), Job("mlp", batch=65)):
        assert kernels(fused(job.graph, job.device, ["weight_updates"]))["linear_weight_update"] == 0


class AlsoCalls(optim.SGD):
    """Calls other kernels around its own: on the parameter, on its rate, on its gradient in another shape."""

    def __init__(self, parameters: Any, calls: str) -> None:
        super().__init__(parameters, 0.05, momentum=0.9)
        self.calls, self.factor = calls, ml.array(np.float32(0.5))
        self.squares = [ml.array(np.zeros(1)) for _ in parameters]

    def update(self, i: int) -> None:
        p, rate, g = self.parameters[i], self._group_of[i].rate, self.gradient(i)
        if self.calls in ("decay", "rate"):
            changed = p if self.calls == "decay" else rate
            current().call("mul", [changed, self.factor], [changed])
        super().update(i)
        if self.calls == "after":
            current().call("mul", [p, self.factor], [p])
        if self.calls == "flat":
            current().call("square_sum", [g.seen((g.size,))], [self.squares[i]])


@pytest.mark.parametrize(("calls", "fused_ones"), [("decay", 0), ("rate", 0), ("flat", 0), ("after", 3)])
def test_an_update_comes_first_only_if_nothing_before_it_in_its_task_minds(calls: str, fused_ones: int):
    """And a gradient stays that another kernel of the task reads, in whatever shape."""
    plain, job = (Job("mlp", lambda p: AlsoCalls(p, calls), batch=4) for _ in range(2))
    found = fused(job.graph, job.device, ["weight_updates"])
    assert kernels(found)["linear_weight_update"] == fused_ones
    wanted = plain.run(SequentialExecutor(plain.graph))
    losses, values = job.run(SequentialExecutor(found))
    assert losses == wanted[0]
    assert bits(*values) == bits(*wanted[1])
    assert [s.numpy() for s in job.optimizer.squares] == [s.numpy() for s in plain.optimizer.squares]


def test_a_weight_that_its_own_gradient_reads_is_updated_as_a_whole(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("minidl.kernels.product_update.SIZE", 8)

    def left(rules: list[str]) -> list[Any]:
        ml.seed(2)
        layer = nn.Linear(6, 4)
        optimizer = optim.SGD(layer.parameters(), 0.1)

        def step(y: Any) -> Any:
            loss = nn.cross_entropy(layer(layer.weight.detach()), y)
            loss.backward()
            optimizer.step()
            return loss

        SequentialExecutor(fused(ml.record(step, np.arange(4)), ml.device.cpu(), rules))(np.arange(4))
        return [p.numpy() for p in layer.parameters()]

    assert bits(*left(["weight_updates"])) == bits(*left([]))


def test_the_last_parameter_may_be_given_first():
    """The bias then has its update before its gradient's launch, which comes first."""
    plain, job = (Job("mlp", lambda p: optim.SGD(p[::-1], 0.05, momentum=0.9), batch=4) for _ in range(2))
    found = fused(job.graph, job.device, ["weight_updates"])
    assert kernels(found)["linear_weight_update"] == 3
    assert job.run(SequentialExecutor(found))[0] == plain.run(SequentialExecutor(plain.graph))[0]


def test_updates_stay_where_they_are_if_no_gradient_ends_with_one():
    """Data-parallel ranks take a step that ends with its updates."""
    job = Job("mlp", batch=65)
    found = fused(job.graph, job.device, ["weight_updates"])
    assert [found.name(t) for t in range(len(found))] == [job.graph.name(t) for t in range(len(job.graph))]
    assert ml.plan(found, "barrier", machine=ml.Machine(2)).graph.kind[-1] == ml.Kind.U


def test_adam_with_clipping():
    plain, job = (Job("lenet", lambda p: optim.AdamW(p, 0.01, max_norm=0.1)) for _ in range(2))
    graph = fused(job.graph, job.device, ["updates"])
    assert kernels(graph)["adam_many"] == 1
    assert job.in_random_order(graph) == plain.in_random_order(plain.graph)


def test_a_value_that_somebody_else_needs_stays():
    """The batch norm's output is returned, so it cannot vanish into the activation."""
    ml.seed(0)
    norm = nn.BatchNorm1d(3)

    def step(x: Any) -> Any:
        y = norm(x)
        return y, ml.ops.relu(y)

    graph = ml.record(step, np.zeros((4, 3), np.float32))
    assert kernels(fused(graph, current().device)) == kernels(graph)


class Excited:
    """A squeeze-and-excite block between convolutions, and what is done with it besides."""

    def __init__(self, besides: str, device: Any = None) -> None:
        self.device, self.besides = device or ml.device.cpu(), besides
        with use(Tape(self.device)):
            ml.seed(5)
            self.parts = [nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1), nn.Conv2d(8, 2, 1)]
            self.parameters = [p for part in self.parts for p in part.parameters()]
            self.optimizer = optim.SGD(self.parameters, 0.1)
            self.x = np.random.default_rng(2).standard_normal((3, 4, 5,
                                                               3 if besides != "image" else 8)).astype(np.float32)
            self.graph = ml.record(self.step, self.x)

    def step(self, image: Any) -> Any:
        before, fc1, fc2, after = self.parts
        if self.besides in HALVES:
            with ml.autocast(self.besides):
                loss = ml.ops.mean(after(self.excite(before(image), fc1, fc2)[0]))
        elif self.besides == "eval":
            with ml.no_grad():
                return after(self.excite(before(image), fc1, fc2)[0])
        else:
            y, kept = self.excite(image if self.besides == "image" else before(image), fc1, fc2)
            loss = ml.ops.mean(after(y))
        loss.backward()
        self.optimizer.step()
        return (loss, kept) if self.besides.startswith("returns") else loss

    def excite(self, x: Any, fc1: Any, fc2: Any) -> Any:
        besides, earlier = self.besides, ml.ops.tanh(x) if self.besides == "x before" else None
        r = fc1(ml.ops.mean(x, (1, 2), keepdims=True))
        hidden = ml.ops.sigmoid(r) if besides == "sigmoid" else ml.ops.relu(r)
        pre = fc2(hidden)
        gate = ml.ops.hardsigmoid(pre)
        y = gate * x if besides == "gate first" else x * gate
        more = {"x before": earlier, "x after": x, "r": r, "hidden": hidden, "pre": pre, "gate": gate}.get(besides)
        kept = {"returns hidden": hidden, "returns pre": pre, "returns gate": gate, "returns r": r}.get(besides)
        return y if more is None else y + ml.ops.mean(more, 3, keepdims=True), kept

    def run(self, graph: TaskGraph, seed: int = 0) -> bytes:
        schedule = random_schedule(graph, 2, np.random.default_rng(seed))
        for _ in range(2):
            out = StreamExecutor(graph, schedule, device=self.device)(self.x)
        return bits(*(o.numpy() for o in (out if isinstance(out, tuple) else (out,))),
                    *(p.numpy() for p in self.parameters))


HALVES = ("bfloat16", "float16")
TOGETHER = ("nothing", "x before", "returns hidden", "returns pre")
FORWARD = ("eval", "image")  #: no gradient, or none toward x: its tasks stay, and read what they read before
APART = ("x after", "r", "hidden", "pre", "gate", "returns r", "returns gate", "sigmoid", "gate first")


@pytest.mark.parametrize("besides", [*TOGETHER, *FORWARD, *APART])
def test_squeeze_and_excite_is_put_together_where_nobody_else_needs_its_parts(besides):
    plain, job = Excited(besides), Excited(besides)
    graph = fused(job.graph, job.device, ["squeeze_excite"])
    found = kernels(graph)
    together = besides not in APART
    assert (found["squeeze_excite"], found["squeeze_excite_input_grad"]) == (together, besides in TOGETHER)
    assert together or found == kernels(plain.graph)
    assert job.run(graph) == plain.run(plain.graph)
    CheckingExecutor(graph, random_schedule(graph, 3, np.random.default_rng(1)), seed=1)(job.x)


@pytest.mark.few(1)
@pytest.mark.parametrize("besides", ["nothing", *HALVES])
def test_squeeze_and_excite_on_cuda(besides):
    """In 16 bits, too, where weights are cast by the tasks that are put together."""
    plain = Excited(besides, cuda_runtime.device(0))
    plain.run(plain.graph)
    found = []
    for seed in range(2):
        job = Excited(besides, cuda_runtime.device(seed))
        graph = fused(job.graph, job.device, ["squeeze_excite"])
        assert kernels(graph)["squeeze_excite_input_grad"] == 1
        assert kernels(graph)["cast"] == kernels(job.graph)["cast"]
        found.append(job.run(graph, seed))
    assert found[0] == found[1]
    tolerance = 1e-5 if besides == "nothing" else 2e-2
    for a, b in zip(job.parameters, plain.parameters, strict=True):
        assert np.linalg.norm(a.numpy() - b.numpy()) <= tolerance * np.linalg.norm(b.numpy())


def test_no_task_keeps_scratch_of_a_launch_that_has_gone():
    """Batch norm's sums become part of another launch, which has scratch of its own."""
    job = Job("resnet20", batch=2, device=cuda_runtime.device(0))
    for task in fused(job.graph, job.device):
        used = {view.storage for launch in task.launches for view in launch.views}
        assert {b.storage for b in task.writes if b.role == Role.WORKSPACE} <= used, task.name


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["resnet20", "densenet121", "mobilenet_v3_large"])
def test_both_gradients_of_a_batch_norm_are_one_task(name: str):
    """On the stand-in this rule changes no bit."""
    rules = [r for r in RULES if r != "batch_norm_grad"]
    apart, job = (Job(name, batch=8, device=cuda_runtime.device(seed)) for seed in range(2))
    before, after = fused(apart.graph, apart.device, rules), fused(job.graph, job.device, [*rules, "batch_norm_grad"])
    norms = [kernels(before)[k] for k in ("batch_norm_weight_grad", "batch_norm_act_weight_grad")]
    assert kernels(after)["batch_norm_grad"] == sum(norms) > 0
    assert len(after) == len(before) - sum(norms)
    assert job.in_random_order(after) == apart.in_random_order(before)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v3_large"])
def test_products_add_to_a_gradient_in_place(name: str):
    """On the stand-in this rule changes no bit; no task adds what a product could."""
    rules = [r for r in RULES if r != "additions"]
    apart, job = (Job(name, batch=8, device=cuda_runtime.device(seed)) for seed in range(2))
    before, after = fused(apart.graph, apart.device, rules), fused(job.graph, job.device)
    added = kernels(after)["matmul_add"]
    assert 0 < added == kernels(before)["add"] - kernels(after)["add"]
    assert job.in_random_order(after) == apart.in_random_order(before)


class Branch(nn.Module):
    """f(x + y), y = g(x w): the sum's gradient goes to x in two ways. Without g the weight gradient of w reads it."""

    def __init__(self, read_late: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.read_late = read_late

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        y = self.inner(x)
        return self.last(x + (y if self.read_late else y.relu()))


@pytest.mark.parametrize("read_late", [False, True])
def test_a_gradient_that_a_weight_gradient_needs_is_not_overwritten(read_late: bool):
    found = []
    for rules in ((), ("additions",)):
        ml.seed(0)
        net = Branch(read_late)
        opt = optim.SGD(net.parameters(), 0.1)

        def step(x: Any, net: Any = net, opt: Any = opt) -> Any:
            y = net(x)
            loss = (y * y).mean()
            loss.backward()
            opt.step()
            return loss

        graph = fused(ml.record(step, RNG.standard_normal((4, 6)).astype("f")), ml.device.cpu(), rules)
        x = np.linspace(-1, 1, 24, dtype="f").reshape(4, 6)
        for seed in range(3):
            loss = CheckingExecutor(graph, random_schedule(graph, 3, np.random.default_rng(seed)), seed=seed)(x)
        assert kernels(graph)["matmul_add"] == (bool(rules) and not read_late)
        found.append((float(loss), bits(*(p.numpy() for p in net.parameters()))))
    assert found[0] == found[1]


@pytest.mark.parametrize("policy", ["barrier", "priority", "dear"])
def test_ranks_do_not_sum_anything_else_for_a_gradient_that_its_update_makes(policy: str):
    """They would have summed the other operand of the product: the step ends with its updates, and has no bias."""
    layer = nn.Linear(6, 4, bias=False)
    optimizer = optim.SGD(layer.parameters(), 0.1)

    def step(x: Any, y: Any) -> None:
        nn.cross_entropy(layer(x), y).backward()
        optimizer.step()

    graph = ml.record(step, np.ones((4, 6), np.float32), np.arange(4))
    assert ml.plan(graph, policy, machine=ml.Machine(2)).schedule.ranks == 1
    with pytest.raises(Refused, match=r"0U0 makes the gradient that it uses, so ranks cannot sum it before; leave out "
                                      r"the fusion rule weight_updates"):
        ml.plan(fused(graph, ml.device.cpu(), ["weight_updates"]), policy, machine=ml.Machine(2))


def over(graph: TaskGraph) -> list[str]:
    """The kernels that write a result over what they read, but for updates."""
    return sorted(launch.kernel for t in np.flatnonzero(graph.kind != ml.Kind.U) for launch in graph.launches[t]
                  if {v.storage for v in launch.reads} & {v.storage for v in launch.writes})


def test_a_recurrent_layer_needs_no_memory_for_its_gates():
    def made() -> tuple[Any, TaskGraph]:
        ml.seed(1)
        layer = nn.LSTM(3, 5)
        x = np.random.default_rng(0).standard_normal((6, 4, 3)).astype(np.float32)

        def step(x: Any) -> Any:
            loss = nn.relu(layer(x)[0]).square().mean()
            loss.backward()
            return loss, *(p.grad for p in layer.parameters())

        return x, ml.record(step, x)

    x, graph = made()
    found = fused(graph, ml.device.cpu(), ["in_place"])
    assert {"lstm", "lstm_grad", "relu_grad"} <= {*over(found)} - {*over(graph)}
    assert ml.plan(found, "in_order").peak_bytes[0] < ml.plan(graph, "in_order").peak_bytes[0]
    wanted = bits(*(np.asarray(v) for v in SequentialExecutor(graph)(x)))
    for seed in range(3):
        run = CheckingExecutor(found, random_schedule(found, 3, np.random.default_rng(seed)), seed=seed)
        assert bits(*(np.asarray(v) for v in run(x))) == wanted


@pytest.mark.parametrize("later", ["nothing", "the user", "a weight gradient", "another function's gradient"])
def test_only_what_nobody_needs_afterwards_is_written_over(later: str):
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)

    def step(x: Any) -> Any:
        h = first(x)
        loss = nn.relu(h).sum()
        if later == "a weight gradient":
            loss = loss + second(h).sum()
        elif later == "another function's gradient":
            loss = loss + nn.gelu(h).sum()
        loss.backward()
        return (loss, h) if later == "the user" else loss

    found = fused(ml.record(step, np.ones((4, 4), np.float32)), ml.device.cpu(), ["in_place"])
    assert ("relu" in over(found)) == (later == "nothing")


def test_arrays_that_a_launch_lacks_are_not_written_over(monkeypatch: pytest.MonkeyPatch):
    graph = ml.record(lambda x: nn.relu(x * 2.0).sum(), np.ones((4, 4), np.float32))
    monkeypatch.setattr(KERNELS["relu"], "over", [(1, 0), (0, 1)])
    assert "relu" not in over(fused(graph, ml.device.cpu(), ["in_place"]))


def test_stages_write_over_nothing_of_each_other(capsys: pytest.CaptureFixture[str]):
    job = ("train", "--model", "lenet", "--batch-size", "8", "--steps", "2", "--costs", "analytic", "--parallel",
           "pipeline", "--ranks", "2", "--micro-batches", "4", "--scheduler", "zb_h1", "--json")
    found = set()
    for rules in ("none", "in_place"):
        assert main([*job, "--fusion", rules]) == 0
        found.add(json.loads(capsys.readouterr().out)["params_sha256"])
    assert len(found) == 1


def test_an_unknown_rule():
    with pytest.raises(ValueError, match="unknown fusion 'everything'; known: casts, batch_norm_act, batch_norm_grad, "
                                         "squeeze_excite, flash_attention, epilogue, slabs, additions, slopes, "
                                         "weight_updates, updates, in_place"):
        fused(Job("mlp").graph, ml.device.cpu(), ["everything"])
