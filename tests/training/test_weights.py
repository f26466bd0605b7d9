"""Weights in safetensors under published names: torch's networks and ours have the same outputs, both ways."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import one_line, run, run_json
from helpers import torch_or_skip
from safetensors.numpy import load_file, save_file

import minidl as ml
from minidl import models
from minidl.training import weights
from minidl.training.job import Job
from minidl.training.recorded import Recorded
from minidl.training.trainer import params_sha256
from minidl.training.weights import WeightsError

VISION = ["resnet18", "resnet50", "densenet121", "mobilenet_v3_large"]
LANGUAGE = [("gpt", {}), ("bert", {"head": "masked"}), ("bert", {"head": "classes", "classes": 3})]
CASES = [*((name, {}) for name in VISION), *LANGUAGE]


def pair_of(name: str, arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Our network, and torch's with other random weights."""
    torch = torch_or_skip()
    import torch_language
    import torch_twins

    torch.manual_seed(0)
    ml.seed(1)
    complete = {**models.arguments(name), **models.preset_arguments(name, "tiny"), **arguments}
    other = (torch_twins if name in VISION else torch_language).twin(name, complete)
    for key, value in other.named_buffers():
        if "running" in key:
            value.uniform_(0.5, 1.5)
    return models.create(name, preset="tiny", **arguments).eval(), other.eval()


def outputs(model: Any, other: Any) -> tuple[Any, Any]:
    import torch

    random = np.random.default_rng(0)
    if model.input_dtype == "int64":
        x = random.integers(1, model.input_shape[0], (3, *model.input_shape))
        x[0, 10:] = 0
        given = torch.from_numpy(x)
    else:
        x = random.standard_normal((3, *model.input_shape), np.float32)
        given = torch.from_numpy(x).permute(0, 3, 1, 2)
    with torch.no_grad(), ml.no_grad():
        return model(x).numpy(), other(given).numpy()


def check_equal(model: Any, other: Any) -> None:
    mine, theirs = outputs(model, other)
    assert mine.shape == theirs.shape
    assert np.abs(mine - theirs).max() <= 1e-4 * np.abs(theirs).max()


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_torchs_weights_give_torchs_outputs(name: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    model, other = pair_of(name, arguments)
    mine, theirs = outputs(model, other)
    assert np.abs(mine - theirs).max() > 1e-2 * np.abs(theirs).max(), "the weights differ at first"
    values = {key: value.contiguous().numpy() for key, value in other.state_dict().items()}
    assert weights.load(save(tmp_path / "theirs.safetensors", values), model) == weights.Loaded((), ())
    check_equal(model, other)


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_our_weights_give_our_outputs(name: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    model, other = pair_of(name, arguments)
    import torch

    found = load_file(weights.save(tmp_path / "ours.safetensors", model.state_dict()))
    missing, unknown = other.load_state_dict({key: torch.from_numpy(value) for key, value in found.items()},
                                             strict=False)
    assert not unknown
    assert all(re.fullmatch(r"lm_head.*|.*decoder.*", key) for key in missing)
    check_equal(model, other)


def save(path: Path, values: dict[str, Any]) -> Path:
    save_file({key: np.asarray(value, order="C") for key, value in values.items()}, path)
    return path


#: published differences of files: what it does to the names of a state dict, and for which network
FORMS: dict[str, tuple[str, Any]] = {
    "without the prefix": ("gpt", lambda s: {k.removeprefix("transformer."): v for k, v in s.items()}),
    "with masks": ("gpt", lambda s: s | {f"transformer.h.{i}.attn.bias": np.ones((1, 1, 16, 16), np.float32)
                                         for i in range(2)}),
    "with the tied head": ("gpt", lambda s: s | {"lm_head.weight": s["transformer.wte.weight"]}),
    "gamma and beta": ("bert", lambda s: {k.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
        "LayerNorm.bias", "LayerNorm.beta"): v for k, v in s.items()}),
    "position ids": ("bert", lambda s: s | {"bert.embeddings.position_ids": np.arange(16)[None]}),
    "dots in dense layers": ("densenet121", lambda s: {re.sub(r"(denselayer\d+\.(?:norm|conv))(\d)", r"\1.\2", k): v
                                                       for k, v in s.items()}),
    "no counters": ("resnet18", lambda s: {k: v for k, v in s.items() if "num_batches" not in k}),
    "in float16": ("gpt", lambda s: {k: v.astype(np.float16) for k, v in s.items()}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_in_another_published_form(form: str, tmp_path: Path) -> None:
    name, change = FORMS[form]
    ml.seed(0)
    values = models.create(name, preset="tiny").state_dict()
    model = models.create(name, preset="tiny")
    assert weights.load(save(tmp_path / "a.safetensors", change(values)), model) == weights.Loaded((), ())
    for key, value in model.state_dict().items():
        np.testing.assert_array_equal(value, values[key].astype(np.float16) if "float16" in form else values[key])


def test_timms_names_of_mobilenet_both_ways(tmp_path: Path) -> None:
    ml.seed(0)
    values = models.create("mobilenet_v3_large", preset="tiny").state_dict()
    file = weights.save(tmp_path / "timm.safetensors", values, "timm")
    found = load_file(file)
    assert {"conv_stem.weight", "bn1.running_mean", "blocks.0.0.conv_dw.weight", "blocks.0.0.bn2.bias",
            "blocks.1.0.conv_pwl.weight", "blocks.2.2.se.conv_reduce.bias", "blocks.5.2.bn3.weight",
            "blocks.6.0.conv.weight", "conv_head.bias", "classifier.weight"} <= found.keys()
    assert found["conv_head.weight"].ndim == 4
    model = models.create("mobilenet_v3_large", preset="tiny")
    assert weights.load(file, model) == weights.Loaded((), ())
    for key, value in model.state_dict().items():
        np.testing.assert_array_equal(value, values[key])


def test_other_networks_have_timms_names_already_or_none(tmp_path: Path) -> None:
    for name in ("resnet18", "densenet121"):
        values = models.create(name, preset="tiny").state_dict()
        assert weights.to_timm(values).keys() == values.keys()
    with pytest.raises(WeightsError, match="BERT and GPT are not in timm"):
        weights.save(tmp_path / "a.safetensors", models.create("gpt", preset="tiny").state_dict(), "timm")
    assert not list(tmp_path.iterdir())


def test_a_head_for_other_classes_keeps_its_initial_values(tmp_path: Path) -> None:
    file = weights.save(tmp_path / "a.safetensors", models.create("resnet18", preset="tiny").state_dict())
    model = models.create("resnet18", preset="tiny", classes=4)
    before = model.state_dict()
    assert weights.load(file, model) == weights.Loaded(("fc.weight", "fc.bias"), ())
    np.testing.assert_array_equal(model.state_dict()["fc.weight"], before["fc.weight"])
    assert not np.array_equal(model.state_dict()["conv1.weight"], before["conv1.weight"])
    file = weights.save(tmp_path / "b.safetensors", models.create("bert", preset="tiny", head="masked").state_dict())
    found = weights.load(file, models.create("bert", preset="tiny", head="classes"))
    assert found.initial == ("bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight",
                             "classifier.bias")
    assert "cls.predictions.bias" in found.unused


def test_what_does_not_fit_is_one_clear_line_and_changes_nothing(tmp_path: Path) -> None:
    model = models.create("resnet18", preset="tiny")
    before = model.state_dict()
    other = weights.save(tmp_path / "a.safetensors", models.create("resnet18", preset="tiny", width=8).state_dict())
    lacking = save(tmp_path / "b.safetensors", {k: v for k, v in before.items() if "layer2" not in k})
    (tmp_path / "c.safetensors").write_bytes(b"no file of weights")
    (tmp_path / "d").mkdir()
    for file, message in ((other, r"conv1.weight is \(8, 3, 3, 3\) in the file, \(4, 3, 3, 3\) in the network"),
                          (lacking, r"lacks layer2.0.conv1.weight and \d+ others"),
                          (tmp_path / "c.safetensors", "is damaged or no file of weights"),
                          (tmp_path / "d", "cannot read"), (tmp_path / "e", "there is no file")):
        with pytest.raises(WeightsError, match=message) as caught:
            weights.load(file, model)
        assert "\n" not in str(caught.value)
    for key, value in model.state_dict().items():
        np.testing.assert_array_equal(value, before[key])
    with pytest.raises(WeightsError, match="cannot write"):
        weights.save(tmp_path / "nowhere" / "a.safetensors", before)
    with pytest.raises(WeightsError, match="unknown style"):
        weights.save(tmp_path / "f", before, "jax")


def test_a_checkpoint_is_exported_and_a_run_starts_from_it(capsys: Any, tmp_path: Path) -> None:
    mlp = ("--model", "mlp", "--model-arg", "preset=tiny", "--costs", "analytic", "--batch-size", "16")
    code, trained = run_json(capsys, "train", *mlp, "--steps", "2", "--checkpoint", str(tmp_path / "run"))
    assert code == 0
    file = tmp_path / "mlp.safetensors"
    code, record = run_json(capsys, "export", str(tmp_path / "run"), str(file))
    assert (code, record) == (0, {"file": str(file), "tensors": 4, "values": trained["parameters"], "style": "state",
                              "standardized": False})
    job = Job(model="mlp", model_args={"preset": "tiny"}, batch_size=16, init=str(file))
    assert params_sha256(Recorded(job).model) == trained["params_sha256"]
    code, record = run_json(capsys, "train", *mlp, "--steps", "1", "--init", str(file))
    assert code == 0
    assert record["loss_first"] < trained["loss_first"]
    code, _, err = run(capsys, "train", *mlp, "--init", str(tmp_path / "run" / "checkpoint.safetensors"))
    assert "is a checkpoint; `minidl export` writes its weights" in one_line(err)


@pytest.mark.parametrize(("argv", "says"), [
    (["train", "--model", "mlp", "--init", "none.safetensors", "--steps", "1"], "there is no file none.safetensors"),
    (["train", "--model", "mlp", "--init", "x", "--resume", "--checkpoint", "c"], "--init has no effect here; it goes"),
    (["plan", "--model", "mlp", "--init", "x"], "--init has no effect on `minidl plan`"),
    (["export", "none", "x.safetensors"], "there is no checkpoint"),
    (["export", "none", "nowhere/x.safetensors"], "nowhere"),
])
def test_bad_input_is_one_line(capsys: Any, tmp_path: Path, monkeypatch: Any, argv: list[str], says: str) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert says in one_line(err)
