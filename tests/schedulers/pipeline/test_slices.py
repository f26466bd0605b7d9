"""Networks that read sequences slice by slice: the same training, with tasks for every slice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import minidl as ml
from minidl import models, nn, ops
from minidl.autograd.tape import use
from minidl.core.tasks import Kind
from minidl.runtime.checking import CheckingExecutor, random_schedule
from minidl.schedulers.pipeline import PipelineError
from minidl.schedulers.pipeline.slices import slices_in
from minidl.training.job import Job
from minidl.training.recorded import Recorded
from minidl.training.trainer import Trainer

COST = ml.CostModel.analytic()
TOKENS = np.random.default_rng(0).integers(0, 256, (3, 17))


def job(slices: int = 2, **others: Any) -> Job:
    given: dict[str, Any] = {"model": "gpt", "model_args": {"preset": "tiny"}, "data": "pydoc", "batch_size": 4,
                             "micro_batches": 2, "lr": 0.01, "optimizer": "adamw"}
    return Job(slices=slices, **given | others)


def trained(one: Job, steps: int = 2) -> Trainer:
    trainer = Trainer(Recorded(one), COST)
    for _ in range(steps):
        trainer.step()
    trainer.settle()
    return trainer


@pytest.mark.parametrize("ends", [[4, 8, 12, 16], [1, 16], [9, 10, 16]])
def test_slices_have_the_logits_and_the_gradients_of_the_whole(ends: list[int]) -> None:
    def gradients(parts: list[int]) -> tuple[Any, list[Any]]:
        ml.seed(1)
        model = models.create("gpt", preset="tiny", dropout=0.0).astype("float64")
        past, logits, total, begin = nn.Past(16), [], None, 0
        for j, end in enumerate(parts):
            with ml.micro_batch(j, follows=j > 0):
                logits.append(model(TOKENS[:, begin:end], *[past] * (len(parts) > 1)))
                loss = nn.cross_entropy(logits[-1].reshape(-1, 256), ml.array(TOKENS[:, begin + 1 : end + 1].ravel()))
                loss = loss * ((end - begin) / 16)
                total = loss if total is None else total + loss
            begin = end
        total.backward()
        return np.concatenate([y.numpy() for y in logits], 1), [p.grad.numpy() for p in model.parameters()]

    (whole, wanted), (sliced, found) = gradients([16]), gradients(ends)
    np.testing.assert_allclose(sliced, whole, rtol=1e-9, atol=1e-12)
    for g, w in zip(found, wanted, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-8, atol=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize(("slices", "more"), [
    (2, {}), (8, {}), (4, {"cell": "rnn"}), (4, {"cell": "gru"}), (4, {"cell": "lstm"})])
def test_training_in_slices_is_training(slices: int, more: dict[str, Any]) -> None:
    """Of gpt, with clipping; and of a recurrent network, which hands its state from slice to slice."""
    exact: dict[str, Any] = {"dtype": "float64", "model_args": {"preset": "tiny", "dropout": 0.0, **more},
                             **({"model": "rnn"} if more else {"clip": 0.1})}
    whole, sliced = trained(job(1, **exact)), trained(job(slices, **exact))
    np.testing.assert_allclose(sliced.losses, whole.losses, rtol=1e-12)
    for p, w in zip(sliced.recorded.model.parameters(), whole.recorded.model.parameters(), strict=True):
        np.testing.assert_allclose(p.numpy(), w.numpy(), rtol=1e-6, atol=1e-9)


def test_a_recorded_step_has_the_bits_of_an_eager_one() -> None:
    """With dropout, whose numbers go on from slice to slice."""
    recorded = trained(job(4))
    eager = Recorded(job(4))
    losses = []
    for _ in range(2):
        with use(eager.tape):
            losses.append(float(eager._step(*map(ml.array, eager._split(*next(eager.train_data))))))
    assert losses == recorded.losses
    for p, w in zip(eager.model.parameters(), recorded.recorded.model.parameters(), strict=True):
        assert p.numpy().tobytes() == w.numpy().tobytes()


def test_slices_have_other_dropouts_than_those_before_and_those_of_other_micro_batches() -> None:
    """A micro-batch has those that it would have in another order of micro-batches."""
    def masks(order: list[int]) -> dict[int, bytes]:
        ml.seed(3)
        found = {}
        for i in order:
            for j in range(2):
                with ml.micro_batch(2 * i + j, 4 * i, follows=j > 0):
                    found[2 * i + j] = ops.dropout(ml.array(np.ones((4, 9), "f")), 0.5).numpy().tobytes()
        return found

    found = masks([0, 1])
    assert len(set(found.values())) == 4
    assert masks([1, 0]) == found


def test_every_order_that_the_edges_allow_has_the_same_bits() -> None:
    """Versions of buffers are checked, so a missing edge between slices is an error."""
    small: dict[str, Any] = {"model_args": {"preset": "tiny", "layers": 1}}
    wanted = trained(job(**small), 1)
    for seed in range(3):
        recorded = Recorded(job(**small))
        lanes = random_schedule(recorded.graph, 3, np.random.default_rng(seed))
        run = CheckingExecutor(recorded.graph, lanes, seed=seed)
        loss = run(*recorded._split(*next(recorded.train_data)))
        assert [float(loss)] == wanted.losses
        assert [p.numpy().tobytes() for p in recorded.model.parameters()] \
            == [p.numpy().tobytes() for p in wanted.recorded.model.parameters()]


def test_tasks_belong_to_their_slices() -> None:
    """Only later slices add to the gradients of earlier keys and values. The backward pass takes them in reverse."""
    graph = Recorded(job(2)).graph

    def units(kind: Kind, micro_batch: int) -> set[int]:
        return set(graph.unit[(graph.kind == kind) & (graph.micro_batch == micro_batch)].tolist())

    assert units(Kind.O, 0) == units(Kind.O, 2) <= units(Kind.O, 1) == units(Kind.O, 3)
    for i in (1, 2, 3):
        assert len(units(Kind.W, 0) - units(Kind.W, i)) == 1, "the gradients of the embedding and of the logits"
        assert units(Kind.F, 0) <= units(Kind.F, i), "and the losses so far"
    backward = graph.micro_batch[graph.kind == Kind.O].tolist()
    assert [m for i, m in enumerate(backward) if i == 0 or backward[i - 1] != m] == [1, 0, 3, 2]
    assert [slices_in(Recorded(job(q)).graph) for q in (1, 2, 4)] == [1, 2, 4]


def test_sequences_of_different_numbers_of_slices_are_refused() -> None:
    model = models.create("gpt", preset="tiny")

    def step(tokens: Any) -> None:
        for i, slices in enumerate(((0, 1), (2,))):
            past, total = nn.Past(16), None
            for j in slices:
                with ml.micro_batch(j, follows=j == 1):
                    loss = model(tokens[:, 4 * j : 4 * j + 4], past).sum()
                    total = loss if total is None else total + loss
            assert total is not None, i
            total.backward()

    with pytest.raises(PipelineError, match="1 of 3 micro-batches need output gradients of later ones"):
        slices_in(ml.record(step, TOKENS[:, :16]))


def test_a_past_has_as_many_tokens_as_the_network_has_positions() -> None:
    model, past = models.create("gpt", preset="tiny"), nn.Past(16)
    model(TOKENS[:, :12], past)
    assert past.tokens == 12
    with pytest.raises(ValueError, match=r"tokens \(3, 5\); expected \(n, t\) with t from 1 to 4"):
        model(TOKENS[:, 12:], past)


@pytest.mark.parametrize(("change", "line"), [
    ({"slices": 3}, "the 16 tokens of gpt do not divide into 3 slices"),
    ({"slices": 0}, "0 slices; a micro-batch has at least 1"),
    ({"model": "bert"}, "bert cannot read its input in slices: it has no sequence, or a token depends on later ones"),
    ({"model": "mlp", "data": "digits", "model_args": {}}, "mlp cannot read its input in slices"),
    ({"model": "resnet20", "data": "digits"}, "resnet20 cannot read its input in slices")])
def test_what_cannot_be_sliced_is_one_line(change: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line) as found:
        Recorded(job(**change))
    assert "\n" not in str(found.value)


def test_slices_weigh_as_many_tokens_as_they_predict(tmp_path: Any) -> None:
    """A translation has its targets at the end, so that some slices have none."""
    for name in ("train.en", "train.de"):
        (tmp_path / name).write_text("".join(f"{'one two'[: 3 + i % 5]}\n" for i in range(40)))
    exact: dict[str, Any] = {"dtype": "float64", "model_args": {"preset": "tiny", "dropout": 0.0}}
    whole, sliced = (trained(job(q, data=str(tmp_path), **exact)) for q in (1, 4))
    assert sliced.recorded.objective.name == "translation"
    np.testing.assert_allclose(sliced.losses, whole.losses, rtol=1e-12)
