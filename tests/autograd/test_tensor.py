"""Tensors, the backward walk, and record: what is shared, what adds up, and what must not change."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from any_order import same_in_any_order
from helpers import SMALL, bits, random_array, recorded, refuses

import minidl as ml
from minidl import nn, ops, optim
from minidl.autograd.op import Layer, Op
from minidl.core.tasks import Kind
from minidl.runtime.executors import SequentialExecutor


def parameter(*shape, seed=0):
    return ml.Parameter(random_array(shape, seed))


def names(graph, *kinds):
    return [t.name for t in graph if t.kind in kinds]


# ------------------------------------------------------------------------------------------------------------ gradients
def test_a_parameter_used_several_times_has_one_gradient_a_use_added_once():
    w = parameter(4, 4)

    def step(x):
        y = x
        for _ in range(3):
            y = ops.tanh(ops.linear(y, w))
        y.sum().backward()
        return w.grad

    x = random_array((2, 4), 1)
    graph = ml.record(step, x)
    weight_tasks = [t for t in graph if t.kind == Kind.W]
    assert [len(t.writes) for t in weight_tasks] == [1, 1, 1, 1]
    parts = [t.writes[0].index for t in weight_tasks[:3]]
    assert len(set(parts)) == 3, "one buffer a use"
    assert {b.index for b in weight_tasks[3].reads} == set(parts)
    assert [launch.kernel for launch in weight_tasks[3].launches] == ["add", "add"]
    # in the order of use, which is the reverse of the backward walk
    added = [weight_tasks[3].launches[0].reads[0].storage, weight_tasks[3].launches[0].reads[1].storage,
             weight_tasks[3].launches[1].reads[1].storage]
    assert added == [graph.buffer(p).storage for p in parts[::-1]]


def test_uses_are_added_once_in_a_step_of_several_micro_batches():
    """And the recorded step leaves the bits of the eager one."""
    values, x = random_array((4, 4)).astype("f"), random_array((3, 2, 4), 1).astype("f")

    def make():
        w = ml.Parameter(values)
        opt = optim.SGD([w], 0.1)

        def step(*parts):
            for i, part in enumerate(parts):
                with ml.micro_batch(i):
                    loss = ops.tanh(ops.linear(ops.tanh(ops.linear(part, w)), w)).sum()
                    loss.backward()
            opt.step()
            return loss

        return step, [w]

    sums = [t for t in ml.record(make()[0], *x) if t.label.endswith("(parameter))") and t.kind == Kind.W]
    assert [len(t.launches) for t in sums] == [1], "the two uses, each the sum over micro-batches"
    same_in_any_order(make, [x], [0])


def test_what_depends_on_parameters_alone_has_weight_gradient_tasks():
    w = parameter(3, 4)
    graph = ml.record(lambda x: (ops.linear(x, ops.tanh(w.T).T * 2.0) ** 2).sum().backward(), random_array((2, 4)))
    chain = [t for t in graph if t.kind == Kind.O]
    assert all("grad tensor" not in b.name for t in chain for b in t.writes)
    assert len(names(graph, Kind.W)) >= 3, names(graph, Kind.W)
    graph = ml.record(lambda x: (x * w).sum().backward(), random_array((3, 4)))
    assert [t.kind.name for t in graph] == ["F", "F", "O", "W"]


def test_nothing_is_emitted_toward_what_needs_no_gradient():
    w = parameter(3, 4)
    graph = ml.record(lambda x: ops.relu(ops.linear(ops.tanh(x), w)).sum().backward(), random_array((2, 4)))
    assert names(graph, Kind.O) == ["3O0", "2O0"]
    assert names(graph, Kind.W) == ["1W0"]


def test_output_gradients_need_no_weight_gradient():
    graph = recorded()
    weight = {t.index for t in graph if t.kind in (Kind.W, Kind.U)}
    for t in graph:
        if t.kind == Kind.O:
            assert not weight & set(graph.preds[t.index].tolist()), t.name


@pytest.mark.parametrize("f", [lambda x, w: x + w, lambda x, w: w + x, lambda x, w: (x + w) + w, lambda x, w: w + w,
                               lambda x, w: w * w, lambda x, w: ops.maximum(w, w), lambda x, w: w - w * 2.0,
                               lambda x, w: w + 1.0, lambda x, w: w.reshape(-1), lambda x, w: w.T,
                               lambda x, w: ops.broadcast_to(w, (2, 3, 4)), lambda x, w: (w + x) * (w - x) + w,
                               lambda x, w: ops.matmul(w, w.T), lambda x, w: w])
def test_gradients_do_not_share_memory_they_should_not(f):
    """Twice backward doubles; and another parameter's gradient stays what it was."""
    w, v = parameter(3, 4, seed=1), parameter(3, 4, seed=2)
    x = ml.array(random_array((3, 4), 3))
    for _ in range(2):
        (f(x + v, w) * 2.0).sum().backward()
    twice = [None if p.grad is None else p.grad.numpy().copy() for p in (w, v)]
    w.grad = v.grad = None
    (f(x + v, w) * 2.0).sum().backward()
    for p, t in zip((w, v), twice, strict=True):
        assert (p.grad is None) == (t is None)
        if t is not None:
            np.testing.assert_array_equal(2 * p.grad.numpy(), t)
            assert p.grad.contiguous
    if v.grad is not None:
        assert not np.shares_memory(w.grad.numpy(), v.grad.numpy())


def test_gradients_add_up_until_they_are_spent():
    w = ml.Parameter(np.zeros(2))
    opt = optim.SGD([w], 1.0)
    for _ in range(3):
        (w * ml.array(np.array([1.0, 2.0]))).sum().backward()
    assert w.grad.numpy().tolist() == [3, 6]
    opt.step()
    assert w.numpy().tolist() == [-3, -6]
    (w * ml.array(np.array([5.0, 5.0]))).sum().backward()
    assert w.grad.numpy().tolist() == [5, 5], "an update spends them"


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(("before", "after"), [(True, True), (False, True), (True, False)])
def test_what_is_frozen_in_the_forward_or_the_backward_pass_has_no_gradient(before, after, recorded):
    """A critic that is frozen while it judges, and thawed before its judgement goes back, as in torch."""
    critic, actor = nn.Linear(3, 1), nn.Linear(2, 3)

    def step(x):
        critic.requires_grad_(before)
        loss = critic(actor(x)).sum()
        critic.requires_grad_(after)
        loss.backward()
        assert [p.grad is not None for p in critic.parameters()] == [before and after] * 2
        return actor.weight.grad, actor.bias.grad

    x = np.ones((4, 2), np.float32)
    weight, bias = ml.SequentialExecutor(ml.record(step, x))(x) if recorded else step(ml.array(x))
    np.testing.assert_allclose(bias.numpy(), 4 * critic.weight.numpy()[0], rtol=1e-6)
    np.testing.assert_allclose(weight.numpy(), np.repeat(bias.numpy()[:, None], 2, 1), rtol=1e-6)


def test_the_same_loss_may_be_walked_twice_if_the_first_walk_says_so():
    w = ml.Parameter(np.array([3.0]))
    loss = (w * w).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert w.grad.numpy().tolist() == [12]


@pytest.mark.parametrize("recorded", [False, True])
def test_a_second_walk_through_a_forward_pass_is_an_error_as_in_torch(recorded):
    """It would silently double the gradients. So for the same loss, and for another one over the same trunk."""
    w = parameter(4, 4)

    def step(x):
        hidden = ops.tanh(ops.linear(x, w))
        hidden.sum().backward()
        (hidden * hidden).sum().backward()

    with pytest.raises(RuntimeError, match=r"an earlier backward has gone through tanh \(3, 4\), and a second one "
                                           r"would add the same gradients again; .*retain_graph=True") as caught:
        ml.record(step, random_array((3, 4))) if recorded else step(ml.array(random_array((3, 4))))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("how", "recorded"), [("update", False), ("update", True), ("assign", False)])
def test_a_gradient_that_needs_what_has_been_changed_since_the_forward_pass_is_an_error(how, recorded):
    """It would be that of another function. The gradient of a sum needs no operand."""
    v, w = parameter(3, seed=1), parameter(3, seed=2)
    opt = optim.SGD([v], 0.1)

    def step(x):
        product, total = (v * w * x).sum(), (v + w * x).sum()
        if how == "assign":
            v.assign(np.ones(3))
        else:
            (v * x).sum().backward()
            opt.step()
        total.backward()
        v.grad = None
        return product

    def run(f, x):
        return ml.record(f, x) if recorded else f(ml.array(x))

    run(step, np.ones(3))
    with pytest.raises(RuntimeError, match=r"gradient of mul needs parameter \(3,\) as it was in the forward "
                                           r"pass.*call backward before"):
        run(lambda x: step(x).backward(), np.ones(3))


def test_recording_an_update_changes_no_parameter_for_a_backward_that_is_still_to_come():
    w = parameter(3)
    opt = optim.SGD([w], 0.1)

    def step(x):
        (w * w * x).sum().backward()
        opt.step()

    loss = (w * w).sum()
    ml.record(step, np.ones(3))
    loss.backward()
    np.testing.assert_array_equal(w.grad.numpy(), 2 * w.numpy())


def test_micro_batches_name_their_tasks_and_do_not_nest():
    graph = recorded()
    for kind in (Kind.F, Kind.O, Kind.W):
        assert {t.micro_batch for t in graph if t.kind == kind} == {0, 1}
    assert {t.micro_batch for t in graph if t.kind == Kind.U} == {0}
    assert {t.unit for t in graph if t.kind == Kind.F and t.micro_batch == 0} == {
        t.unit for t in graph if t.kind == Kind.F and t.micro_batch == 1}
    for outer, inner in ((1, 0), (0, 1), (0, 0)):
        with pytest.raises(ValueError,
                           match=r"within another micro-batch"), ml.micro_batch(outer), ml.micro_batch(inner):
            pass


@pytest.mark.parametrize("number", [0.5, True, "1", None, [1], -1])
def test_the_number_of_a_micro_batch_is_whole(number):
    """0.5 was 0, the micro-batch before."""
    with pytest.raises(ValueError, match=r"^the micro-batch is .*; it must be a whole number"), ml.micro_batch(number):
        pass


def test_parameters_of_one_unit_that_get_gradients_in_different_micro_batches():
    a, b = ml.Parameter(np.ones(2)), ml.Parameter(np.ones(2))
    opt = optim.SGD([a, b], 1.0)

    def step(x):
        for m, w in enumerate((a, b)):
            with ml.micro_batch(m):
                (x * w).sum().backward()
        opt.step()

    SequentialExecutor(ml.record(step, np.ones(2)))(np.array([2.0, 3.0]))
    assert a.numpy().tolist() == b.numpy().tolist() == [-1, -2]


def test_no_grad_keeps_nothing():
    w = parameter(3)
    with ml.no_grad():
        y = w * 2.0
    assert y.node is None
    assert not y.requires_grad
    with pytest.raises(RuntimeError, match=r"depends on no parameter"):
        y.sum().backward()
    assert (w * 2.0).requires_grad, "and ends"
    graph = ml.record(lambda x: (x * w.detach()).sum(), np.ones(3))
    assert names(graph, Kind.O, Kind.W) == []


def test_backward_starts_from_a_scalar_that_depends_on_something():
    with pytest.raises(ml.ShapeError, match=r"backward starts from a scalar, not from shape \(3,\)"):
        (parameter(3) * 2.0).backward()
    with pytest.raises(RuntimeError, match=r"depends on no parameter"):
        ml.array(np.ones(())).backward()
    w = ml.Parameter(np.array([[2.0]]))
    (w * 3.0).backward()
    assert w.grad.numpy().tolist() == [[3.0]]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(("forward", "input_grad", "error", "message"), [
    (lambda op, x: None, None, ml.ShapeError, "mine: forward must return a Tensor, not a NoneType"),
    (lambda op, x: (x, x), None, ml.ShapeError, "mine: forward must return a Tensor, not a tuple"),
    (lambda op, x: x * 2, None, RuntimeError, "an op is used in the forward or gradient of another; call kernels"),
    (None, lambda op, i, dy: None, ml.ShapeError, r"input 0 must be a Tensor\(2, 3\), not a NoneType"),
    (None, lambda op, i, dy: op.call("copy", [SHORT], [op.grad(SHORT)]), ml.ShapeError,  # read other memory
     r"mine: the gradient toward input 0 must be a Tensor\(2, 3\), not a Tensor\(2,\)"),
    (None, lambda op, i, dy: dy.reshape(3, 2), RuntimeError, "an op is used in the forward or gradient of another"),
])
def test_ops_of_users_give_tensors_of_the_right_shapes(forward, input_grad, error, message, recorded):
    class Mine(Op):
        name = "mine"

        def forward(self, x):
            return forward(self, x) if forward else self.out_by("copy", [x], x.shape, x.dtype)

        def input_grad(self, i, dy):
            return input_grad(self, i, dy)

    weight = ml.Parameter(np.ones((2, 3), np.float32))

    def step():
        Mine()(weight).sum().backward()

    with pytest.raises(error, match=message):
        ml.record(step) if recorded else step()


SHORT = ml.array(np.ones(2, np.float32))


@pytest.mark.parametrize("base", [Op, Layer])
@pytest.mark.parametrize("found", [None, [], (SHORT,), SHORT])
@pytest.mark.parametrize("method", ["weight", "output"])
def test_ops_of_users_return_a_dict_of_gradients(base, found, method):
    class Mine(base):
        name = "mine"

        def forward(self, x, weight):
            return self.out_by("mul", [x, weight], x.shape, x.dtype)

        def wrong(self, dy, wanted):
            return found

    setattr(Mine, "weights_grad" if base is Layer else f"{method}_grad", Mine.wrong)
    second = SHORT.detach().requires_grad_() if method == "output" else ml.Parameter(np.ones(2, np.float32))
    out, kind = Mine()(SHORT, second), type(found).__name__
    with pytest.raises(ml.ShapeError, match=f"mine: {method}_grad must return a dict of the gradients .* not a {kind}"):
        out.sum().backward()


def test_a_kernel_is_called_within_a_task():
    with pytest.raises(RuntimeError, match="kernel copy is called outside a task: call the op itself"):
        Op().out_by("copy", [SHORT], SHORT.shape, SHORT.dtype)


def test_deep_networks_do_not_recurse():
    w = ml.Parameter(np.ones(1))
    y = w
    for _ in range(3000):
        y = y + 0.5
    y.sum().backward()
    assert w.grad.numpy().tolist() == [1]


# -------------------------------------------------------------------------------------------------------------- threads
def test_a_thread_has_random_numbers_of_its_own():
    def drawn(seed=None):
        if seed is not None:
            ml.seed(seed)
        return [nn.Linear(2, 2).weight.numpy().tobytes(), nn.functional.dropout(ml.ones(4, 8), 0.5).numpy().tobytes()]

    wanted = {seed: drawn(seed) + drawn() for seed in (4, 3)}
    with ThreadPoolExecutor(1) as thread:
        first = drawn(3)
        assert thread.submit(drawn).result() == wanted[3][:2], "it begins with the last seed"
        assert thread.submit(drawn, 4).result() == wanted[4][:2]
        assert first + drawn() == wanted[3], "which another thread's seed does not change"
        assert thread.submit(drawn).result() == wanted[4][2:]


@pytest.mark.parametrize("divisor", [1e-40, -3e-39, 2e-45])
def test_a_divisor_may_be_so_small_that_its_reciprocal_is_infinite(divisor):
    x = np.array([0, 1e-42, -2e-30, 3, np.inf], np.float32)
    with np.errstate(over="ignore"):
        wanted, found = (x.astype(np.float64) / divisor).astype(np.float32), (ml.array(x) / divisor).numpy()
    assert np.allclose(found, wanted, rtol=1e-6, atol=0)
    assert (np.signbit(found) == np.signbit(wanted)).all()


# --------------------------------------------------------------------------------------------------------------- record
def test_record_runs_nothing_and_changes_nothing():
    model, opt, step = SMALL.make()
    data = SMALL.batches(2)
    step(*map(ml.array, data[0]))
    nn.cross_entropy(model(data[0][0]), data[0][1]).backward()  # gradients that are not spent
    before = SMALL.state(model, opt)
    held = [(p.grad, p.used, p.grad_unit, bits(p.grad)) for p in model.parameters()]
    counter = bits(ml.Tensor(ml.autograd.random.dropout_counter()))
    place = vars(ml.autograd.tape.current().place).copy()
    for _ in range(2):
        ml.record(step, *data[1])
    with pytest.raises(ZeroDivisionError):
        ml.record(lambda *v: (step(*v), 1 / 0), *data[1])
    assert SMALL.state(model, opt) == before
    assert all(p.grad is g and p.used == u and p.grad_unit == n and bits(g) == b
               for p, (g, u, n, b) in zip(model.parameters(), held, strict=True))
    assert bits(ml.Tensor(ml.autograd.random.dropout_counter())) == counter
    assert vars(ml.autograd.tape.current().place) == place
    assert not ml.autograd.tape.current().recording


def test_a_recorded_update_leaves_parameters_alone_that_got_no_gradient_in_it():
    a, b = ml.Parameter(np.ones(1)), ml.Parameter(np.ones(1))
    opt = optim.SGD([a, b], 0.5)
    (a * 100.0).sum().backward()  # not spent, and none of the step's business

    def step(x):
        (x * b).sum().backward()
        opt.step()

    graph = ml.record(step, np.ones(1))
    assert not a.used
    assert a.grad.numpy().tolist() == [100]
    SequentialExecutor(graph)(np.ones(1))
    assert (a.numpy().tolist(), b.numpy().tolist()) == ([1], [0.5])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("recorded", [False, True])
def test_gradients_may_be_given_as_arrays_and_numbers(dtype, recorded):
    p = ml.Parameter(np.ones(3, dtype))
    opt, given = optim.SGD([p], 1.0), np.array([1, 2, 3], dtype)

    def step(x):
        (p * x).sum().backward(2.0)
        found = p.grad
        p.grad = given
        opt.step()
        return found

    x = np.ones(3, dtype)
    assert (SequentialExecutor(ml.record(step, x))(x) if recorded else step(ml.array(x))).tolist() == [2, 2, 2]
    assert p.tolist() == [0, -1, -2]
    for wrong in (0, np.ones(2, dtype), np.ones(3, np.int64), "a"):
        with pytest.raises(ml.ShapeError, match="must be float|holds numbers"):
            p.grad = wrong
    for wrong, said in ((np.ones(2, dtype), rf"{dtype} \(2,\)"), (ml.array(1.0, "float16"), r"float16 \(\)")):
        with pytest.raises(ml.ShapeError, match=rf"the gradient must be {dtype} \(\) as the value is, not {said}"):
            p.sum().backward(wrong)
    with pytest.raises(ValueError, match=r"betas are 0\.9; they must be two numbers"):
        optim.Adam([p], betas=0.9)


def test_recording_does_not_depend_on_the_examples_values():
    model, _, step = SMALL.make()
    (values,) = SMALL.batches(1)
    graphs = [ml.record(step, *(np.zeros_like(v) + i for v in values)) for i in range(2)]
    for column in ("unit", "kind", "micro_batch", "flops", "bytes", "buffer_bytes"):
        assert np.array_equal(getattr(graphs[0], column), getattr(graphs[1], column))
    assert graphs[0].launches == graphs[1].launches


def test_several_updates_in_one_step():
    def make():
        ml.seed(0)
        a, b = nn.Linear(3, 3), nn.Linear(3, 3)
        first, second = optim.SGD(a.parameters(), 0.1, momentum=0.9), optim.Adam(b.parameters(), 0.1)

        def step(x):
            for _ in range(2):
                nn.dropout(b(ops.tanh(a(x))), 0.5).sum().backward()
                first.step()
                second.step()
            return a(x).sum()

        return step, [*a.parameters(), *b.parameters()]

    same_in_any_order(make, [[np.ones((2, 3), np.float32)]] * 3, [0])


def test_values_cannot_be_asked_for_while_recording():
    with pytest.raises(RuntimeError, match=r"has no value while a step is recorded, .*: return it from"):
        ml.record(lambda x: float((x * 2.0).sum()), np.ones(3))


@pytest.mark.parametrize(("step", "example", "message"), [
    (lambda x: 3.0, np.ones(3), "returned a float as output 0; it may return only tensors"),
    (lambda x: (x, None), np.ones(3), "returned a NoneType as output 1"),
    (lambda x: x, np.ones(3, np.int32),
     "example 0 is int32; inputs must be float32, float64, bfloat16, float16 or int64"),
    (lambda x: x, "text", "example 0 is <U4"),
    (lambda x, y: x, (np.ones((2, 3)), np.ones(2)), r"0 is a tuple; .* as in record\(step, \*batch\)"),
    (lambda batch: batch["x"], {"x": np.ones(3)}, "example 0 is a dict; .* each an argument"),
    (None, np.ones(3), "the step is None; it must be a function"),
])
def test_what_cannot_be_recorded_is_told(step, example, message):
    with pytest.raises(TypeError, match=message):
        ml.record(step, example)


def test_arrays_from_outside_are_constants_of_the_graph():
    c = ml.array(np.array([1.0, 2.0]))
    run = SequentialExecutor(ml.record(lambda x: x * c + np.array([10.0, 20.0]), np.ones(2)))
    assert run(np.ones(2)).numpy().tolist() == [11, 22]
    assert run(np.full(2, 2.0)).numpy().tolist() == [12, 24]


# -------------------------------------------------------------------------------------------------- tensors and modules
def test_arrays_in_and_out():
    value = np.arange(6.0).reshape(2, 3)
    t = ml.array(value)
    value[0, 0] = 99
    assert t.numpy()[0, 0] == 0, "array copies"
    assert t.dtype == "float64"
    assert ml.array([1.0, 2.0]).dtype == "float32"
    assert ml.array([1, 2]).dtype == "int64"
    assert np.asarray(t.T).tolist() == np.arange(6.0).reshape(2, 3).T.tolist()
    assert np.shares_memory(np.from_dlpack(t), t.numpy())
    assert t.numpy().ctypes.data % 256 == 0
    assert float(ml.array(2.5)) == 2.5
    assert len(t) == 2
    with pytest.raises(TypeError, match=r"without axes has no length"):
        len(ml.array(2.5))
    assert repr(ml.array([1.0])) == "Tensor([1.], shape=(1,), dtype=float32)"
    assert ml.array(np.ones((0, 3))).numpy().shape == (0, 3)
    with pytest.raises(ml.ShapeError, match=r"types differ"):
        t + ml.array([1.0, 2.0, 3.0])


def test_modules_name_what_they_hold():
    class Net(nn.Module):
        def __init__(self):
            self.a = nn.Linear(2, 2)
            self.b = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Dropout(0.1))
            self.again = self.a
            self.own = ml.Parameter(np.ones(2, np.float32))

    net = Net()
    assert [n for n, _ in net.named_parameters()] == ["a.weight", "a.bias", "b.0.weight", "own"]
    assert list(net.state_dict()) == ["a.weight", "a.bias", "b.0.weight", "again.weight", "again.bias", "own"]
    assert len(net.parameters()) == 4
    assert not net.eval().b.training
    assert net.train().b.training
    assert net.astype("float64").own.dtype == "float64"
    with pytest.raises(ValueError, match=r"unknown type 'float16'; known: float32, float64"):
        net.astype("float16")


class _Bfloat16:
    """As torch's tensors of this type are, or those with a gradient."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("no bfloat16")


def test_states_load_whole_or_not_at_all():
    ml.seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    before = net.state_dict()
    good = {n: v + 1 for n, v in before.items()}
    for bad, message in (({k: v for k, v in good.items() if k != "1.bias"}, r"missing \['1.bias'\], unknown none"),
                         ({**good, "2.bias": good["1.bias"]}, r"missing none, unknown \['2.bias'\]"),
                         ({**good, "1.bias": np.ones(3, np.float32)},
                          r"1.bias is float32 \(3,\) in the state, float32 \(2,\)"),
                         ({**good, "1.bias": np.ones(2)}, r"1.bias is float64"),
                         ({**good, "1.bias": _Bfloat16()}, r"1.bias is no array: no bfloat16; torch.s t.detach"),
                         ([1], "a table of arrays by name, .* not list; minidl.training.weights.load"),
                         ("net.safetensors", "a table of arrays by name, .* not str")):
        with pytest.raises((ml.ShapeError, TypeError), match=message):
            net.load_state_dict(bad)
        assert bits(*net.state_dict().values()) == bits(*before.values())
    run = SequentialExecutor(ml.record(net, np.ones((1, 2), np.float32)))
    net.load_state_dict(good)
    assert bits(*net.state_dict().values()) == bits(*good.values())
    assert np.array_equal(run(np.ones((1, 2), np.float32)).numpy(),
                          net(np.ones((1, 2), np.float32)).numpy()), "recorded steps see it"


def test_layers_and_optimizers_refuse_what_makes_no_sense():
    w = parameter(2)
    refuses(
        (lambda: nn.Linear(0, 2), r"Linear: in_features is 0; it must be a whole number >= 1"),
        (lambda: ml.models.mlp(3), r"mlp\(3,\)|at least"),
        (lambda: optim.SGD([], 0.1), "one parameter; lists of layers"),
        (lambda: optim.SGD([w], 0.1, momentum=1.0), "momentum is 1.0"),
        (lambda: optim.SGD([w], 0.1, nesterov=True), "nesterov needs momentum"),
        (lambda: optim.Adam([w], betas=(1.0, 0.9)), r"betas are \(1.0, 0.9\)"),
        (lambda: optim.Adam([w], betas=(0.5,)), r"betas are \(0.5,\); they must be two numbers"),
        (lambda: optim.SGD([w, ml.Parameter(np.ones(2, np.float32))], 0.1), "several types: float32, float64"),
        (lambda: ml.Parameter(np.arange(3)), "a parameter must be float32 or float64, not int64"),
        (lambda: ml.seed(-1), "the seed is -1; it must be a whole number of at least 0"),
        (lambda: ml.seed(1.5), "the seed is 1.5; it must be a whole number of at least 0"),
        (lambda: ml.seed("a"), "the seed is 'a'; it must be a whole number of at least 0"))


def test_an_update_needs_gradients():
    opt = optim.SGD([parameter(2)], 0.1)
    with pytest.raises(RuntimeError, match=r"no parameter has a gradient; call backward first"):
        opt.step()


# ---------------------------------------------------------------------------------------- what varies from step to step
def test_masked_numbers_are_refused():
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    with pytest.raises(ml.ShapeError, match="some of these are masked"):
        ml.array(masked)
    assert ml.array(np.ma.array([1.0, 2.0])).numpy().tolist() == [1, 2]


@pytest.mark.parametrize("value", [np.array([None, 1.5], object), np.array([1, 2], object), ["a", "b"], "1.5", b"abc",
                                   1 + 2j, np.zeros(2, np.complex64), np.longdouble(3), np.array(["2020"], "M8[Y]"),
                                   np.zeros(2, "i4,f4"), np.zeros(2, "V3"), None, {}, 2**70])
def test_what_are_no_numbers_makes_no_tensor(value):
    makes = [ml.array, lambda v: ml.array(v, "float32"), ml.Parameter, lambda v: nn.module.state(v, "s"),
             lambda v: ml.Parameter(np.ones(2)).assign(v), lambda v: nn.Linear(2, 2)(np.asarray(v)),
             lambda v: ml.array(np.ones(2)) + np.asarray(v)]
    for make in makes:
        with pytest.raises(ml.ShapeError, match="a tensor holds numbers") as caught:
            make(value)
        assert "\n" not in str(caught.value)


def test_numbers_in_another_byte_order_are_turned_round():
    for kind in (">f4", ">f8", ">i8", ">u2"):
        value = np.arange(6, dtype=kind).reshape(2, 3)
        tensor = ml.array(value)
        assert np.dtype(tensor.dtype).isnative
        np.testing.assert_array_equal(tensor.numpy(), value)
    np.testing.assert_array_equal(ml.Parameter(np.ones(3, ">f8")).numpy(), np.ones(3))


def test_python_floats_that_float32_has_no_number_for_are_refused():
    with pytest.raises(ml.ShapeError, match=r"1e\+300 is too large for float32"):
        ml.array([1.0, -1e300])
    assert ml.array([1e300], "float64").item() == 1e300
    assert np.isinf(ml.array(float("inf")).item())
    assert np.isnan(ml.array([float("nan")]).item())


@pytest.mark.parametrize("value", [np.ones((1, 3)), np.ones(2), np.zeros((3, 1)), np.ones(3, np.complex128)])
def test_a_tensor_takes_over_only_what_fits_it(value):
    p = ml.Parameter(np.arange(3.0))
    with pytest.raises(ml.ShapeError):
        p.assign(value)
    np.testing.assert_array_equal(p.numpy(), [0, 1, 2])
    with pytest.raises(ml.ShapeError, match="cannot take"):
        ml.array([1, 2]).assign(np.array([0.5, 1.5]))
