"""Networks for language: their sizes, and the bits of one process under every kind of plan, dropout included."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pipelines
import pytest
from helpers import deadline, replicas

import minidl as ml
from minidl import models, nn, ops, optim
from minidl.autograd.tape import settle
from minidl.cli.info import model_info
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import DistributedExecutor, SequentialExecutor, executor
from minidl.schedulers import names

NAMES = ["gpt", "bert", "rnn"]
TIED = {"gpt", "bert"}  #: the head uses the embedding's weight
MICRO_BATCHES, SHARE, STEPS = 4, 2, 2
COST = ml.CostModel.analytic()


def samples(name: str) -> list[Any]:
    """For each step its inputs: tokens and labels of each micro-batch."""
    length, classes = models.create(name, preset="tiny").input_shape[0], 256
    ids = np.random.default_rng(3).integers(1, classes, (STEPS, MICRO_BATCHES, SHARE, length + 1))
    return [[part for i in ids[t] for part in (i[:, :-1], i[:, 1:])] for t in range(STEPS)]


def prepared(name: str, micro_batches: range = range(MICRO_BATCHES), groups: int = 1) -> tuple[Any, Any]:
    """A model, and its step over these micro-batches of the batch as a graph."""
    ml.seed(1)
    model = models.create(name, preset="tiny")
    opt = optim.AdamW(model.parameters(), 0.01, max_norm=1.0)

    def step(*parts: Any) -> Any:
        totals: list[Any] = [None] * groups
        for i, m in enumerate(micro_batches):
            group = i * groups // len(micro_batches)
            with ml.micro_batch(i, m * SHARE, group):
                logits = model(parts[2 * i])
                loss = nn.cross_entropy(logits.reshape(-1, model.classes), parts[2 * i + 1].reshape(-1))
                (loss * (1 / len(micro_batches))).backward()
                part = loss.detach()
                totals[group] = part if totals[group] is None else ops.add(totals[group], part)
                if i + 1 == len(micro_batches):
                    total = functools.reduce(ops.add, totals)
        opt.step()
        return total

    return model, ml.record(step, *parts_of(samples(name)[0], micro_batches))


def parts_of(batch: list[Any], micro_batches: range) -> list[Any]:
    return batch[2 * micro_batches.start : 2 * micro_batches.stop]


@functools.cache
def alone(name: str, groups: int = 1) -> tuple[list[float], list[bytes]]:
    """Losses and parameters of one process."""
    model, graph = prepared(name, groups=groups)
    run = SequentialExecutor(graph)
    return [float(run(*batch)) for batch in samples(name)], [p.numpy().tobytes() for p in model.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_learnt(name: str) -> None:
    _, graph = prepared(name)
    run, batch = SequentialExecutor(graph), samples(name)[0]
    losses = [float(run(*batch)) / MICRO_BATCHES for _ in range(30)]
    assert losses[0] < 1.2 * np.log(256)
    assert losses[-1] < 0.8 * losses[0]


#: published, where a source gives the number
PARAMETERS = {"bert_base": 109_482_240, "bert_large": 335_141_888, "gpt": 124_439_808, "gpt2_medium": 354_823_168,
              "gpt3_medium": 355_871_744}
HEADS = {"masked": 109_482_240 - 768 * 769 + (768 * 769 + 2 * 768) + 30_522, "classes": 109_482_240 + 2 * 769}


def test_the_number_of_parameters_is_the_published_one() -> None:
    for name, wanted in PARAMETERS.items():
        assert sum(p.size for p in models.create(name).parameters()) == wanted, name
    for head, wanted in HEADS.items():
        assert sum(p.size for p in models.create("bert_base", head=head).parameters()) == wanted, head


def test_flops_of_a_sample_are_two_for_each_weight_and_token() -> None:
    """And four for each pair of tokens and channel."""
    record = model_info("gpt", {"preset": "tiny", "dropout": 0})
    t, width, layers = 16, 32, 2
    products = 2 * t * (layers * 12 * width**2 + 256 * width)
    small = record["flops_per_sample"] - products - layers * 4 * t * t * width
    assert 0 <= small < 0.1 * products


def test_padding_changes_no_other_token() -> None:
    ml.seed(0)
    network = models.create("bert", preset="tiny").eval()
    ids = np.random.default_rng(0).integers(1, 256, (2, 16))
    ids[:, 9:] = 0
    with ml.no_grad():
        whole, short = network(ids).numpy()[:, :9], network(ids[:, :9]).numpy()
        np.testing.assert_allclose(whole, short, rtol=1e-5, atol=1e-6)
        other = network(ids, np.ones_like(ids)).numpy()[:, :9]
    assert np.abs(other - whole).max() > 1e-4, "segments count"


@pytest.mark.parametrize(("name", "arguments", "message"), [
    ("gpt", {"heads": 5}, "gpt: 5 heads do not divide the width 32"),
    ("gpt", {"dropout": 1}, "is 1.0; it must be a number >= 0 and below 1"),
    ("bert", {"head": "tail"}, "bert: unknown head 'tail'; known: pooler, masked, classes"),
    ("bert", {"length": 17}, "bert: a length of 17 is above the 16 positions"),
    ("rnn", {"cell": "cnn"}, "rnn: unknown cell 'cnn'; known: rnn, gru, lstm"),
])
def test_what_does_not_fit_is_one_clear_line(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.create(name, preset="tiny", **arguments)


def test_a_row_that_is_too_long_is_one_clear_line() -> None:
    for name in ("gpt", "bert"):
        with pytest.raises(ValueError, match=rf"{name}: tokens \(1, 17\); expected \(n, t\) with t from 1 to 16"):
            models.create(name, preset="tiny")(np.ones((1, 17), np.int64))


@pytest.mark.few(1)
@pytest.mark.parametrize("scheduler", ["in_order", "multi_stream", "multi_region"])
@pytest.mark.parametrize("name", NAMES)
def test_one_device_leaves_the_bits_of_the_sequential_run(name: str, scheduler: str) -> None:
    model, graph = prepared(name)
    plan = ml.plan(graph, scheduler, COST)
    run = executor(graph, plan.schedule)
    losses = [float(run(*batch)) for batch in samples(name)]
    settle()
    run.close()
    assert (losses, [p.numpy().tobytes() for p in model.parameters()]) == alone(name)


def on_ranks(name: str, scheduler: str, ranks: int, **options: Any) -> None:
    """Compares a pipeline with one process. Losses are on one rank, parameters on those that use them."""
    groups = pipelines.groups(scheduler)
    own = [prepared(name, groups=groups) for _ in range(ranks)]
    plans = [ml.plan(graph, scheduler, COST, ml.Machine(ranks), **options) for _, graph in own]

    def work(communicator: Any) -> Any:
        model, _ = own[communicator.rank]
        run = DistributedExecutor(*plans[communicator.rank].with_messages, communicator)
        losses = [run(*batch) for batch in samples(name)]
        run.close()
        held = {id(s.live) for s in run.program.graph.storages if s.live is not None}
        return losses, [p.numpy().tobytes() if id(p.storage) in held else None for p in model.parameters()]

    with deadline():
        found = run_ranks(ranks, work)
    losses, parameters = alone(name, groups)
    assert [float(v) for step in zip(*(l for l, _ in found), strict=True) for v in step if v is not None] == losses
    for wanted, *copies in zip(parameters, *(p for _, p in found), strict=True):
        assert {c for c in copies if c is not None} == {wanted}


FEW = [("gpipe", 2), ("zb_h1", 3), ("modulo", 2)]
#: without those that change the training, search for an optimum, or plan slices
SYNCHRONOUS = [n for n, p in pipelines.POLICIES.items() if not p.stale and n not in ("optimal", "seq1f1b")]


@pytest.mark.few(1)
@pytest.mark.parametrize(("scheduler", "ranks"), FEW)
@pytest.mark.parametrize("name", NAMES)
def test_pipelines_leave_the_bits_of_one_process(name: str, scheduler: str, ranks: int) -> None:
    on_ranks(name, scheduler, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", SYNCHRONOUS)
@pytest.mark.parametrize("name", NAMES)
def test_every_pipeline_policy_leaves_the_bits_of_one_process(name: str, scheduler: str) -> None:
    on_ranks(name, scheduler, 2)


@functools.cache
def data_parallel(name: str, scheduler: str, ranks: int = 2) -> list[bytes]:
    """The parameters that ranks leave, each with its share of the micro-batches as its batch."""
    shares = [range(r * MICRO_BATCHES // ranks, (r + 1) * MICRO_BATCHES // ranks) for r in range(ranks)]
    own = []
    for share in shares:
        model, graph = prepared(name, share)
        own.append((model, replicas(graph, scheduler, None, lambda sizes: 1 + sum(sizes.values()) / 100, ranks,
                                    buckets=2)))

    def work(communicator: Any) -> list[bytes]:
        model, plan = own[communicator.rank]
        run = DistributedExecutor(plan.graph, plan.schedule, communicator)
        for batch in samples(name):
            run(*parts_of(batch, shares[communicator.rank]))
        run.close()
        return [p.numpy().tobytes() for p in model.parameters()]

    with deadline():
        first, *others = run_ranks(ranks, work)
    assert all(other == first for other in others)
    return first


def check_data_parallel(name: str, scheduler: str) -> None:
    """Every policy leaves the same bits. They are those of one process, but where a weight is used twice: a rank adds
    its uses before the ranks' sums are added."""
    found, (_, wanted) = data_parallel(name, scheduler), alone(name, 2)
    assert found == data_parallel(name, "no_overlap")
    for mine, one in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.frombuffer(mine, "f"), np.frombuffer(one, "f"), rtol=1e-3, atol=1e-5)
    if name not in TIED:
        assert found == wanted


@pytest.mark.few(1)
@pytest.mark.parametrize("scheduler", ["barrier", "priority"])
@pytest.mark.parametrize("name", NAMES)
def test_data_parallel_ranks_leave_the_bits_of_one_process(name: str, scheduler: str) -> None:
    check_data_parallel(name, scheduler)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", names("data", exact=True))
@pytest.mark.parametrize("name", NAMES)
def test_every_data_parallel_policy_leaves_the_bits_of_one_process(name: str, scheduler: str) -> None:
    check_data_parallel(name, scheduler)
