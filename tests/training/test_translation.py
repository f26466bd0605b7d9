"""Translations by the likeliest tokens, and their BLEU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import drawn
from hypothesis import given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl import data
from minidl.autograd.tape import no_grad
from minidl.training.job import Job
from minidl.training.recorded import Recorded
from minidl.training.sampling import Writer
from minidl.training.trainer import Trainer
from minidl.training.translation import bleu, decoded

END, BETWEEN = 1, 2


@given(rows=st.integers(1, 5), length=st.integers(4, 12), seed=st.integers(0, 999))
@settings(deadline=None, max_examples=drawn(60))
def test_decoding_takes_the_likeliest_token_after_what_is_written(rows: int, length: int, seed: int) -> None:
    """A network that says of each prefix what is drawn for it, whatever follows; most often the end comes late."""
    rng, said = np.random.default_rng(seed), dict[bytes, Any]()

    def of_prefix(prefix: Any) -> Any:
        return said.setdefault(np.ascontiguousarray(prefix).tobytes(), rng.random(8) * (np.arange(8) != END) * 2
                               + (rng.random() < 0.2) * 2 * (np.arange(8) == END))

    def run(x: Any) -> Any:
        return np.array([[of_prefix(row[: i + 1]) for i in range(length)] for row in x])

    x, y = np.zeros((rows, length), np.int64), np.full((rows, length), data.IGNORED)
    sources = [[*rng.integers(3, 8, rng.integers(1, length // 2 + 1)), BETWEEN] for _ in range(rows)]
    for i, source in enumerate(sources):
        x[i, : len(source)] = source
        x[i, len(source) :] = 7  # the true translation, which must not be seen
        y[i, len(source) - 1 :] = 7
    for source, found in zip(sources, decoded(run, x, y, END), strict=True):
        tokens = [int(token) for token in source]
        while len(tokens) < length and (chosen := int(of_prefix(np.array(tokens)).argmax())) != END:
            tokens.append(chosen)
        assert found == tokens[len(source) :]


def pairs(folder: Path) -> Path:
    for part, count in (("train", 24), ("test", 7)):
        for language in ("de", "en"):
            rng = np.random.default_rng(count)
            lines = [" ".join(rng.choice(["one", "two", "three"], 4)) for _ in range(count)]
            (folder / f"{part}.{language}").write_text("\n".join(lines))
    return folder


@pytest.mark.few(1)
@pytest.mark.parametrize("model", ["rnn", "gpt"])
def test_a_recorded_forward_decodes_what_the_network_writes_token_by_token(tmp_path: Path, model: str) -> None:
    recorded = Recorded(Job(model=model, model_args={"preset": "tiny", "length": 48, "dropout": 0.0}, batch_size=4,
                            data=str(pairs(tmp_path))))
    trainer = Trainer(recorded, ml.CostModel.analytic())
    for _ in range(12):
        trainer.step()
    network, test = recorded.model.eval(), recorded.test_data

    def run(x: Any) -> Any:
        with no_grad():
            return network(x).numpy()

    writer = Writer(network, data.tokens.BYTE_TOKENIZER, translates=True)
    found = decoded(run, *next(test), writer.tokenizer.special["end"])
    sources = (tmp_path / "test.de").read_text().splitlines()
    for source, tokens in zip(sources, found, strict=False):
        room = 48 - len(source) - 1
        assert list(writer.tokens(source, room, temperature=0)) == tokens


def test_bleu_of_the_references_is_100_and_of_other_words_0(tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    test = data.load(pairs(tmp_path), batch_size=3, sequence_length=64, split="test")
    x, y = test.dataset.rows(np.arange(7))
    whole = {bytes(row[: (labels != data.IGNORED).argmax() + 1].astype(np.uint8)): labels
             for row, labels in zip(x, y, strict=True)}

    def run(shown: Any, wrong: int = 0) -> Any:
        logits = np.zeros((*shown.shape, 256))
        for i, row in enumerate(shown):
            labels = whole[bytes(row[: row.tolist().index(0xFA) + 1].astype(np.uint8))]
            logits[i, np.arange(64), np.where((labels >= 0) & (labels < 128), labels + wrong, labels) % 256] = 1
        return logits

    assert bleu(run, test) == {"bleu": 100.0}
    assert bleu(lambda shown: run(shown, 1), test)["bleu"] == 0


def test_evaluations_of_translations_have_bleu(tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    job = Job(model="rnn", model_args={"preset": "tiny"}, batch_size=4, data=str(pairs(tmp_path)))
    found = Trainer(Recorded(job), ml.CostModel.analytic()).evaluate()
    assert 0 <= found["bleu"] < 100
    assert {"loss", "perplexity"} < found.keys()
