"""Recording: what it costs besides the step's own code."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import numpy as np
import pytest

import minidl as ml
from minidl.system.process import paused


def test_no_garbage_is_collected_while_a_step_is_recorded():
    seen = []

    def step(x):
        seen.append(gc.isenabled())
        return x * 2.0

    ml.record(step, np.ones(3, np.float32))
    with pytest.raises(ZeroDivisionError):
        ml.record(lambda x: 1 / 0, np.ones(3, np.float32))
    assert seen == [False]
    assert gc.isenabled()


KEPT = ml.zeros(3)


def carried():
    """Steps that read a tensor from outside and put one of their own there, and the names of its places."""
    local, table, pair = ml.zeros(3), {"h": ml.zeros(3)}, (ml.zeros(3), ml.zeros(3))

    class Training:
        def __init__(self):
            self.h = ml.zeros(3)

        def step(self, x):
            self.h = x + self.h

    def in_a_global(x):
        global KEPT
        KEPT = x + KEPT

    def in_a_variable(x):
        nonlocal local
        local = x + local[:2].sum()

    def in_a_table(x):
        table["h"] = x + table["h"]

    def in_a_tuple(x):
        nonlocal pair
        pair = x, x + pair[1]

    return [(in_a_global, "KEPT"), (in_a_variable, "local"), (in_a_table, r"table\['h'\]"), (in_a_tuple, r"pair\[1\]"),
            (Training().step, "h")]


@pytest.mark.parametrize(("step", "place"), carried())
def test_a_step_that_hands_a_tensor_on_to_its_next_call_is_refused(step, place):
    with pytest.raises(RuntimeError, match=f"the step reads {place} and then sets it to a tensor of its own"):
        ml.record(step, np.ones(3, np.float32))


def test_a_step_may_leave_its_tensors_outside_and_read_what_stays():
    table = {"seen": ml.zeros(3), "constant": ml.ones(3)}

    def step(x):
        table["seen"] = x + table["constant"]
        return table["seen"] * 2.0

    graph = ml.record(step, np.ones(3, np.float32))
    assert ml.SequentialExecutor(graph)(np.ones(3, np.float32)).tolist() == [4.0, 4.0, 4.0]


def test_the_collector_goes_on_after_the_last_thread_that_paused_it():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with paused:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with paused:
        thread.start()
        inside.wait()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()
    gc.disable()
    try:
        with paused:
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_a_recording_makes_goes_without_the_collector():
    """Tensors, ops and tasks refer to each other in circles, also through views that no task reads."""
    made = []
    w = ml.nn.Parameter(np.ones((4, 3), np.float32))

    def step(x):
        middle = ml.tanh(ml.transpose(ml.reshape(x @ w, (3, 4))))
        loss = (middle * middle).mean()
        loss.backward()
        w.grad = None
        made.extend([weakref.ref(middle), weakref.ref(loss), weakref.ref(ml.autograd.tape.current())])
        return loss

    gc.disable()
    try:
        graph = ml.record(step, np.ones((4, 4), np.float32))
    finally:
        gc.enable()
    assert len(graph) > 5
    assert [ref() for ref in made] == [None] * 3


class Net(ml.nn.Module):
    """With a state, and what its forward pass sets."""

    def __init__(self):
        self.layer = ml.nn.Linear(3, 3)
        self.register_buffer("mean", np.zeros(3, np.float32))
        self.cell, self.pair, self.seen, self.calls = None, (ml.array(np.ones(3, np.float32)),), None, 0

    def forward(self, x):
        self.seen = self.layer(x)
        self.calls += 1
        return self.seen


def _own(net, name, value):
    """Reads the attribute; sets it to a value that the step computes."""
    before = getattr(net, name)
    setattr(net, name, value)
    return before


def _fills(net, y):
    if net.cell is None:
        net.cell = ml.zeros(3)
    net.cell = net.cell + y
    return net.cell


CARRIED = {
    "mean": lambda net, y: _own(net, "mean", net.mean * 0.9 + y),
    "cell": lambda net, y: _fills(net, y),
    "pair": lambda net, y: _own(net, "pair", (y, y)),
    "absent": lambda net, y: None if hasattr(net, "absent") else setattr(net, "absent", y),
}


@pytest.mark.parametrize("name", CARRIED)
def test_a_step_that_hands_on_a_value_to_its_next_run_is_refused_and_leaves_it_as_it_was(name):
    net, x = Net(), np.ones((4, 3), np.float32)
    before = vars(net).get(name, "none")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"^the step reads .*\.{name} and then sets it .*an input") as caught:
            ml.record(lambda x: CARRIED[name](net, net(x).mean(0)), x)
        assert "\n" not in str(caught.value)
        assert vars(net).get(name, "none") is before or name == "cell"
    net = Net()
    ml.record(lambda x: net(x) * net.seen, x)  # what a step sets first it may read, and count


LEAKS = {
    "an op": lambda t, x: t * 2.0,
    "an op of a view": lambda t, x: t[0] + 1.0,
    "a backward": lambda t, x: (ml.nn.Parameter(np.ones((4, 3), np.float32)) * t).sum().backward(),
    "another recording": lambda t, x: ml.record(lambda x: x + t, x),
    "an output of another recording": lambda t, x: ml.record(lambda x: (x, t), x),
    "its values": lambda t, x: t.numpy(),
    "a copy": lambda t, x: copy.deepcopy(t) * 2.0,
}


@pytest.mark.parametrize("use", LEAKS)
def test_a_tensor_of_a_recorded_step_has_no_value_elsewhere(use):
    net, x = Net(), np.ones((4, 3), np.float32)
    ml.record(net, x)
    with pytest.raises(RuntimeError, match=r"^0\.linear has no value while a step is recorded, .* in another step: "):
        LEAKS[use](net.seen, x)


def test_a_copy_of_what_a_step_computes_is_computed_by_nobody():
    net, x = Net(), np.ones((4, 3), np.float32)
    with pytest.raises(RuntimeError, match="has no value while a step is recorded"):
        ml.record(lambda x: copy.deepcopy(net(x)) * 2.0, x)


TOUCHED = {
    "a parameter": lambda net, opt: net.layer.weight.numpy(),
    "a number of it": lambda net, opt: net.layer.bias.tolist(),
    "all": lambda net, opt: net.state_dict(),
    "a rate": lambda net, opt: opt.lr,
    "a norm": lambda net, opt: opt.norm,
    "a parameter set": lambda net, opt: net.layer.weight.assign(0),
    "a state set": lambda net, opt: net.mean.assign(np.ones(3)),
    "all set": lambda net, opt: net.load_state_dict(state),
    "a rate set": lambda net, opt: setattr(opt, "lr", 0.5),
    "a group's rate set": lambda net, opt: opt.param_groups[0].__setitem__("lr", 0.5),
}
state = Net().state_dict()


@pytest.mark.parametrize("what", TOUCHED)
def test_a_recording_neither_reads_nor_sets_what_runs_change(what):
    net, x = Net(), np.ones((4, 3), np.float32)
    opt = ml.optim.SGD(net.parameters(), lr=0.1, max_norm=1.0)
    before = net.state_dict()

    def step(x):
        repr(net.layer.weight)
        loss = net(x).sum()
        loss.backward()
        opt.step()
        TOUCHED[what](net, opt)
        return loss

    with pytest.raises(RuntimeError, match=r"has no value while a step is recorded, .*between the runs of the step$"):
        ml.record(step, x)
    assert opt.lr == np.float32(0.1)
    assert all(np.array_equal(value, before[name]) for name, value in net.state_dict().items())
    step(ml.array(x))
