"""Muon against torch's, its two halves in one step, and where its parameters come from."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import refusal, reported, run
from helpers import random_array, torch_or_skip

import minidl as ml
from minidl import models, nn, optim
from minidl.cli import main
from minidl.training import checkpoint


class Net(nn.Module):
    """Taller, wider and square matrices, with biases."""

    def __init__(self) -> None:
        self.first, self.middle, self.last = nn.Linear(4, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: Any) -> Any:
        return self.last(self.middle(self.first(x).tanh()).tanh())


def muon(model: nn.Module, **more: Any) -> optim.Muon:
    every = model.parameters()
    return optim.Muon([p for p in every if len(p.shape) == 2], 0.02, others=[p for p in every if len(p.shape) != 2],
                      **more)


def trained_once(model: Net, opt: optim.Muon, n: int) -> None:
    nn.mse(model(ml.array(random_array((6, 4), n))), ml.array(random_array((6, 3), n + 10))).backward()
    opt.step()


def trained(model: Net, opt: optim.Muon, steps: int = 5) -> None:
    for n in range(steps):
        trained_once(model, opt, n)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("named", [
    {}, {"nesterov": False, "momentum": 0.8}, {"adjust_lr_fn": "original"}, {"adjust_lr_fn": "match_rms_adamw"},
    {"weight_decay": 0.0, "ns_steps": 3, "eps": 0.1, "ns_coefficients": (2.0, -1.5, 0.5)}], ids=str)
def test_five_steps_are_torchs(named: dict[str, Any], clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch computes directions in float64 here, as we do; its AdamW trains the other parameters."""
    torch = torch_or_skip()
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    model = Net().astype("float64")
    theirs = [torch.nn.Parameter(torch.tensor(p.numpy())) for p in model.parameters()]
    opt = muon(model, max_norm=clip, **named)
    decay = named.get("weight_decay", 0.1)
    each = [torch.optim.Muon([p for p in theirs if p.ndim == 2], 0.02, **named),
            torch.optim.AdamW([p for p in theirs if p.ndim != 2], 0.02, weight_decay=decay)]
    for n in range(5):
        trained_once(model, opt, n)
        h = torch.tensor(random_array((6, 4), n))
        for i in (0, 2, 4):
            h = torch.nn.functional.linear(h if i == 0 else h.tanh(), theirs[i], theirs[i + 1])
        torch.nn.functional.mse_loss(h, torch.tensor(random_array((6, 3), n + 10))).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(theirs, clip)
        for one in each:
            one.step()
            one.zero_grad()
    for p, q in zip(model.parameters(), theirs, strict=True):
        np.testing.assert_allclose(p.numpy(), q.detach().numpy(), rtol=1e-8, atol=1e-10)


def test_names_and_defaults_are_torchs() -> None:
    torch = torch_or_skip()
    ours, theirs = (inspect.signature(c).parameters for c in (optim.Muon, torch.optim.Muon))
    assert [(n, p.default) for n, p in ours.items()][1:9] == [(n, p.default) for n, p in theirs.items()][1:]


def test_a_direction_is_nearly_orthogonal() -> None:
    """With the default coefficients, singular values are between 0.6 and 1.3."""
    for shape in ((6, 9), (9, 6), (8, 8)):
        p = nn.Parameter(np.zeros(shape))
        p.grad = ml.array(random_array(shape))
        optim.Muon([p], 1.0, 0.0, adjust_lr_fn="match_rms_adamw").step()
        found = np.linalg.svd(p.numpy() / (0.2 * np.sqrt(max(shape))), compute_uv=False)
        assert 0.6 < found.min() <= found.max() < 1.3


def test_a_checkpoint_has_the_states_that_are_used(tmp_path: Path) -> None:
    model, other = (Net().astype("float64") for _ in range(2))
    opt, theirs = muon(model), muon(other)
    trained(model, opt, 2)
    names = {name for name, _ in opt.named_tensors()}
    assert {f"mean.{i}" for i in range(6)} <= names
    assert names & {f"square.{i}" for i in range(6)} == {f"square.{i}" for i in range(3, 6)}
    checkpoint.save(tmp_path / "one", model, opt)
    checkpoint.load(tmp_path / "one", other, theirs)
    trained(model, opt, 2)
    trained(other, theirs, 2)
    assert [p.numpy().tobytes() for p in model.parameters()] == [p.numpy().tobytes() for p in other.parameters()]


def test_bad_arguments_are_named() -> None:
    matrix, vector = nn.Parameter(np.ones((2, 3))), nn.Parameter(np.ones(3))
    for named, said in (({"ns_steps": 0}, "ns_steps is 0"), ({"adjust_lr_fn": "none"}, "adjust_lr_fn is 'none'"),
                        ({"ns_coefficients": (1.0,)}, "must be three numbers"), ({"momentum": 1.0}, "momentum is 1.0"),
                        ({"eps": -1.0}, "the matrix eps is -1.0")):
        with pytest.raises(ValueError, match=said):
            optim.Muon([matrix], **named)
    with pytest.raises(ValueError, match=r"has the shape \(3,\); give it in others"):
        optim.Muon([matrix, vector])


@pytest.mark.parametrize(("name", "given", "hidden"), [
    ("mlp", {"hidden": 8, "layers": 3}, 2), ("gpt", {"preset": "tiny"}, 8), ("moe_gpt", {"preset": "tiny"}, 6),
    ("rnn", {"width": 8, "layers": 1}, 2)])
def test_hidden_matrices(name: str, given: dict[str, Any], hidden: int) -> None:
    model = models.create(name, **given)
    matrices, others = nn.hidden_matrices(model)
    assert len(matrices) == hidden
    assert all(len(p.shape) == 2 for p in matrices)
    assert {id(p) for p in [*matrices, *others]} == {id(p) for p in model.parameters()}
    named = {id(p): n for n, p in model.named_parameters()}
    assert not any("wte" in named[id(p)] or "wpe" in named[id(p)] for p in matrices)


TRAIN = ["train", "--model", "mlp", "--model-arg", "hidden=8", "--model-arg", "layers=3", "--optimizer", "muon",
         "--steps", "2", "--costs", "analytic"]


def test_training_prints_the_division(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TRAIN, "--optimizer-arg", "ns_steps=3", "--optimizer-arg", "adjust_lr_fn=original"]) == 0
    assert "Muon trains 2 matrices of hidden layers with 576 elements; AdamW trains 4" in capsys.readouterr().err
    assert "muon takes no argument 'rank'" in refusal(capsys, *TRAIN, "--optimizer-arg", "rank=3")


def digest(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    return str(reported(capsys, *TRAIN, *more)["params_sha256"])


@pytest.mark.few(1)
@pytest.mark.parametrize("more", [
    [], ["--parallel", "data", "--ranks", "2", "--scheduler", "priority"],
    ["--parallel", "pipeline", "--ranks", "2", "--scheduler", "zb_h1", "--micro-batches", "4"],
    ["--parallel", "pipeline", "--ranks", "2", "--scheduler", "layerpipe2", "--micro-batches", "4",
     "--scheduler-arg", "history=predicted", "--scheduler-arg", "p=0.5"]], ids=str)
def test_a_run_that_resumes_has_the_bits_of_one_that_went_on(more: list[str], tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    """A stale pipeline drains at a checkpoint, so the other run saves at the same step."""
    def kept(name: str) -> list[str]:
        return [*more, "--checkpoint", str(tmp_path / name), "--checkpoint-every", "2"]

    whole = digest(capsys, *kept("whole"), "--steps", "5")
    parts = [digest(capsys, *kept("parts"), "--steps", steps, *go_on) for steps, *go_on in (("2",), ("5", "--resume"))]
    assert parts[1] == whole != parts[0]


def test_shards_name_what_changes_a_matrix_as_a_whole(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, said = run(capsys, *TRAIN, "--parallel", "data", "--ranks", "2", "--scheduler", "barrier", "--shard", "1")
    assert code == 2
    assert "muon changes a matrix as a whole" in said
