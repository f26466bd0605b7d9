"""Networks for language: their sizes, that they learn, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from command_line import reported
from helpers import bits

import minidl as ml
from minidl import models, nn, optim


@pytest.mark.parametrize("name", ["gpt", "moe_gpt", "bert", "rnn"])
def test_a_batch_is_learnt(name: str) -> None:
    ml.seed(1)
    model = models.create(name, preset="tiny")
    opt = optim.AdamW(model.parameters(), 0.01, max_norm=1.0)
    ids = np.random.default_rng(3).integers(1, 256, (8, model.input_shape[0] + 1))

    def step(x: Any, y: Any) -> Any:
        logits = model(x)
        loss = model.loss(nn.cross_entropy(logits.reshape(-1, model.classes), y.reshape(-1)), logits)
        loss.backward()
        opt.step()
        return loss

    run = ml.SequentialExecutor(ml.record(step, ids[:, :-1], ids[:, 1:]))
    losses = [float(run(ids[:, :-1], ids[:, 1:])) for _ in range(30)]
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


def test_flops_of_a_sample_are_two_for_each_weight_and_token(capsys) -> None:
    """And four for each pair of tokens and channel."""
    record = reported(capsys, "info", "--model", "gpt", "--model-arg", "preset=tiny", "--model-arg", "dropout=0")
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


def test_a_gpt_of_one_expert_is_a_gpt() -> None:
    """Its losses and all that training leaves, bit for bit."""
    ids = np.random.default_rng(3).integers(1, 256, (4, 17))
    ml.seed(1)
    first = dict(models.create("gpt", preset="tiny").named_parameters())
    found = []
    for name, given in (("gpt", {}), ("moe_gpt", {"experts": 1, "top_k": 1, "hidden": 128, "balance": 0.0})):
        model = models.create(name, preset="tiny", dropout=0.0, **given)
        values = {n.replace("mlp.c_fc", "mlp.fc1").replace("mlp.c_proj", "mlp.fc2") if given else n: p.numpy()
                  for n, p in first.items()}
        for n, p in model.named_parameters():
            if n in values:
                p.assign(values[n].reshape(p.shape))
        opt = optim.AdamW([p for n, p in model.named_parameters() if n in values], 0.01)

        def step(x: Any, y: Any, model: Any = model, opt: Any = opt) -> Any:
            loss = nn.cross_entropy(model(x).reshape(-1, 256), y.reshape(-1))
            loss.backward()
            opt.step()
            return loss

        run = ml.SequentialExecutor(ml.record(step, ids[:, :-1], ids[:, 1:]))
        losses = [run(ids[:, :-1], ids[:, 1:]).numpy() for _ in range(3)]
        found.append(bits(*losses, *(p.numpy().ravel() for n, p in model.named_parameters() if n in values)))
    assert found[0] == found[1]
