"""Layers for sequences: torch's values and gradients, the same bits in any legal order, the kernels' references."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from any_order import same_in_any_order
from helpers import bits, bytes_allocated, drawn, random_array, refuses, torch_or_skip
from hypothesis import given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl import nn, ops, optim
from minidl.core.tasks import Kind
from minidl.testing.checks import gradcheck


# -------------------------------------------------------------------------------------------- torch parity
def parity(mine: Any, theirs: Any, *inputs: Any, tolerance: float = 1e-10) -> None:
    """A module of ours and one of torch's with the same parameters (by name), float64: outputs and all gradients."""
    torch = torch_or_skip()
    theirs = theirs.double()
    mine.astype("float64").load_state_dict({k: v.numpy() for k, v in theirs.state_dict().items()})

    def flat(value: Any) -> list[Any]:
        return [t for v in value for t in flat(v)] if isinstance(value, tuple | list) else [value]

    def made(value: Any, of: Any) -> Any:
        return tuple(made(v, of) for v in value) if isinstance(value, tuple) else of(value)

    xs = made(inputs, lambda v: torch.tensor(v, requires_grad=v.dtype == np.float64))
    ys = made(inputs, lambda v: ml.Parameter(v) if v.dtype == np.float64 else ml.array(v))
    theirs_out, mine_out = flat(theirs(*xs)), flat(mine(*ys))
    weights = [random_array(tuple(t.shape), i) for i, t in enumerate(theirs_out)]
    sum((t * torch.tensor(w)).sum() for t, w in zip(theirs_out, weights, strict=True)).backward()
    total: Any = None
    for t, w, other in zip(mine_out, weights, theirs_out, strict=True):
        np.testing.assert_allclose(t.numpy(), other.detach().numpy(), rtol=tolerance, atol=tolerance)
        part = (t * ml.array(w)).sum()
        total = part if total is None else total + part
    total.backward()
    for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(p.grad.numpy(), q.grad.numpy(), rtol=tolerance, atol=tolerance, err_msg=name)
    for t, other in zip(flat(ys), flat(xs), strict=True):
        if other.requires_grad:
            np.testing.assert_allclose(t.grad.numpy(), other.grad.numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["RNN", "RNN relu", "GRU", "LSTM"])
def test_recurrent_layers_are_torchs(kind: str) -> None:
    torch = torch_or_skip()
    name, *relu = kind.split()
    for layers, bias, batch_first, both in itertools.product((1, 2), (True, False), (True, False), (True, False)):
        options = {"nonlinearity": "relu"} if relu else {}
        mine = getattr(nn, name)(3, 4, layers, bias=bias, batch_first=batch_first, bidirectional=both, **options)
        theirs = getattr(torch.nn, name)(3, 4, layers, bias=bias, batch_first=batch_first, bidirectional=both,
                                         **options)
        parity(mine, theirs, random_array((5, 2, 3)))
        assert nn.Module.state_dict(mine).keys() == theirs.state_dict().keys()


@pytest.mark.parametrize("name", ["RNN", "GRU", "LSTM"])
def test_recurrent_layers_take_states_as_torchs_do(name: str) -> None:
    torch = torch_or_skip()

    states = [random_array((4, 2, 4), i) for i in range(2 if name == "LSTM" else 1)]
    for layer, x, first in ((lambda n: getattr(n, name)(3, 4, 2, bidirectional=True), (5, 2, 3), states),
                            (lambda n: getattr(n, f"{name}Cell")(3, 4), (2, 3), [s[0] for s in states]),
                            (lambda n: getattr(n, f"{name}Cell")(3, 4, bias=False), (2, 3), None)):
        more = [] if first is None else [tuple(first)] if name == "LSTM" else first
        parity(layer(nn), layer(torch.nn), random_array(x), *more)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_attention_is_torchs(causal: bool, masked: bool, cross: bool) -> None:
    torch = torch_or_skip()
    mask = np.array([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]]) if masked else None

    class Theirs(torch.nn.MultiheadAttention):  # type: ignore[misc, name-defined]
        def forward(self, x: Any, *memory: Any) -> Any:
            source = memory[0] if memory else x
            hide = torch.triu(torch.ones(x.shape[1], source.shape[1], dtype=bool), 1) if causal else None
            pad = None if mask is None else torch.tensor(mask == 0)
            return super().forward(x, source, source, attn_mask=hide, key_padding_mask=pad, need_weights=False)[0]

    class Mine(nn.MultiheadAttention):
        def forward(self, x: Any, *memory: Any) -> Any:
            return super().forward(x, memory[0] if memory else None, None if mask is None else ml.array(mask))

    for bias in (True, False):
        inputs = [random_array((2, 4 if cross else 5, 6)), *([random_array((2, 5, 6), 1)] if cross else [])]
        parity(Mine(6, 3, bias=bias, causal=causal), Theirs(6, 3, bias=bias, batch_first=True), *inputs)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("causal", "kind"), [(False, "int64"), (True, "bool")])
def test_a_decoder_layer_is_torchs(causal: bool, kind: str, norm_first: bool) -> None:
    """With masks of both inputs, in bool and in whole numbers."""
    torch = torch_or_skip()
    own, other = np.array([[1, 1, 1, 0], [1, 1, 1, 1]]), np.array([[1, 0, 1, 1, 1], [1, 1, 0, 0, 0]])

    class Theirs(torch.nn.TransformerDecoderLayer):  # type: ignore[misc, name-defined]
        def forward(self, x: Any, memory: Any) -> Any:
            hide = torch.ones(4, 4, dtype=bool).triu(1) if causal else None
            return super().forward(x, memory, hide, None, torch.tensor(own == 0), torch.tensor(other == 0))

    class Mine(nn.TransformerDecoderLayer):
        def forward(self, x: Any, memory: Any) -> Any:  # type: ignore[override]
            return super().forward(x, memory, ml.array(own.astype(kind)), ml.array(other.astype(kind)))

    given: dict[str, Any] = {"activation": "gelu", "batch_first": True, "norm_first": norm_first}
    mine, theirs = Mine(6, 3, 8, 0.0, causal=causal, **given), Theirs(6, 3, 8, 0.0, **given)
    assert [*mine.state_dict()] == [*theirs.state_dict()]
    parity(mine, theirs, random_array((2, 4, 6)), random_array((2, 5, 6), 1))


def test_a_decoder_layer_drops_while_it_trains() -> None:
    layer, x, memory = nn.TransformerDecoderLayer(4, 2, 8, 0.5, batch_first=True), ml.ones(2, 3, 4), ml.ones(2, 2, 4)
    first, second = layer(x, memory).numpy(), layer(x, memory).numpy()
    assert (first != second).any()
    layer.eval()
    assert bits(layer(x, memory)) == bits(layer(x, memory))


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_are_torchs_eager_and_recorded(mode: str) -> None:
    """Empty bags at each end, repeated rows, rows that do not count; bags of one length as well."""
    torch = torch_or_skip()
    index, table = np.array([0, 5, 2, 2, 1, 0, 5]), random_array((6, 3))
    for padding, offsets, last in itertools.product((None, 2), ([0, 0, 3, 3, 7, 7], [0, 7], [0]), (False, True)):
        if offsets == [0] and last:
            continue
        options: dict[str, Any] = {"mode": mode, "padding_idx": padding, "include_last_offset": last}

        def mine(w: Any, i: Any = index, o: Any = offsets, options: Any = options) -> Any:
            return nn.functional.embedding_bag(i if isinstance(i, ml.Tensor) else ml.array(i), w,
                                               o if isinstance(o, ml.Tensor) else ml.array(np.array(o)), **options)

        t = torch.tensor(table, requires_grad=True)
        wanted = torch.nn.functional.embedding_bag(torch.tensor(index), t, torch.tensor(offsets), **options)
        wanted.sum().backward()
        p = ml.Parameter(table)
        found = mine(p)
        found.sum().backward()
        np.testing.assert_allclose(found.numpy(), wanted.detach(), rtol=1e-12)
        np.testing.assert_allclose(p.grad.numpy(), t.grad, rtol=1e-12)
        if padding and not last:
            gradcheck(mine, table)
        graph = ml.record(lambda i, o, p=p, mine=mine: mine(p, i, o), index, np.array(offsets))
        assert bits(ml.SequentialExecutor(graph)(index, np.array(offsets))) == bits(found)
    rows = index[:6].reshape(3, 2)
    found = nn.functional.embedding_bag(ml.array(rows), ml.array(table), mode=mode)
    wanted = torch.nn.functional.embedding_bag(torch.tensor(rows), torch.tensor(table), mode=mode)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12)
    none = nn.functional.embedding_bag(ml.array(index[:0]), ml.array(table), ml.array([0, 0]), mode=mode)
    assert none.tolist() == [[0.0] * 3] * 2


def test_factors_of_a_bag_and_what_bags_refuse() -> None:
    index, offsets, table = ml.array(np.array([0, 1, 1, 2])), ml.array([0, 2, 2]), random_array((3, 2))
    gradcheck(lambda w, s: nn.functional.embedding_bag(index, w, offsets, mode="sum", per_sample_weights=s,
                                                       padding_idx=2), table, random_array((4,), 1))
    bag = nn.EmbeddingBag(3, 2)
    refuses(
            (lambda: bag(index), r"index \(4,\) without offsets"),
            (lambda: bag(index, ml.array([1, 2])), "begin with 0"),
            (lambda: bag(index, ml.array([0, 3, 2])), "begin with 0 and rise"),
            (lambda: bag(index, ml.array([0, 5])), "index 5 is out of range for an axis of length 5"),
            (lambda: bag(ml.array([3]), ml.array([0])), "index 3 .* rows 0 to 2"),
            (lambda: bag(index, offsets, ml.ones(4)), "in mode 'mean'; expected .* in mode 'sum'"),
            (lambda: nn.EmbeddingBag(3, 2, mode="median")(index, offsets), "mode is 'median'; it must be sum"))


# ------------------------------------------------------------------------------------- one answer, any order
class Tokens(nn.Module):
    """Everything for sequences in one network: tokens in, classes out."""

    def __init__(self, kind: str) -> None:
        self.embedding = nn.Embedding(7, 6)
        self.positions = ml.Parameter(random_array((5, 6), 1, "float32"))
        self.norm = nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2, causal=True)
        self.layer = getattr(nn, kind)(6, 4, 2, batch_first=True, dropout=0.2, bidirectional=True)
        self.cell = getattr(nn, f"{kind}Cell")(8, 3)
        self.head = nn.Linear(3, 7)

    def forward(self, tokens: Any, mask: Any) -> Any:
        x = self.embedding(tokens) + self.positions
        x = ops.concat([x, self.attention(self.norm(x), None, mask)], -1, room=18)[:, :, 3:9]
        y, _ = self.layer(nn.dropout(x.gelu(), 0.1))
        state = None
        for t in range(3):  # a shared parameter: one gradient per use
            state = self.cell(y[:, t], state)
        return self.head(state[0] if isinstance(state, tuple) else state)


MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])


def training(kind: str, parts: int) -> Any:
    """Makes a training step of so many micro-batches."""
    def make() -> Any:
        ml.seed(1)
        model = Tokens(kind)
        opt = optim.AdamW(model.parameters(), 0.01, max_norm=0.5)

        def step(*inputs: Any) -> Any:
            total = None
            for m in range(parts):
                with ml.micro_batch(m, 3 * m):
                    x, mask, y = inputs[3 * m : 3 * m + 3]
                    loss = nn.cross_entropy(model(x, mask), y, 0.1) * (1 / parts)
                    loss.backward()
                total = loss.detach() if total is None else total + loss.detach()
            opt.step()
            return total

        return step, [*(t for _, t in model.named_tensors()), *(t for _, t in opt.named_tensors()), opt._norm]

    return make


def tokens(parts: int) -> list[list[Any]]:
    """Two batches."""
    rng = np.random.default_rng(0)
    return [[v for _ in range(parts) for v in (rng.integers(0, 7, (3, 5)), MASK, rng.integers(0, 7, 3))]
            for _ in range(2)]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_every_legal_order_gives_the_same_bits(kind: str) -> None:
    same_in_any_order(training(kind, 2), tokens(2))


@pytest.mark.slow
@settings(max_examples=drawn(12), deadline=None)
@given(kind=st.sampled_from(["RNN", "GRU", "LSTM"]), seed=st.integers(0, 2**31), parts=st.integers(1, 3))
def test_many_legal_orders_give_the_same_bits(kind: str, seed: int, parts: int) -> None:
    same_in_any_order(training(kind, parts), tokens(parts), [seed])


def test_the_weight_gradient_of_all_steps_is_one_product_off_the_critical_chain() -> None:
    layer = nn.LSTM(3, 4)

    def step(x: Any) -> Any:
        y, _ = layer(x)
        loss = (y * y).sum()
        loss.backward()
        return loss

    graph = ml.record(step, random_array((6, 2, 3), dtype="float32"))
    weights = [task for task in graph if task.kind == Kind.W]
    assert [[launch.kernel for launch in task.launches] for task in weights] == [["linear_weight_grad"]] * 2
    assert all(len(graph.succs[task.index]) == 0 for task in weights)


@pytest.mark.wide
def test_no_array_data_is_allocated_in_a_step() -> None:
    embedding, attention = nn.Embedding(90, 64), nn.MultiheadAttention(64, 2, causal=True)
    layers = [getattr(nn, kind)(64, 64, batch_first=True, bidirectional=kind == "GRU")
              for kind in ("RNN", "LSTM", "GRU")]
    head, norm = nn.Linear(128, 90), nn.LayerNorm(64)
    opt = optim.AdamW([p for m in (embedding, attention, *layers, head, norm) for p in m.parameters()], max_norm=1.0)

    def step(tokens: Any, mask: Any, labels: Any) -> None:
        x = norm(attention(embedding(tokens), None, mask)).gelu()
        for layer in layers:
            x, _ = layer(x)
        nn.cross_entropy(head(x[:, -1]), labels, 0.1).backward()
        opt.step()

    rng = np.random.default_rng(0)
    values = rng.integers(0, 90, (64, 16)), np.ones((64, 16), np.int64), rng.integers(0, 90, 64)  # a tensor has 256 KB
    run = ml.SequentialExecutor(ml.record(step, *values))
    assert bytes_allocated(lambda: run(*values)) < 100_000


def test_a_row_for_padding_is_zero_at_first() -> None:
    assert (nn.Embedding(5, 3, padding_idx=4).weight.numpy().any(1) == [True] * 4 + [False]).all()
    with pytest.raises(ValueError, match="padding_idx is 5; it must be from 0 to 4"):
        nn.Embedding(5, 3, padding_idx=5)


def test_labels_and_tokens_out_of_range_are_refused() -> None:
    table = nn.Embedding(4, 2)
    for bad in (4, -1):
        with pytest.raises(ValueError, match=f"{bad}.* out of range"):
            table(ml.array(np.array([[0, bad]])))
    run = ml.SequentialExecutor(ml.record(lambda x: table(x).sum(), np.array([[0, 1]])))
    with pytest.raises(ValueError, match=r"4.* out of range"):
        run(np.array([[1, 4]]))
    # labels that are cut out of an input, and copied on their way
    run = ml.SequentialExecutor(ml.record(lambda x, ids: ops.cross_entropy(x, ops.reshape(ids[:, 1:], [-1])),
                                          random_array((4, 3)), np.zeros((2, 3), np.int64)))
    with pytest.raises(ValueError, match=r"3.* out of range"):
        run(random_array((4, 3)), np.array([[0, 1, 2], [0, 1, 3]]))


def test_what_does_not_fit_is_one_clear_line() -> None:
    wrong = (
        lambda: nn.LSTM(0, 3), lambda: nn.RNN(2, 3, nonlinearity="sin"), lambda: nn.GRU(2, 3, num_layers=0),
        lambda: nn.LSTM(2, 3, dropout=1),
        lambda: nn.LSTM(2, 3)(ml.array(np.ones((2, 3)))), lambda: nn.LSTM(2, 3)(ml.array(np.ones((0, 1, 2)))),
        lambda: nn.GRU(2, 3)(ml.array(np.ones((1, 1, 2), np.float32)), ml.array(np.ones((1, 1, 4), np.float32))),
        lambda: nn.GRUCell(2, 3)(ml.array(np.ones((1, 1, 2)))), lambda: nn.LayerNorm(0),
        lambda: nn.LayerNorm(3)(ml.array(np.ones((2, 4)))), lambda: nn.Embedding(0, 1),
        lambda: nn.Embedding(2, 2)(ml.array(np.ones(2))), lambda: nn.MultiheadAttention(4, 3),
        lambda: nn.MultiheadAttention(4, 2)(ml.array(np.ones((2, 4)))),
        lambda: ops.mse(ml.array(np.ones(2)), ml.array(np.ones(3))),
        lambda: ops.cross_entropy(ml.array(np.ones((1, 2))), ml.array(np.array([0])), 1.5),
        lambda: ops.layer_norm(ml.array(np.ones(2)), bias=ml.array(np.ones(2))),
        lambda: ops.attention(*[ml.array(np.ones((1, 2, 3)))] * 3),
        lambda: ops.attention(*[ml.array(np.ones((1, 1, 2, 3)))] * 3, ml.array(np.ones((1, 3), np.int64))),
        lambda: ops.rnn(ml.array(np.ones((2, 1, 3))), ml.array(np.ones((1, 3))), ml.array(np.ones((3, 2)))),
    )
    refuses(*((make, "") for make in wrong), error=ValueError)
