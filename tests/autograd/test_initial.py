"""Initial values are drawn when somebody first asks for a tensor's data, and do not depend on when that is."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
from helpers import NETWORKS

import minidl as ml
from minidl import models, nn, optim
from minidl.autograd import random
from minidl.autograd.initial import Initial, constant
from minidl.autograd.tape import Storage
from minidl.autograd.tensor import Parameter
from minidl.nn.module import put, state_array, state_shape


@pytest.fixture
def memory(monkeypatch):
    """The names of the storages that have got memory."""
    names: list[str] = []
    allocate = Storage.allocate

    def counted(storage, device, values=None):
        names.append(storage.name)
        allocate(storage, device, values)

    monkeypatch.setattr(Storage, "allocate", counted)
    return names


def values(model):
    return {name: p.numpy().copy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_values_of_a_network_do_not_depend_on_when_they_are_drawn(name):
    def made():
        random.seed(5)
        return models.create(name, preset="tiny")

    at_once, later = made(), made()
    wanted = values(at_once)
    random.seed(1)
    random.normal(1, 3, "float32")
    found = {name: p.numpy() for name, p in reversed([*later.named_parameters()])}
    assert found.keys() == wanted.keys()
    for key, value in found.items():
        assert value.tobytes() == wanted[key].tobytes(), key


def test_draws_are_those_of_their_generator():
    random.seed(7)
    first, second = random.uniform(0.5, (2, 3), "float32"), random.normal(2, 4, "float64", mean=1)
    assert np.array_equal(first, random.generator("weights", 0).uniform(-0.5, 0.5, (2, 3)).astype(np.float32))
    assert np.array_equal(second, 1 + 2 * random.generator("weights", 1).standard_normal(4))
    assert np.array_equal(first.astype("float64"), np.asarray(first).astype(np.float64))
    assert np.array_equal(constant(3, (2,), "float32"), np.full(2, 3, np.float32))
    with pytest.raises(ValueError, match="negative length"):
        random.uniform(1, (2, -1), "float32")


def test_a_network_and_its_recording_take_no_memory_for_parameters_and_states(memory):
    model = models.create("gpt", preset="tiny")
    opt = optim.Adam(model.parameters(), lr=0.1)
    parameters = {p.storage.name for p in model.parameters()}
    assert parameters & {*memory} == set()

    def step(ids, labels):
        loss = nn.cross_entropy(model(ids).reshape(-1, 256), labels.reshape(-1))
        loss.backward()
        opt.step()
        return loss

    ids = np.zeros((2, 16), np.int64)
    graph = ml.record(step, ids, ids)
    ml.plan(graph, "multi_stream", ml.CostModel.analytic())
    live = [spec.live for spec in graph.storages if spec.live is not None]
    lazy = [s for s in live if s.initial is not None]
    assert {id(p.storage) for p in model.parameters()} <= {*map(id, lazy)}
    assert sum(s.bytes for s in live) - sum(s.bytes for s in lazy) < 1024
    assert not {s.name for s in lazy} & {*memory}
    step(ids, ids)
    assert all(p.storage.initial is None for p in model.parameters())


def test_values_that_are_overwritten_are_not_drawn(monkeypatch):
    random.seed(0)
    layer = nn.Linear(3, 2)
    wanted = {name: np.ones(state_shape(t), np.float32) for name, t in layer.named_tensors()}

    def never(*_):
        raise AssertionError("drawn")

    monkeypatch.setattr(Initial, "__array__", never)
    layer.load_state_dict(wanted)
    assert all((p.numpy() == 1).all() for p in layer.parameters())
    other = nn.Linear(3, 2)
    put(other.weight, wanted["weight"])
    assert other.weight.storage.initial is None
    assert other.bias.storage.initial is not None


def test_initialisers_replace_the_rule_or_the_values():
    def filled(drawn):
        random.seed(3)
        layer = nn.Linear(4, 3)
        if drawn:
            layer.weight.numpy()
        nn.init.normal_(layer.weight, mean=2.0, std=0.1)
        nn.init.constant_(layer.bias, 5)
        return layer

    later, at_once = filled(False), filled(True)
    assert later.weight.storage.initial is not None
    assert np.array_equal(later.weight.numpy(), at_once.weight.numpy())
    assert later.weight.numpy().min() > 1
    assert (later.bias.numpy() == 5).all()
    nn.init.zeros_(later.weight)
    assert not later.weight.numpy().any()
    with pytest.raises(ml.ShapeError, match="cannot take"):
        layer = nn.Linear(4, 3)
        layer.weight.assign(constant(0, (2,), "float32"))


def test_conversions_copies_and_ties_keep_the_rule():
    random.seed(2)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    wanted = state_array(deepcopy(model)[0].weight).copy()
    copy = deepcopy(model)
    wide = deepcopy(model).astype("float64")
    assert all(m[0].weight.storage.initial is not None for m in (model, copy, wide))
    assert copy[0].weight is copy[1].weight is not model[0].weight
    assert np.array_equal(copy[1].weight.numpy(), wanted)
    assert model[0].weight.storage.initial is not None
    assert np.array_equal(wide[0].weight.numpy(), wanted.astype(np.float64))
    assert np.array_equal(model[1].weight.numpy(), wanted)
    copy[0].weight.assign(0.0)
    assert model[0].weight.numpy().any()


def test_data_is_the_same_for_whoever_asks():
    p = Parameter(random.normal(1, (4,), "float32"))
    data = p.storage.data
    assert p.storage.data is data
    assert p.storage.initial is None
    assert np.shares_memory(p.numpy(), p.numpy())
    with pytest.raises(AttributeError, match="has no 'date'"):
        p.storage.date  # noqa: B018
    assert "recorded" not in repr(Parameter(constant(1, 2, "float32")))


def test_memory_is_seen_only_with_its_values(monkeypatch):
    """An interrupted draw leaves the rule, and other threads wait for the values."""
    storage = nn.Linear(3, 2).weight.storage
    device, values = storage.initial
    slot, write, seen = type(storage).data, device.write, []

    def failing(array, value):
        with pytest.raises(AttributeError):
            slot.__get__(storage)
        seen.append(value)
        raise MemoryError

    monkeypatch.setattr(device, "write", failing)
    with pytest.raises(MemoryError):
        storage.data  # noqa: B018
    monkeypatch.setattr(device, "write", write)
    assert (len(seen), storage.initial) == (1, (device, values))
    assert np.array_equal(np.frombuffer(storage.data, np.float32, 6).reshape(2, 3), np.asarray(values))
