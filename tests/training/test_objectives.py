"""Objectives: their losses and metrics, and networks of each under every command, on one device and on ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from command_line import reported, run

import minidl as ml
from minidl import models
from minidl.data import IGNORED, DataError, Dataset, draws
from minidl.training import objectives

NETWORKS = '''
from minidl import nn


class Tokens(nn.Module):
    """Tokens (n, length) -> logits (n, length, vocabulary), each from its own token alone."""

    input_dtype, objective = "int64", "next_token"

    def __init__(self, length, vocabulary, width):
        self.input_shape, self.classes = (length,), vocabulary
        self.table = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        return self.head(nn.relu(self.hidden(self.table(ids))))


def bigram(length=16, vocabulary=256, width=24):
    return Tokens(length, vocabulary, width)


def cloze(length=16):
    network = Tokens(length, 256, 24)
    network.objective = "masked_token"
    return network
'''


@pytest.fixture
def bigram(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(NETWORKS)
    return [f"--model={file}:bigram", "--data", "pydoc", "--batch-size", "8", "--costs", "analytic"]


# ---- what each computes


def test_the_token_loss_is_the_mean_over_all_positions():
    rng = np.random.default_rng(0)
    logits, y = rng.standard_normal((3, 4, 5)), rng.integers(0, 5, (3, 4))
    chance = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    wanted = -np.log(np.take_along_axis(chance, y[..., None], -1)).mean()
    objective = objectives.find("next_token")
    assert float(objective.loss(ml.array(logits), ml.array(y))) == pytest.approx(wanted, rel=1e-12)
    found = objective.judge(objective.score(logits, y), data(bytes_per_token=2.5))
    assert found == pytest.approx({"loss": wanted, "perplexity": math.exp(wanted),
                                   "bits_per_byte": wanted / math.log(2) / 2.5})
    assert "bits_per_byte" not in objective.judge(objective.score(logits, y), data())


def test_scores_of_batches_add_up_to_those_of_the_whole():
    rng = np.random.default_rng(1)
    for name, output, y in (("classification", rng.standard_normal((9, 4)), rng.integers(0, 4, 9)),
                            ("next_token", rng.standard_normal((9, 2, 4)), rng.integers(0, 4, (9, 2))),
                            ("regression", rng.standard_normal((9, 2)), rng.standard_normal((9, 2)))):
        objective = objectives.find(name)
        parts = objective.score(output[:4], y[:4]) + objective.score(output[4:], y[4:])
        np.testing.assert_allclose(parts, objective.score(output, y))
        found = objective.judge(parts, data())
        loss = objective.loss(ml.array(output), ml.array(y))
        assert found["loss"] == pytest.approx(float(loss), rel=1e-12)
        assert objective.metric in found


def test_masked_tokens_are_hidden_as_bert_does_and_only_they_count():
    text = np.arange(4000).reshape(100, 40) % 50
    plain = Dataset("text", 100, (40,), 60, lambda i: (text[i], text[i]), ("masked_token",), mask=59)
    hidden = objectives.find("masked_token").of(plain, "m", {})
    x, y = hidden.rows(np.arange(100), draws.of_epoch(100, 0, 7))
    at = y != IGNORED
    assert (at.sum(axis=1) == 6).all()
    np.testing.assert_array_equal(y[at], text[at])
    np.testing.assert_array_equal(x[~at], text[~at])
    assert 0.75 < (x[at] == 59).mean() < 0.85
    assert 0.05 < (x[at] == text[at]).mean() < 0.15
    other, _ = hidden.rows(np.arange(100), draws.of_epoch(100, 1, 7))
    assert (other != x).any(axis=1).all()
    some = np.array([3, 99])
    again, _ = hidden.rows(some, draws.of_epoch(100, 0, 7)[some])
    np.testing.assert_array_equal(again, x[some])
    logits = np.random.default_rng(0).standard_normal((100, 40, 60))
    for name in ("masked_token", "translation"):
        objective = objectives.find(name)
        found = objective.judge(objective.score(logits, y), hidden)
        assert found["loss"] == pytest.approx(float(objective.loss(ml.array(logits), ml.array(y))), rel=1e-12)


def test_better_follows_the_metric():
    accuracy, error = objectives.find("classification"), objectives.find("regression")
    assert accuracy.better({"accuracy": 0.5}, None)
    assert accuracy.better({"accuracy": 0.6}, {"accuracy": 0.5})
    assert not accuracy.better({"accuracy": 0.5}, {"accuracy": 0.5})
    assert error.better({"error": 0.5}, {"error": 0.6})


def data(**more):
    return Dataset("some", 1, (2,), 4, lambda i: (i, i), ("next_token",), **more)


def test_what_does_not_fit_is_told_in_one_line():
    with pytest.raises(DataError, match="some is for next_token, and m is trained for classification"):
        objectives.find("classification").of(data(), "m", {})
    with pytest.raises(ValueError, match="unknown objective 'ranking'; known: classification"):
        objectives.find("ranking")
    pairs = Dataset("pairs", 8, (4,), 2, lambda i: (i, i), vocabulary=9)
    with pytest.raises(DataError, match="choose other data or another network, such as bert with head=classes$"):
        objectives.find("masked_token").of(pairs, "bert", models.create("bert", preset="tiny").others)


# ---- a language model under every command


def test_a_language_model_learns(capsys, bigram):
    found = reported(capsys, "train", *bigram, "--steps", "300", "--optimizer", "adam", "--lr", "0.01")
    assert (found["objective"], found["data"], found["accuracy"]) == ("next_token", "pydoc", None)
    assert found["loss_first"] > 5
    assert found["test"]["bits_per_byte"] < 4.2  # a unigram model of this text has about 4.4
    assert found["test"]["perplexity"] == pytest.approx(math.exp(found["test"]["loss"]))


def test_compare_plan_simulate_and_explain_take_a_language_model(capsys, bigram):
    assert reported(capsys, "compare", *bigram, "--steps", "3", "--micro-batches", "2")["bit_identical"]
    assert "perplexity" in run(capsys, "compare", *bigram, "--steps", "2")[1]
    for verb in (["plan"], ["simulate"], ["explain", "0W0"]):
        for more in ([], ["--parallel", "data", "--ranks", "2", "--scheduler", "priority"],
                     ["--parallel", "pipeline", "--ranks", "2", "--micro-batches", "2", "--scheduler", "zb_h1"]):
            assert run(capsys, *verb, *bigram, *more)[0] == 0, (verb, more)


def test_a_masked_language_model_trains_alike_on_one_device_and_on_ranks(capsys, bigram):
    argv = ["train", bigram[0].replace("bigram", "cloze"), *bigram[1:], "--steps", "4", "--dtype", "float64"]
    alone = reported(capsys, *argv, "--micro-batches", "4")
    assert alone["objective"] == "masked_token"
    found = reported(capsys, *argv, "--micro-batches", "4", "--parallel", "pipeline", "--ranks", "2", "--scheduler",
                     "zb_h1")
    assert found["params_sha256"] == alone["params_sha256"]
    found = reported(capsys, *argv, "--parallel", "data", "--ranks", "2", "--scheduler", "priority")
    assert found["test"] == pytest.approx(alone["test"], rel=1e-9)
