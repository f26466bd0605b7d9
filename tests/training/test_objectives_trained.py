"""Networks trained for each objective: in parts of a batch, in mixed precision, on older weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import cuda_runtime
import numpy as np
import pipelines
import pytest
import rank_runs
from helpers import together

import minidl as ml
from minidl import optim
from minidl.cli import main
from minidl.cli.distributed import RECORDING
from minidl.data.loader import Loader
from minidl.devices.cuda import device as devices
from minidl.pricing.cost import Link
from minidl.schedulers import pipeline
from minidl.testing.replay import Replay
from minidl.training.job import Job
from minidl.training.pipeline_trainer import PipelineTrainer
from minidl.training.recorded import Recorded
from minidl.training.trainer import Trainer, params_sha256

WORDS = ("one", "two", "three", "four", "five", "six", "seven")
COST = ml.CostModel.analytic()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A text, translations (the words backwards), pairs of sentences, and numbers to predict."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (folder / "words.txt").write_text(" ".join(rng.choice(WORDS, 200)))
    (folder / "pairs").mkdir()
    for part, count in (("train", 160), ("test", 8)):
        lines = [[*rng.choice(WORDS, rng.integers(1, 3))] for _ in range(count)]
        (folder / "pairs" / f"{part}.de").write_text("\n".join(" ".join(line) for line in lines))
        (folder / "pairs" / f"{part}.en").write_text("\n".join(" ".join(line[::-1]) for line in lines))
    (folder / "mrpc").mkdir()
    for part, count in (("train", 96), ("test", 16)):
        rows = [f"{i % 2}\t1\t2\t{rng.choice(WORDS)}\t{rng.choice(WORDS)}" for i in range(count)]
        (folder / "mrpc" / f"msr_paraphrase_{part}.txt").write_text(
            "\n".join(["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", *rows]))
    x = rng.standard_normal((200, 6))
    table = np.column_stack([x, x @ rng.standard_normal(6)])
    np.savetxt(folder / "numbers.csv", table, "%.5f", ",", header="a,b,c,d,e,f,target", comments="")
    labels = np.where(rng.random(200) < 0.3, -100, table[:, 6] > 0)
    np.savetxt(folder / "ignored.csv", np.column_stack([x, labels]), ["%.5f"] * 6 + ["%d"], ",",
               header="a,b,c,d,e,f,class", comments="")
    return folder


def settings(name: str, files: Any) -> dict[str, Any]:
    """Of a job for this objective, or of this network."""
    text: dict[str, Any] = {"optimizer": "adamw", "lr": 0.003, "batch_size": 16}
    small = {"preset": "tiny", "layers": 1, "length": 8, "width": 16, "dropout": 0.0}
    return {
        "next_token": {"model": "gpt", "model_args": small, "data": str(files / "words.txt"), **text},
        "masked_token": {"model": "bert", "model_args": small, "data": str(files / "words.txt"), **text},
        "translation": {"model": "rnn", "model_args": {"preset": "tiny", "dropout": 0.0, "length": 16, "layers": 2},
                        "data": str(files / "pairs"), **text},
        "classes": {"model": "bert", "model_args": {"preset": "tiny", "head": "classes"},
                    "data": str(files / "mrpc"), **text},
        "regression": {"model": "mlp", "model_args": {"preset": "tiny"}, "data": str(files / "numbers.csv"),
                       "optimizer": "adam", "lr": 0.01, "batch_size": 32},
        "classification": {"model": "mlp", "model_args": {"preset": "tiny"}, "data": str(files / "ignored.csv"),
                           "optimizer": "adam", "lr": 0.01, "batch_size": 32},
        "ffnn": {"model": "ffnn", "model_args": {"preset": "tiny"}, "data": "digits", "lr": 0.02, "batch_size": 16},
    }[name]


OBJECTIVES = ["next_token", "masked_token", "translation", "regression", "classification"]


def trained(steps: int, **told: Any) -> Trainer:
    trainer = Trainer(Recorded(Job(**told)), COST)
    for _ in range(steps):
        trainer.step()
    trainer.settle()
    return trainer


def parameters(trainer: Trainer) -> list[Any]:
    return [p.numpy().copy() for p in trainer.recorded.model.parameters()]


# ------------------------------------------------------------------------------------------------------------ in parts
def same(parameters: list[Any], others: list[Any]) -> bool:
    return all(np.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(parameters, others, strict=True))


EXACT = {"dtype": "float64", "optimizer": "sgd", "lr": 0.05, "momentum": 0.9}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_batch_in_parts_is_the_whole_batch(files: Any, name: str) -> None:
    """Also of translations, and of classes where some labels do not count: parts have different numbers of predictions.
    """
    told = settings(name, files) | EXACT
    whole, parts = (trained(4, **told, micro_batches=m, clip=1.0) for m in (1, 4))
    assert whole.recorded.objective.name == name
    assert same(parameters(whole), parameters(parts))
    np.testing.assert_allclose(whole.losses, parts.losses, rtol=1e-9)
    y = next(whole.recorded.train_data)[1].reshape(4, -1)
    assert (len({*(y != -100).sum(axis=1)}) > 1) == parts.recorded.weighs == (
        name in ("translation", "classification"))
    assert np.isfinite([*whole.evaluate().values(), *parts.evaluate().values()]).all()


def test_updates_within_a_step_weigh_their_own_micro_batches(files: Any) -> None:
    """Two updates of two micro-batches each are two steps of half the batch."""
    told = settings("translation", files) | EXACT
    halves = trained(6, **told | {"batch_size": 8})
    parts = trained(3, **told, micro_batches=4, update_every=2)
    assert same(parameters(halves), parameters(parts))
    np.testing.assert_allclose(np.mean(np.reshape(halves.losses, (3, 2)), axis=1), parts.losses, rtol=1e-9)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["translation", "classification"])
@pytest.mark.parametrize(("parallel", "schedulers", "ranks", "replicas"), [
    ("data", ("barrier", "priority", "reverse_first_k"), 1, 2), ("pipeline", ("gpipe", "zb_h1"), 2, 1),
    ("pipeline", ("one_f_one_b", "fast_forward"), 2, 2)])
def test_ranks_that_share_a_batch_make_its_step(files: Any, parallel: str, schedulers: tuple[str, ...], ranks: int,
                                                replicas: int, name: str) -> None:
    """Each rank weighs as many predictions as it makes, under every scheduler with the same bits."""
    told = settings(name, files) | EXACT
    whole = trained(3, **told)

    def left(trainer: Any) -> Any:
        assert trainer.recorded.weighs
        return trainer.losses, parameters(trainer), trainer.params_sha256()

    def run(scheduler: str) -> Any:
        job = Job(**told, micro_batches=2, parallel=parallel, scheduler=scheduler)
        found = rank_runs.trained(job, ranks, replicas, result=left)
        for losses, values, _ in found:
            np.testing.assert_allclose(losses, whole.losses, rtol=1e-9)
            assert same(values, parameters(whole))
        return {sha for *_, sha in found}

    assert len(set.union(*map(run, schedulers))) == 1


# ------------------------------------------------------------------------------------------------------- without --data
@pytest.mark.parametrize(("model", "name", "objective"), [
    ("mlp", "digits", "classification"), ("gpt", "pydoc", "next_token"), ("bert", "pydoc", "masked_token"),
    ("rnn", "pydoc", "next_token")])
def test_a_network_has_embedded_data_that_suit_it(model: str, name: str, objective: str) -> None:
    recorded = Recorded(Job(model=model, model_args={"preset": "tiny"}, batch_size=4))
    assert (recorded.train_data.name, recorded.objective.name) == (name, objective)


@pytest.mark.parametrize(("model", "data", "line"), [
    ("gpt", "digits", "digits has images, not tokens; use pydoc, synthetic, or files of text"),
    ("mlp", "pydoc", "pydoc has tokens, not images; use digits, synthetic, or files of images")])
def test_data_that_do_not_suit_a_network_are_refused_in_one_line(capsys: Any, model: str, data: str, line: str) -> None:
    assert main(["train", "--model", model, "--model-arg", "preset=tiny", "--data", data, "--steps", "1"]) == 2
    assert capsys.readouterr().err == f"minidl: {line}\n"


# ----------------------------------------------------------------------------------------------------- mixed precision
@pytest.mark.wide
@pytest.mark.parametrize(("name", "dtype"), [
    ("masked_token", "bf16"), ("translation", "fp16"), ("regression", "bf16"), ("next_token", "bf16"),
    ("classification", "fp16")])
def test_objectives_are_learned_in_mixed_precision(monkeypatch: Any, files: Any, name: str, dtype: str) -> None:
    """On the stand-in of a CUDA device: with parts of batches, clipping, a loss scale, and evaluation. The scale begins
    where no gradient overflows: each step that is skipped would leave the losses one step behind."""
    monkeypatch.setattr(optim, "GradScaler", partial(optim.GradScaler, init_scale=1024.0))
    monkeypatch.setitem(devices._devices, 0, cuda_runtime.device())
    told = settings(name, files) | {"micro_batches": 2, "clip": 1.0, "scheduler": "multi_stream", "batch_size": 8}
    plain, mixed = trained(3, **told), trained(3, **told, device="cuda", dtype=dtype)
    assert {p.dtype for p in mixed.recorded.model.parameters()} == {"float32"}
    assert (mixed.recorded.optimizer.scaler is not None) == (dtype == "fp16")
    assert mixed.losses != plain.losses
    if mixed.recorded.optimizer.scaler:
        assert mixed.recorded.optimizer.scaler.scale.numpy() == 1024
    np.testing.assert_allclose(mixed.losses, plain.losses, rtol=0.01)
    assert mixed.losses[-1] < mixed.losses[0]
    judged, wanted = mixed.evaluate(), plain.evaluate()
    assert judged.keys() == wanted.keys()
    for metric, value in wanted.items() - {("bleu", wanted.get("bleu"))}:  # one other token changes it much
        assert judged[metric] == pytest.approx(value, rel=0.1), metric


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_batches_that_are_read_ahead_reach_a_device_in_their_order(monkeypatch: Any, files: Any, seed: int) -> None:
    """On the stand-in of a CUDA device, whose streams run in an order drawn from the seed: batches are read in a thread
    and copied through pinned memory while steps run."""
    def run(slow: bool) -> tuple[list[float], str]:
        monkeypatch.setitem(devices._devices, 0, cuda_runtime.device(seed))
        recorded = Recorded(Job(**settings("regression", files) | {"batch_size": 16}, device="cuda",
                                scheduler="multi_stream"))
        loader = recorded.train_data
        recorded.train_data = Loader(replace(loader.dataset, slow=slow), loader.batch_size, seed=loader.seed)
        trainer = Trainer(recorded, COST)
        for _ in range(12):  # over the end of an epoch
            trainer.step()
        trainer.settle()
        return trainer.losses, trainer.params_sha256()

    assert run(slow=True) == run(slow=False)


# --------------------------------------------------------------------------------------------------- on older weights
STALE = {"pipedream": {}, "pipedream_2bw": {"mini_batches": 2}, "paci": {"mini_batches": 4}, "layerpipe": {},
         "layerpipe2": {}}
NETWORKS = {"rnn": ("translation", {}), "ffnn": ("ffnn", {}),
            "bert": ("classes", {})}  #: others share the weights of their first and last stage


def stale(files: Any, name: str, scheduler: str) -> Job:
    objective, more = NETWORKS[name]
    told = settings(objective, files)
    return Job(**told | {"model_args": told["model_args"] | more}, micro_batches=8,
               update_every=pipelines.policy(scheduler).update_every(8, STALE[scheduler].get("mini_batches", 1)),
               scheduler=scheduler, scheduler_args=STALE[scheduler], parallel="pipeline")


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "scheduler"), [
    pytest.param(name, scheduler, marks=[] if name == "ffnn" or scheduler in few else pytest.mark.slow)
    for name, few in (("ffnn", STALE), ("rnn", ["pipedream", "layerpipe2"]), ("bert", ["pipedream_2bw"]))
    for scheduler in STALE])
def test_older_weights_leave_the_bits_of_their_log_replayed(files: Any, name: str, scheduler: str) -> None:
    job, ranks = stale(files, name, scheduler), 2

    def work(communicator: Any) -> Any:
        with RECORDING:  # ranks of one process share the random numbers
            recorded = Recorded(job)
        trainer = PipelineTrainer(recorded, COST, communicator, Link(50.0, 1e3))
        for _ in range(3):
            trainer.step()
        trainer.finish()
        return trainer.losses, params_sha256(recorded.model), trainer.log, trainer.plan, trainer.cost

    (losses, sha, log, plan, cost), other = together(ranks, work)
    assert other[:2] == (losses, sha)
    one = Recorded(job)
    replay = Replay(one.graph, pipeline.balanced(one.graph, cost, ranks))
    inputs = [tuple(one._split(*next(one.train_data))) for _ in losses]
    again = [float(replay(x, [e for e in log if e.step == i])) for i, x in enumerate(inputs)]
    assert (again, params_sha256(one.model)) == (losses, sha)
    assert plan.versions is not None


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_what_stages_share_follows_with_older_weights(tmp_path: Any, model: str) -> None:
    """The head's rank receives each version of the embedding that the first rank makes."""
    assert main(["plan", "--model", model, "--model-arg", "preset=tiny", "--data", "pydoc", "--parallel", "pipeline",
                 "--ranks", "2", "--micro-batches", "4", "--scheduler", "pipedream", "--costs", "analytic", "--save",
                 str(tmp_path / "plan.csv")]) == 0
    lines = (tmp_path / "plan.csv").read_text().splitlines()
    assert {f"1,main,0U{i}/1" for i in range(4)} <= {line.removesuffix("@1") for line in lines}
