"""Optimizers against torch's, clipping by global norm, learning-rate schedules, gradients summed over micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from any_order import same_in_any_order
from helpers import random_array, refuses, torch_or_skip
from hypothesis import given
from hypothesis import strategies as st

import minidl as ml
from minidl import nn, optim
from minidl.core.tasks import Kind
from minidl.devices.device import cpu
from minidl.fusion import fused


def groups(parameters: Any) -> list[dict[str, Any]]:
    """The weights, and the biases with a smaller rate and no decay."""
    some = list(parameters)
    return [{"params": some[::2], "weight_decay": 0.2}, {"params": some[1::2], "lr": 0.02, "weight_decay": 0.0}]


ARGUMENTS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "sgd": ("SGD", (), {}), "sgd decay": ("SGD", (), {"weight_decay": 0.2}),
    "momentum": ("SGD", (0.9,), {"weight_decay": 0.2}),
    "nesterov": ("SGD", (0.9,), {"weight_decay": 0.2, "nesterov": True}),
    "adam": ("Adam", (), {}), "adam decay": ("Adam", ((0.8, 0.9), 0.01, 0.2), {}), "rmsprop": ("RMSprop", (), {}),
    "rmsprop momentum": ("RMSprop", (0.9, 0.01, 0.2, 0.8), {}), "rmsprop centered": ("RMSprop", (), {"centered": True}),
    "rmsprop centered momentum": ("RMSprop", (0.9, 0.01, 0.2, 0.8, True), {}),
    "groups": ("SGD", (0.9,), {"weight_decay": 0.3}), "groups of adam": ("Adam", (), {}), "adamw": ("AdamW", (), {}),
    "adamw decay": ("AdamW", ((0.8, 0.9), 0.01, 0.5), {}),
    "nadamw": ("NAdamW", ((0.99, 0.999),), {"weight_decay": 0.01}),
    "nadamw decay": ("NAdamW", ((0.8, 0.9), 0.01, 0.5, 0.1), {})}


def made(name: str, library: Any, parameters: Any) -> Any:
    """An optimizer of ours or torch's, whose NAdam has the decoupled weight decay if it is asked to."""
    if name == "muon":
        some = list(parameters)
        return optim.Muon([p for p in some if len(p.shape) == 2], 0.1, others=[p for p in some if len(p.shape) != 2])
    kind, args, named = ARGUMENTS[name]
    if kind == "NAdamW" and library is not optim:
        kind, named = "NAdam", {**named, "decoupled_weight_decay": True}
    return getattr(library, kind)(groups(parameters) if "groups" in name else parameters, 0.1, *args, **named)


class Net(nn.Module):
    def __init__(self) -> None:
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x).tanh())


def torch_net(model: Net) -> Any:
    torch = torch_or_skip()
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    with torch.no_grad():
        for p, q in zip(net.parameters(), model.parameters(), strict=True):
            p.copy_(torch.tensor(q.numpy()))
    return net


@pytest.mark.parametrize("clip", [None, 0.05, 100.0])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_five_steps_are_torchs(name: str, clip: float | None) -> None:
    torch = torch_or_skip()
    model = Net().astype("float64")
    net = torch_net(model)
    mine, theirs = made(name, optim, model.parameters()), made(name, torch.optim, net.parameters())
    mine.max_norm = clip
    # torch multiplies the powers of NAdam in float32
    rtol, atol = (1e-7, 1e-8) if "nadam" in name else (1e-9, 1e-12)
    for n in range(5):
        x, y = random_array((6, 5), n), random_array((6, 3), n + 10)
        nn.mse(model(ml.array(x)), ml.array(y)).backward()
        theirs.zero_grad()
        torch.nn.functional.mse_loss(net(torch.tensor(x)), torch.tensor(y)).backward()
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), clip).item()
        mine.step()
        theirs.step()
        if clip is not None:
            np.testing.assert_allclose(mine.norm, norm, rtol=max(atol, 1e-12))
    for p, q in zip(model.parameters(), net.parameters(), strict=True):
        np.testing.assert_allclose(p.numpy(), q.detach().numpy(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", [name for name in ARGUMENTS if "groups" not in name])
def test_a_parameter_counts_the_steps_in_which_it_had_a_gradient(name: str) -> None:
    """So layers that are thawed, or added, or that a branch leaves out, begin as in torch."""
    torch = torch_or_skip()
    values = [random_array((3,), i) for i in range(4)]
    w, t = [ml.Parameter(v) for v in values], [torch.tensor(v, requires_grad=True) for v in values]
    mine, theirs = made(name, optim, w[:3]), made(name, torch.optim, t[:3])
    for n, used in enumerate(([0, 2], [1], [0, 2], [0, 1, 2, 3], [3], [1, 3], [0, 1, 2, 3])):
        if n == 3:
            mine.add_param_group({"params": w[3:]})
            theirs.add_param_group({"params": t[3:]})
        theirs.zero_grad()
        for p in (w, t):
            sum((p[i] ** 2).sum() for i in used).backward()
        mine.step()
        theirs.step()
        for p, q in zip(w, t, strict=True):
            np.testing.assert_allclose(p.numpy(), q.detach().numpy(), rtol=1e-6 if "nadam" in name else 1e-10)


@pytest.mark.parametrize("name", ["adam", "nadamw", "adamw decay"])
@pytest.mark.parametrize("rules", [None, ("updates",), ("weight_updates",)])
def test_steps_of_some_parameters_take_turns(name: str, rules: tuple[str, ...] | None) -> None:
    """Two recorded steps of one optimizer, one of which trains only some of its parameters."""
    def trained(recorded: bool) -> list[Any]:
        ml.seed(1)
        model = Net()
        opt = made(name, optim, model.parameters())

        def step(x: Any, last: bool) -> Any:
            h = model.first(x).tanh()
            loss = (model.last(h.detach() if last else h) ** 2).sum()
            loss.backward()
            opt.step()
            return loss

        both = [lambda x, last=last: step(x, last) for last in (False, True)]
        example = random_array((6, 5), 0, "float32")
        runs: list[Any] = [lambda x, f=f: f(ml.array(x)) for f in both]
        if recorded:
            graphs = [ml.record(f, example) for f in both]
            runs = [ml.SequentialExecutor(fused(g, cpu(), rules) if rules else g) for g in graphs]
        every = [*model.parameters(), *(t for _, t in opt.named_tensors())]
        for n, which in enumerate((1, 0, 1, 1, 0, 0)):
            runs[which](random_array((6, 5), n, "float32"))
            if recorded and n == 2:  # one more step is undone, as by a checkpoint that is loaded
                saved = [t.numpy().copy() for t in every]
                runs[0](random_array((6, 5), 9, "float32"))
                for t, value in zip(every, saved, strict=True):
                    t.assign(value)
        return [p.numpy() for p in model.parameters()]

    for a, b in zip(trained(True), trained(False), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5 if rules else 0)


@pytest.mark.few(4)
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("name", ["muon", *ARGUMENTS])
def test_recorded_training_has_the_bits_of_eager_training(name: str, parts: int) -> None:
    """The batch in equal parts, the learning rate by a schedule."""
    def make() -> Any:
        ml.seed(2)
        model = Net()
        opt = made(name, optim, model.parameters())
        opt.max_norm = 0.05
        rate = optim.warmup(optim.step_decay(0.1, 2, 0.5), 2, 0.1)

        def step(*values: Any) -> Any:
            total = None
            for m in range(parts):
                with ml.micro_batch(m, m * 6 // parts):
                    loss = nn.mse(nn.dropout(model(values[2 * m]), 0.1), values[2 * m + 1]) * (1 / parts)
                    loss.backward()
                total = loss.detach() if total is None else total + loss.detach()
            opt.step()
            return total

        tensors = [*(t for _, t in model.named_tensors()), *(t for _, t in opt.named_tensors()), opt._norm]
        return step, tensors, lambda n: setattr(opt, "lr", rate(n))

    same_in_any_order(make, [[v for m in range(parts) for v in (random_array((6, 5), n, "float32")[m::parts],
                                                                random_array((6, 3), n + 10, "float32")[m::parts])]
                             for n in range(4)], range(2))


def test_gradients_of_micro_batches_add_up_to_that_of_the_batch() -> None:
    model = Net().astype("float64")
    x, y = random_array((6, 5)), random_array((6, 3), 1)
    nn.mse(model(ml.array(x)), ml.array(y)).backward()
    whole = [p.grad.numpy().copy() for p in model.parameters()]
    for p in model.parameters():
        p.used = True
    for m in range(3):
        with ml.micro_batch(m, 2 * m):
            (nn.mse(model(ml.array(x[2 * m : 2 * m + 2])), ml.array(y[2 * m : 2 * m + 2])) * (1 / 3)).backward()
    for p, g in zip(model.parameters(), whole, strict=True):
        np.testing.assert_allclose(p.grad.numpy(), g, rtol=1e-12)


def test_clipping_is_one_task_for_each_sum_and_one_for_the_factor() -> None:
    model = Net()
    opt = optim.SGD(model.parameters(), 0.1, max_norm=1.0)

    def step(x: Any) -> None:
        model(x).sum().backward()
        opt.step()

    graph = ml.record(step, random_array((2, 5), dtype="float32"))
    names = {task.index: [launch.kernel for launch in task.launches] for task in graph if task.kind == Kind.U}
    assert sum(kernels == ["square_sum"] for kernels in names.values()) == 4
    (factor,) = [i for i, kernels in names.items() if kernels == ["clip_factor"]]
    (launch,) = graph.launches[factor]
    names_read = [graph.storages[v.storage].name for v in launch.reads]
    assert names_read == [f"square sum {p.name}" for p in model.parameters()]  # added in this order
    assert opt.norm == 0  # nothing has run


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_parameter_without_axes_is_clipped_and_scaled_too(name: str) -> None:
    def trained(shape: tuple[int, ...]) -> Any:
        p = ml.Parameter(np.full(shape, 0.5, np.float32))
        opt = made(name, optim, [p])
        opt.max_norm, opt.scaler = 0.05, optim.GradScaler(8.0)
        for _ in range(3):
            (p * 3.0 + p * p).sum().backward(opt.scaler.scale)
            opt.step()
        return p.numpy().reshape(1)

    assert trained(()) == trained((1,)) != 0.5


def test_a_norm_that_is_not_finite_is_not_hidden() -> None:
    p = ml.Parameter(np.ones(2, np.float32))
    opt = optim.SGD([p], 0.1, max_norm=1.0)
    (p * float("nan")).sum().backward()
    opt.step()
    assert np.isnan(opt.norm)
    assert np.isnan(p.numpy()).all()
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="norm to clip at"):
            optim.SGD([p], 0.1, max_norm=bad)


def test_schedules_are_torchs() -> None:
    torch = torch_or_skip()
    kinds = torch.optim.lr_scheduler

    def theirs(make: Any, steps: int = 12) -> list[float]:
        opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.3)
        schedule, rates = make(opt), []
        for _ in range(steps):
            rates.append(opt.param_groups[0]["lr"])
            opt.step()
            schedule.step()
        return rates

    def check(rate: Any, make: Any) -> None:
        np.testing.assert_allclose([rate(n) for n in range(12)], theirs(make), rtol=1e-9, atol=1e-12)

    check(optim.step_decay(0.3, 5, 0.2), lambda o: kinds.StepLR(o, 5, 0.2))
    check(optim.cosine(0.3, 12, 0.01), lambda o: kinds.CosineAnnealingLR(o, 12, 0.01))
    check(optim.warmup(lambda n: 0.3, 4, 0.1), lambda o: kinds.LinearLR(o, 0.1, total_iters=4))
    check(optim.warmup(optim.cosine(0.3, 8), 4, 0.1),
          lambda o: kinds.SequentialLR(o, [kinds.LinearLR(o, 0.1, total_iters=4), kinds.CosineAnnealingLR(o, 8)], [4]))


@given(st.integers(1, 50), st.integers(1, 50), st.floats(0, 10))
def test_schedules_stay_between_nothing_and_the_peak(steps: int, ramp: int, peak: float) -> None:
    rate = optim.warmup(optim.cosine(peak, steps), ramp)
    values = [rate(n) for n in range(ramp + steps + 5)]
    assert all(0 <= v <= peak for v in values)
    assert values[ramp] == peak
    assert values[: ramp + 1] == sorted(values[: ramp + 1])
    assert values[ramp:] == sorted(values[ramp:], reverse=True)
    for make in (lambda: optim.cosine(1, 0), lambda: optim.warmup(rate, 0), lambda: optim.step_decay(1, 0)):
        with pytest.raises(ValueError, match="whole number >= 1"):
            make()


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e300, "0.1", None, True, 1j])
def test_numbers_that_make_no_sense_are_refused_by_name(value: Any) -> None:
    p = ml.Parameter(np.ones(2, np.float32))
    good = optim.SGD([p], 0.1)
    for make, name in ((lambda: optim.SGD([p], value), "learning rate"),
                       (lambda: setattr(good, "lr", value), "learning rate"),
                       (lambda: optim.SGD([p], 0.1, weight_decay=value), "weight decay"),
                       (lambda: optim.Adam([p], 0.1, weight_decay=value), "weight decay"),
                       (lambda: optim.AdamW([p], 0.1, weight_decay=value), "weight decay"),
                       (lambda: optim.Adam([p], eps=value), "eps")):
        refuses((make, f"the {name}|{name} is"), error=ValueError)
    assert good.lr == pytest.approx(0.1)
    if value != 1e300:
        for make in (lambda: optim.cosine(value, 3), lambda: optim.cosine(1.0, 3, value),
                     lambda: optim.step_decay(value, 3), lambda: optim.step_decay(1.0, 3, value),
                     lambda: optim.warmup(lambda n: 1.0, 3, value)):
            with pytest.raises(ValueError, match="it must be a finite number >= 0"):
                make()
    with pytest.raises(ValueError, match="at most 1"):
        optim.step_decay(1.0, 3, 1.5)
    with pytest.raises(ValueError, match="whole number"):
        optim.cosine(1.0, 2.5)  # type: ignore[arg-type]


def test_a_learning_rate_that_double_precision_has_is_taken_there() -> None:
    assert optim.SGD([ml.Parameter(np.ones(2))], 1e300).lr == 1e300


def test_the_rates_of_groups_are_set_together_or_one_by_one() -> None:
    model = Net()
    opt = optim.SGD(groups(model.parameters()), 0.1)
    assert [(round(g["lr"], 6), g["weight_decay"], len(g["params"])) for g in opt.param_groups] == [
        (0.1, 0.2, 2), (0.02, 0.0, 2)]
    assert [name for name, _ in opt.named_tensors()] == ["lr", "lr.1"]
    opt.lr = 0.2
    assert [g["lr"] for g in opt.param_groups] == pytest.approx([0.2, 0.04])
    opt.param_groups[1]["lr"] = 0.5
    assert [opt.lr, opt.param_groups[1]["lr"]] == pytest.approx([0.2, 0.5])
    with pytest.raises(TypeError, match="only the lr of a group can change; weight_decay is part of recorded steps"):
        opt.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(ValueError, match="the learning rate is -1"):
        opt.param_groups[0]["lr"] = -1


@pytest.mark.parametrize("recorded", [False, True])
def test_a_group_learns_at_its_own_rate(recorded: bool) -> None:
    """Also fused, and where it is set between recorded steps."""
    v, w = ml.Parameter(np.ones(3)), ml.Parameter(np.ones(3))
    opt = optim.SGD([{"params": [v]}, {"params": [w], "lr": 0.5}], 0.25)

    def step(x: Any) -> None:
        (v * x + w * x).sum().backward()
        opt.step()

    run = ml.SequentialExecutor(fused(ml.record(step, np.ones(3)), cpu())) if recorded else lambda x: step(ml.array(x))
    run(np.ones(3))
    assert (v.numpy()[0], w.numpy()[0]) == (0.75, 0.5)
    opt.param_groups[1]["lr"] = 0.0
    run(np.ones(3))
    assert (v.numpy()[0], w.numpy()[0]) == (0.5, 0.5)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.RMSprop])
def test_an_optimizer_whose_parameters_have_another_type_now_is_refused(kind: Any, recorded: bool) -> None:
    model = nn.Linear(3, 2)
    opt, before = kind(model.parameters(), lr=0.1), model.astype("float64").state_dict()

    def step(x: Any) -> None:
        model(x).sum().backward()
        opt.step()

    with pytest.raises(RuntimeError, match="weight is float64, and the optimizer was made for float32: make it after"):
        ml.record(step, np.ones((4, 3))) if recorded else step(ml.array(np.ones((4, 3))))
    assert all(np.array_equal(value, before[name]) for name, value in model.state_dict().items())
    model.astype("float32").zero_grad()
    step(ml.array(np.ones((4, 3), np.float32)))


def test_one_parameter_is_a_list_of_it_and_others_may_come_one_by_one() -> None:
    for form in (lambda p, q: [{"params": p}, {"params": q}],
                 lambda p, q: ({"params": (v for v in [x])} for x in (p, q)),
                 lambda p, q: (v for v in (p, q))):
        p, q = ml.Parameter(np.ones((2, 2))), ml.Parameter(np.ones(2))
        opt = optim.SGD(form(p, q), 0.5)
        (p.sum() + q.sum()).backward()
        opt.step()
        assert p.tolist() == [[0.5, 0.5], [0.5, 0.5]]
        assert q.tolist() == [0.5, 0.5]
    alone = ml.Parameter(np.ones(2))
    assert optim.SGD(alone, 0.5).parameters == [alone]


def test_a_group_keeps_the_ratio_with_which_it_was_added() -> None:
    """Not that to the rate with which the first one began, which a schedule has changed since."""
    p = [ml.Parameter(np.ones(2)) for _ in range(4)]
    opt = optim.SGD([{"params": p[0]}, {"params": p[1], "lr": 0.05}], 0.1)
    opt.lr = 0.02
    opt.add_param_group({"params": p[2]})
    opt.add_param_group({"params": p[3], "lr": 0.04})
    assert [g["lr"] for g in opt.param_groups] == pytest.approx([0.02, 0.01, 0.02, 0.04])
    opt.lr = 0.004
    assert [g["lr"] for g in opt.param_groups] == pytest.approx([0.004, 0.002, 0.004, 0.008])


def test_a_first_group_at_rest_has_no_ratio_to_others() -> None:
    opt = optim.SGD([{"params": ml.Parameter(np.ones(2)), "lr": 0.0}, {"params": ml.Parameter(np.ones(2))}], 0.1)
    with pytest.raises(ValueError, match="had the learning rate 0, to which others have no ratio"):
        opt.lr = 0.2
    assert [g["lr"] for g in opt.param_groups] == pytest.approx([0.0, 0.1])


def test_groups_refuse_what_they_cannot_have() -> None:
    p, q = ml.Parameter(np.ones(2)), ml.Parameter(np.ones(2))
    for wrong, message in (([p, {"params": [q]}], "parameters or groups of them, not both"),
                           ([np.ones(2)], "takes parameters, such as model.parameters.., not ndarray"),
                           ([{"params": [ml.ones(2)]}], "takes parameters, such as model.parameters.., not Tensor"),
                           ([{"params": [p], "momentum": 0.5}], "group 0 must have params, and may have lr and wei"),
                           ([{"params": [p]}, {"lr": 0.1}], "group 1 must have params"),
                           ([{"params": [p]}, {"params": [p]}], "given to the optimizer twice"),
                           ([{"params": [p], "weight_decay": -1}], "the weight decay is -1"),
                           ([{"params": [p], "lr": -1}], "the learning rate is -1"),
                           ([{"params": []}], "at least one")):
        with pytest.raises(ValueError, match=message) as caught:
            optim.SGD(wrong, 0.1)
        assert "\n" not in str(caught.value)
    for bad in ({"alpha": 1.0}, {"momentum": -0.1}, {"eps": -1.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            optim.RMSprop([p], 0.1, **bad)


@pytest.mark.parametrize(("optimizer", "arguments", "message"), [
    (optim.SGD, {"momentum": [0.1]}, r"momentum is \[0.1\]"), (optim.SGD, {"momentum": "0.9"}, "momentum is 0.9"),
    (optim.SGD, {"momentum": None}, "momentum is None"),
    (optim.Adam, {"betas": ("0.9", 0.9)}, r"betas are \('0.9', 0.9\)"),
    (optim.Adam, {"betas": ([0.9], 0.9)}, r"betas are \(\[0.9\], 0.9\)")])
def test_a_rate_is_a_number(optimizer, arguments, message):
    with pytest.raises(ValueError, match=f"^{message}; it must be at least 0 and below 1$"):
        optimizer([ml.Parameter(np.ones(3, np.float32))], 0.1, **arguments)
