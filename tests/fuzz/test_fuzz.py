"""The campaign over random recorded steps, a short one and a long one; that it notices what is wrong;
and its command."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_steps
from arrangements import arrangements
from helpers import torch_or_skip

import minidl as ml
from minidl import optim
from minidl.autograd import random, tensor
from minidl.cli import main
from minidl.ops import dropout
from minidl.ops.batch_norm import BatchNorm
from minidl.plans import memory
from minidl.testing import fuzz

#: why a step that runs eagerly may not be recorded
REASONS = ("RuntimeError: the step ends with a gradient of ",)
LONG = int(os.environ.get("MINIDL_FUZZ_CASES", "300"))
FIRST = int(os.environ.get("MINIDL_FUZZ_SEED", "1000"))
BLOCK = 50  #: cases of one test of the long campaign


def hold(seeds: range) -> None:
    """Fails with the seed, which arrangement differs, and the text of the step."""
    verdicts = [fuzz.check(random_steps.training, seed, partial(arrangements, every=False)) for seed in seeds]
    for v in verdicts:
        assert not v.failures, f"seed {v.seed}: {v.failures}\n{random_steps.draw(v.seed).source}"
        assert not v.invalid, f"seed {v.seed} does not run eagerly: {v.invalid}\n{random_steps.draw(v.seed).source}"
        assert not v.refused or v.refused.startswith(REASONS), f"seed {v.seed} cannot be recorded: {v.refused}"
    assert sum(bool(v.refused) for v in verdicts) <= max(2, 0.05 * len(verdicts))


SEEDS = pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 25), marks=pytest.mark.slow)], ids=str)


def hold_against_torch(seeds: range) -> None:
    """In float64 outputs, gradients and parameters are torch's."""
    torch_or_skip()
    from fuzz_torch import exact, our_steps, torch_steps

    compared = 0
    for seed in seeds:
        program = exact(random_steps.draw(seed))
        random.seed(seed)
        ours = our_steps(program, seed)
        random.seed(seed)
        theirs = torch_steps(program, seed)
        if not all(np.abs(t).max(initial=0) < 1e6 for t in theirs):
            continue  # it diverges: what cancels out of large numbers is noise
        compared += 1
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            scale = max(1e-3, np.abs(b).max(initial=0))
            assert np.abs(a - b).max(initial=0) <= 1e-7 * scale, (
                f"value {i} of seed {seed} is not torch's\n{program.source}")
    assert compared >= 0.8 * len(seeds)


@SEEDS
def test_recorded_random_steps_equal_eager_ones_however_they_are_arranged(seeds: range) -> None:
    hold(seeds)


@SEEDS
def test_random_steps_have_the_gradients_of_torch(seeds: range) -> None:
    hold_against_torch(seeds)


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(FIRST, FIRST + LONG, BLOCK))
def test_the_long_campaign(first: int) -> None:
    """MINIDL_FUZZ_CASES random steps from seed MINIDL_FUZZ_SEED on."""
    hold(range(first, min(first + BLOCK, FIRST + LONG)))


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(FIRST, FIRST + LONG, BLOCK))
def test_the_long_campaign_against_torch(first: int) -> None:
    hold_against_torch(range(first, min(first + BLOCK, FIRST + LONG)))


def test_random_steps_are_of_every_kind() -> None:
    """Whatever the campaign is said to be about is there."""
    programs = [random_steps.draw(seed) for seed in range(300)]
    text = "\n".join(p.source for p in programs)
    for name in ("dropout(", "training=True", "training=False", "transpose(", "concat(", "[", "broadcast_to(",
                 "conv2d(", "attention(", "embedding(", "detach(", "no_grad()", "micro_batch(2,", "drop(", "array(",
                 "return None", "cast(", "grad(p", "rnn(", "= mean(detach(", "backward(s"):
        assert name in text, name
    assert any(p.source.count("    backward(") > 1 for p in programs)
    assert any(len(p.optimizers) > 1 and p.source.count("update(") > 2 for p in programs)
    assert {kind for p in programs for kind, _, _ in p.optimizers.values()} == {"SGD", "Adam", "AdamW"}
    assert any("max_norm" in arguments for p in programs for _, arguments, _ in p.optimizers.values())
    assert any(p.scaled for p in programs)
    assert any(p.rates for p in programs)
    assert {p.dtype for p in programs} == {"float32", "float64"}
    assert random_steps.draw(7).source == random_steps.draw(7).source


# ------------------------------------------------------------------------------------------------------ what it notices
def plain(seed: int) -> Any:
    w = ml.Parameter(np.linspace(-1, 1, 6, dtype=np.float32))
    opt = optim.SGD([w], 0.1)

    def step(x: Any, unused: Any) -> Any:
        hidden = x * w
        loss = (dropout(hidden, 0.5) * hidden).sum()
        loss.backward()
        opt.step()
        return loss, hidden

    values = np.random.default_rng(seed).normal(size=(3, 2, 4, 6)).astype("f")
    return step, [tuple(both) for both in values], [w, opt]


def test_a_step_of_ones_own() -> None:
    verdict = fuzz.check(plain, 3, arrangements)
    assert verdict == replace(verdict, invalid="", refused="", failures={})
    assert verdict.runs in range(9, 15)  # one or two sets of late tasks; ranks, recomputed layers and so on at times
    assert verdict.tasks == 10


def test_memory_that_is_shared_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = memory.lifetimes
    monkeypatch.setattr(memory, "lifetimes",
                        lambda graph, schedule: replace(found(graph, schedule), known=np.full_like(
                            found(graph, schedule).known, memory.NEVER)))
    verdict = fuzz.check(plain, 3, arrangements)
    assert "sequential" not in verdict.failures  # it plans no memory
    assert len(verdict.failures) == verdict.runs - 1
    assert fuzz.check(fuzz.random_training, 3).failures


def test_a_step_that_counts_by_itself_is_noticed() -> None:
    def make(seed: int) -> Any:
        step, inputs, owners = plain(seed)
        calls: list[int] = []

        def counting(*inputs: Any) -> Any:
            calls.append(1)
            return step(*inputs)[1] * float(len(calls))

        return counting, inputs, owners

    verdict = fuzz.check(make, 0, arrangements)
    assert len(verdict.failures) >= verdict.runs - 1  # a step that changes nothing is none for ranks
    assert verdict.failures["sequential"].startswith("output 0 of call 1 differs from the eager run")


def test_gradients_that_share_memory_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = tensor._accumulate
    monkeypatch.setattr(tensor, "_accumulate", lambda t, use, g, own: right(t, use, g, True))
    with pytest.raises(AssertionError, match="is not torch's"):
        hold_against_torch(range(5000, 5020))


def test_sums_of_an_earlier_backward_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In batch norms whose weights are not trained, passed twice."""
    right = BatchNorm.output_grad

    def wrong(self: BatchNorm, dy: Any, wanted: Any) -> Any:
        self.dy = None if self.dy is None else dy
        return right(self, dy, wanted)

    monkeypatch.setattr(BatchNorm, "output_grad", wrong)
    with pytest.raises(AssertionError, match="is not torch's"):
        hold_against_torch(range(5030, 5050))


def test_what_cannot_be_compared_says_why() -> None:
    def unlucky(seed: int) -> Any:
        step, _, owners = plain(seed)
        return step, [tuple(np.random.default_rng().normal(size=(2, 4, 6)).astype("f"))], owners

    def looking(seed: int) -> Any:
        step, inputs, owners = plain(seed)
        return lambda *inputs: (step(*inputs)[0].item(), None)[1], inputs, owners

    def failing(seed: int) -> Any:
        step, inputs, owners = plain(seed)
        return lambda *inputs: 1 / 0, inputs, owners

    assert "differs between two trainings made from the same seed" in fuzz.check(unlucky, 0).invalid
    assert "has no value while a step is recorded" in fuzz.check(looking, 0).refused
    assert fuzz.check(failing, 0).invalid == "ZeroDivisionError: division by zero"
    assert "a training is (step, inputs, owners)" in fuzz.check(lambda seed: plain(seed)[:2], 0).invalid
    assert "not a str" in fuzz.check(lambda seed: (*plain(seed)[:2], ["w"]), 0).invalid


# ---------------------------------------------------------------------------------------------------------- the command
OWN = """
import numpy as np
import minidl as ml
from minidl import nn
from minidl import optim

def training(seed):
    model = nn.Linear(3, 2)
    opt = optim.Adam(model.parameters())
    def step(x):
        loss = model(nn.dropout(x)).sum()
        loss.backward()
        opt.step()
        return loss
    return step, [(x,) for x in np.random.default_rng(seed).normal(size=(4, 5, 3)).astype("f")], [model, opt]

def wrong(seed):
    step, inputs, owners = training(seed)
    calls = []
    return lambda x: calls.append(x) or x * float(len(calls)), inputs, owners

def failing(seed):
    return (lambda x: x @ x), training(seed)[1], []

number = 3
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    assert main(["fuzz", f"{file}:training", "--cases", "2", "--seed", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {k: found[k] for k in ("cases", "seed", "failures", "refused", "invalid")} == {
        "cases": 2, "seed": 5, "failures": [], "refused": [], "invalid": []}
    assert found["arrangements"] >= 14
    assert main(["fuzz", f"{file}:wrong", "--cases", "1"]) == 1
    out = capsys.readouterr().out
    assert "0 of 1 equal their eager run" in out
    assert f"minidl fuzz {file}:wrong --seed 0 --cases 1" in out
    assert main(["fuzz", f"{file}:failing", "--cases", "1"]) == 1
    assert "1 do not run eagerly: ShapeError: matmul" in capsys.readouterr().out
    assert main(["fuzz", "--cases", "2", "--seed", "8"]) == 0
    assert "2 cases from seed 8: 2 of 2 equal" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "says"), [
    ("own.py", "is not the name of a function"), ("own.py:", "is not the name of a function"),
    ("none.py:training", "no such file"), ("own.py:number", "has no function number"),
    ("own.py:missing", "has no function missing"),
    ("broken.py:training", "SyntaxError"), ("other.txt:training", "No module named 'other'")])
def test_what_is_no_step_is_one_line(name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    Path("broken.py").write_text("def training(")
    assert main(["fuzz", name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
