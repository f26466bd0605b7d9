"""What has changed since a step was recorded: each call notices, whatever runs it, and other steps go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minidl as ml
from minidl import nn, optim, schedulers
from minidl.autograd import tape as tapes
from minidl.core.machine import Machine
from minidl.pricing.cost import CostModel
from minidl.runtime.comm.loopback import LoopBack
from minidl.runtime.executors import CheckingExecutor, DistributedExecutor, SequentialExecutor, StreamExecutor

X, Y = np.random.default_rng(0).random((4, 3), np.float32), np.array([0, 1, 0, 1])


class Net(nn.Module):
    """With all that a step may read: layers, lists, a number, a counter that forward sets, what no step reads."""

    def __init__(self, *layers: nn.Module) -> None:
        self.body, self.head, self.unused = nn.ModuleList(layers or [nn.Linear(3, 4), nn.Dropout(0.5)]), \
            nn.Linear(4, 2), nn.Linear(4, 5)
        self.scale, self.calls, self.epoch = 2.0, 0, 0
        self.tied = self.head.weight

    def forward(self, x: Any) -> Any:
        self.calls += 1
        for layer in self.body:
            x = layer(x)
        return self.head(x) * self.scale + (x @ self.tied.transpose(0, 1)) * 0.1


class Run:
    """A network, its optimizer, and a step that `kind` runs."""

    def __init__(self, kind: Callable[[Any], Any] = SequentialExecutor, *layers: nn.Module, **arguments: Any) -> None:
        self.net = Net(*layers)
        self.opt = optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9, **arguments)
        self.run = kind(ml.record(self.step, X, Y))

    def step(self, x: Any, y: Any) -> Any:
        loss = nn.cross_entropy(self.net(x), y)
        loss.backward()
        self.opt.step()
        return loss

    def __call__(self) -> Any:
        return self.run(X, Y)


def two_lanes(graph: Any, kind: Any = StreamExecutor) -> Any:
    return kind(graph, schedulers.multi_stream(graph))


def on_a_rank(graph: Any) -> Any:
    plan = schedulers.plan(graph, "barrier", CostModel.analytic(), Machine(ranks=1))
    return DistributedExecutor(plan.graph, plan.schedule, LoopBack.ranks(1)[0])


KINDS = [SequentialExecutor, two_lanes, lambda graph: two_lanes(graph, CheckingExecutor), on_a_rank]


def put(thing: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets an attribute; returns how to undo it."""
    before = getattr(thing, name)
    setattr(thing, name, value)
    return lambda: setattr(thing, name, before)


def _frozen(r: Run) -> Any:
    r.net.head.requires_grad_(False)
    return lambda: r.net.head.requires_grad_()


def _evaluating(r: Run) -> Any:
    r.net.eval()
    return r.net.train


def _deleted(r: Run) -> Any:
    before = r.net.head.bias
    del r.net.head.bias
    return lambda: setattr(r.net.head, "bias", before)


def _other(p: Any) -> nn.Parameter:
    return nn.Parameter(np.zeros(p.shape, p.dtype))


NOTICED = {
    r"net/head.weight.requires_grad changed from True to False \(and 1 more\)": _frozen,
    "net/body/1.training changed from True to False|net/1.training changed from True to False": _evaluating,
    "net/1.p changed from 0.5 to 0.25": lambda r: put(r.net.body[1], "p", 0.25),
    "net/head.weight was replaced": lambda r: put(r.net.head, "weight", _other(r.net.head.weight)),
    "net.tied was replaced": lambda r: put(r.net, "tied", _other(r.net.tied)),
    "net/head.bias was removed": _deleted,
    "net.head was replaced": lambda r: put(r.net, "head", nn.Linear(4, 2)),
    "net/body.0 was replaced": lambda r: put(r.net.body, "0", nn.Linear(3, 4)),
    "net.scale changed from 2.0 to 3.0": lambda r: put(r.net, "scale", 3.0),
    "net/head.forward was (added|replaced)": lambda r: (put(r.net.head, "forward", lambda x: x),
                                                       lambda: delattr(r.net.head, "forward"))[1],
    "SGD.momentum changed from 0.9 to 0.5": lambda r: put(r.opt, "momentum", 0.5),
    "SGD.nesterov changed from False to True": lambda r: put(r.opt, "nesterov", True),
    "SGD.weight_decay changed from 0.0 to 0.1": lambda r: put(r.opt, "weight_decay", 0.1),
    "SGD.max_norm changed from None to 1.0": lambda r: put(r.opt, "max_norm", 1.0),
}


@pytest.mark.parametrize("kind", KINDS, ids=["sequential", "streams", "checking", "rank"])
def test_a_call_names_what_has_changed_and_runs_once_that_is_undone(kind):
    changed, other = Run(kind), Run(kind)
    changed()
    for says, change in NOTICED.items():
        undo = change(changed)
        before = changed.net.state_dict()
        with pytest.raises(RuntimeError, match=f"^({says}) since this step was recorded; record it again") as caught:
            changed()
        assert "\n" not in str(caught.value)
        after = changed.net.state_dict()
        assert all(np.array_equal(before[name], after[name]) for name in before), "nothing has run"
        other()
        undo()
        changed()


def test_a_change_before_the_executor_is_made_is_noticed_as_well():
    r = Run(lambda graph: graph, nn.Linear(3, 4))
    bias = r.net.body[0].bias
    bias.requires_grad = False
    with pytest.raises(RuntimeError, match="bias.requires_grad changed from True to False"):
        two_lanes(r.run)(X, Y)
    frozen, before = ml.record(r.step, X, Y), bias.numpy().copy()
    SequentialExecutor(frozen)(X, Y)
    assert np.array_equal(bias.numpy(), before)
    bias.requires_grad = True
    SequentialExecutor(r.run)(X, Y)
    assert not np.array_equal(bias.numpy(), before)
    with pytest.raises(RuntimeError, match="changed from False to True"):
        SequentialExecutor(frozen)(X, Y)


def test_what_no_step_reads_may_change_and_the_learning_rate():
    r = Run(SequentialExecutor, nn.Linear(3, 4))
    r()
    r.net.epoch, r.net.unused, r.net.more, r.opt.lr = 3, nn.Linear(1, 1), nn.Linear(1, 1), 0.01
    r.net.unused.requires_grad_(False)
    r.net.calls = 7  # the step sets it itself
    r.net.eval()  # nothing here drops or normalises, so the step is the same
    r()
    seen = tapes.changes
    r.opt.lr = 0.02
    r.net.load_state_dict(r.net.state_dict())
    r()
    assert tapes.changes == seen, "the next call need not look"


def test_what_a_step_sets_itself_does_not_count():
    r = Run()

    def step(x: Any, y: Any) -> Any:
        r.net.train()
        r.net.head.requires_grad_(False)
        loss = r.step(x, y)
        r.net.head.requires_grad_(True)
        return loss

    run = SequentialExecutor(ml.record(step, X, Y))
    r.net.eval()
    r.net.head.requires_grad_(False)
    run(X, Y)


def test_added_layers_and_parameter_groups_and_another_type_are_noticed():
    r = Run(lambda graph: graph, nn.Sequential(nn.Linear(3, 4)))
    r.opt = optim.Adam(r.net.parameters(), lr=0.1, weight_decay=0.1)
    r.run = SequentialExecutor(ml.record(r.step, X, Y))
    r.net.body[0].append(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"0\.1 was added since"):
        r()
    del r.net.body[0].__dict__["1"]
    r()
    r.opt.betas = 0.8, 0.9
    with pytest.raises(RuntimeError, match=r"Adam.betas changed from \(0.9, 0.999\) to \(0.8, 0.9\) since"):
        r()
    r.opt.betas = 0.9, 0.999
    r.opt.add_param_group({"params": [nn.Parameter(np.ones(2, np.float32))], "lr": 0.5})
    with pytest.raises(RuntimeError, match="Adam.parameters was replaced"):
        r()
    assert [len(states) for states in r.opt.states.values()] == [7, 7]
    assert r.opt.param_groups[1]["lr"] == 0.5
    r = Run()
    r.net.astype("float64")
    with pytest.raises(RuntimeError, match=r"net.*weight.storage was replaced \(and 3 more\)"):
        r()


def test_arguments_of_optimizers_are_those_of_the_next_eager_step():
    r, same = Run(), Run(nesterov=True, weight_decay=0.1)
    same.net.load_state_dict(r.net.state_dict())
    r.opt.nesterov, r.opt.weight_decay = True, 0.1
    for _ in range(2):
        for one in (r, same):
            one.net.eval()
            one.step(ml.array(X), ml.array(Y))
    found = same.net.state_dict()
    assert all(np.array_equal(value, found[name]) for name, value in r.net.state_dict().items())
    plain = optim.SGD(r.net.parameters(), lr=0.1)
    plain.momentum = 0.9  # it gets its states when it needs them
    nn.cross_entropy(r.net(X), ml.array(Y)).backward()
    plain.step()
    assert any(state.numpy().any() for state in plain.states["momentum"])


def test_gradients_of_a_recorded_step_are_kept_by_returning_them():
    net = nn.Linear(3, 2)
    opt = optim.SGD(net.parameters(), lr=0.1)

    def gradients(x: Any, y: Any) -> Any:
        nn.cross_entropy(net(x), y).backward()
        return [p.grad for p in net.parameters()]

    run = SequentialExecutor(ml.record(gradients, X, Y))
    found = run(X, Y)
    with pytest.raises(RuntimeError, match=r"A recorded step drops its gradients.*return them \(parameter.grad\)"):
        opt.step()
    for p, g in zip(net.parameters(), found, strict=True):
        p.grad = g
    expected = [p.numpy() - np.float32(0.1) * g.numpy() for p, g in zip(net.parameters(), found, strict=True)]
    opt.step()
    assert all(np.allclose(p.numpy(), value, rtol=1e-6) for p, value in zip(net.parameters(), expected, strict=True))
    with pytest.raises(ml.ShapeError, match=r"the gradient of .*weight must be float32 \(2, 3\) as it is"):
        net.weight.grad = net.bias


def test_a_tensor_that_is_given_a_gradient_is_noticed():
    net, factor = nn.Linear(2, 2), ml.array(np.ones((3, 2), np.float32))

    def step(x: Any) -> Any:
        loss = net(x @ factor).sum()
        loss.backward()
        return loss

    run = SequentialExecutor(ml.record(step, X))
    run(X)
    factor.requires_grad_()
    with pytest.raises(RuntimeError, match=r"requires_grad changed from False to True since this step was recorded"):
        run(X)
