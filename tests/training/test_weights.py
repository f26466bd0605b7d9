"""Weights in safetensors under published names: torch's networks and ours have the same outputs, both ways."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import one_line, reported, run, run_json
from helpers import refuses, torch_or_skip
from mutations import safetensors, text
from safetensors.numpy import load_file, save_file

import minidl as ml
from minidl import models, nn
from minidl.system.files import write_atomic
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


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_torchs_weights_give_torchs_outputs_and_go_back_as_they_came(name: str, arguments: dict[str, Any],
                                                                     tmp_path: Path) -> None:
    model, other = pair_of(name, arguments)
    mine, theirs = outputs(model, other)
    assert np.abs(mine - theirs).max() > 1e-2 * np.abs(theirs).max(), "the weights differ at first"
    values = {key: value.contiguous().numpy() for key, value in other.state_dict().items()}
    assert weights.load(save(tmp_path / "theirs.safetensors", values), model) == weights.Loaded((), ())
    mine, theirs = outputs(model, other)
    assert mine.shape == theirs.shape
    assert np.abs(mine - theirs).max() <= 1e-4 * np.abs(theirs).max()
    found = load_file(weights.save(tmp_path / "ours.safetensors", model.state_dict()))
    assert all(re.fullmatch(r"lm_head.*|.*decoder.*", key) for key in values.keys() ^ found.keys())
    for key in found.keys() & values.keys():
        np.testing.assert_array_equal(found[key], values[key])


def refused(path: Path, model: Any, says: str) -> None:
    """The load fails with one line that matches, and changes nothing."""
    before = model.state_dict()
    refuses((lambda: weights.load(path, model), says), error=WeightsError)
    for key, value in model.state_dict().items():
        np.testing.assert_array_equal(value, before[key])


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
    model = models.create("mobilenet_v3_large", preset="tiny", eps=1e-5)
    assert weights.load(file, model) == weights.Loaded((), ())
    for key, value in model.state_dict().items():
        np.testing.assert_array_equal(value, values[key])


def test_timms_epsilon_is_told_where_the_network_has_another(tmp_path: Path) -> None:
    """No file says it, and with torchvision's the outputs are others."""
    model = models.create("mobilenet_v3_large", preset="tiny")
    file = weights.save(tmp_path / "timm.safetensors", model.state_dict(), "timm")
    assert weights.load(file, model).said(file) == (
        f"{file}: its names are timm's, whose network has --model-arg eps=1e-05; here eps is 0.001",)
    assert weights.load(weights.save(tmp_path / "a.safetensors", model.state_dict()), model).said(file) == ()


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

    class Head(nn.Module):
        def __init__(self) -> None:
            self.fc = nn.Linear(2, 2)

    with pytest.raises(WeightsError, match="it lacks fc.weight and 1 others"):  # nothing but a head, and another one's
        weights.load(save(tmp_path / "c.safetensors", {"linear.weight": np.ones((2, 2), np.float32)}), Head())
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
                          (tmp_path / "d", "has neither model.safetensors nor"), (tmp_path / "e", "there is no file")):
        refused(file, model, message)
    with pytest.raises(WeightsError, match="cannot write"):
        weights.save(tmp_path / "nowhere" / "a.safetensors", before)
    with pytest.raises(WeightsError, match="unknown style"):
        weights.save(tmp_path / "f", before, "jax")


def content_of(tensors: dict[str, tuple[str, Any]]) -> bytes:
    """A safetensors file of these tensors, as (type, array): also of types that NumPy lacks."""
    header: dict[str, Any] = {}
    content = b""
    for name, (kind, value) in tensors.items():
        begin, content = len(content), content + value.tobytes()
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [begin, len(content)]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content


def raw(path: Path, tensors: dict[str, tuple[str, Any]]) -> Path:
    path.write_bytes(content_of(tensors))
    return path


def bfloat16(values: Any) -> tuple[str, Any]:
    """The upper halves of float32 values."""
    return "BF16", (np.ascontiguousarray(values, "<f4").view("<u4") >> 16).astype("<u2")


class Shared(nn.Module):
    """A network of one's own, whose two layers have one weight."""

    def __init__(self) -> None:
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight


def sharded(folder: Path, values: dict[str, Any], shards: int = 2) -> Path:
    """The index of files with every other tensor, in bfloat16."""
    folder.mkdir()
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    places = {name: names[i % shards] for i, name in enumerate(values)}
    for file in names:
        raw(folder / file, {name: bfloat16(values[name]) for name in values if places[name] == file})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return index


def test_the_folder_the_index_and_the_file_mean_the_same(tmp_path: Path) -> None:
    ml.seed(0)
    values = models.create("gpt", preset="tiny").state_dict()
    index = sharded(tmp_path / "shards", values)
    (tmp_path / "one").mkdir()
    one = raw(tmp_path / "one" / "model.safetensors", {name: bfloat16(value) for name, value in values.items()})
    for path in (index, index.parent, one, one.parent):
        model = models.create("gpt", preset="tiny")
        assert weights.load(path, model) == weights.Loaded((), ())
        for key, value in model.state_dict().items():
            cut = (np.ascontiguousarray(values[key]).view(np.uint32) & 0xFFFF0000).view(np.float32)
            np.testing.assert_array_equal(value, cut)
    assert {str(value.dtype) for value in weights.read(index).values()} == {"float32"}


@pytest.mark.parametrize("size", [1 << 10, 1 << 14, 1 << 30])
def test_shards_come_back_as_they_were(size: int, tmp_path: Path) -> None:
    ml.seed(0)
    values = models.create("gpt", preset="tiny").state_dict() | {name: np.ones(3) for name in weights.STANDARDIZE}
    file = weights.save(tmp_path / "out", values, shards=size)
    found = weights.read(tmp_path / "out")
    assert found.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(found[name], value)
        assert found[name].dtype == value.dtype
    assert weights.scaling(tmp_path / "out") is not None
    files = sorted(f.name for f in file.parent.iterdir())
    if size == 1 << 30:
        assert files == ["model.safetensors"]
        return
    about = json.loads(file.read_text())
    count = len(files) - 1
    assert files == [*(f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)), file.name]
    assert (file.name, about["metadata"]) == ("model.safetensors.index.json",
                                             {"total_size": sum(v.nbytes for v in values.values())})
    for shard in files[:-1]:
        names = load_file(tmp_path / "out" / shard).keys()
        assert names == {name for name, place in about["weight_map"].items() if place == shard}
        assert len(names) == 1 or sum(values[name].nbytes for name in names) <= size


@pytest.mark.parametrize("shards", [0, -5, 1.5, "1MB"])
def test_the_size_of_shards_is_a_whole_number(shards: Any, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=f"shards is {shards}; it must be a whole number of bytes, at least 1"):
        weights.save(tmp_path / "out", {"a": np.ones(3)}, shards=shards)
    assert not any(tmp_path.iterdir())


def test_shards_appear_whole_or_not_at_all(tmp_path: Path, monkeypatch: Any) -> None:
    values = models.create("gpt", preset="tiny").state_dict()
    done: list[Path] = []

    def full(path: Path, content: Any) -> None:
        if len(done) == 2:
            raise OSError(28, "No space left on device")
        write_atomic(path, content)
        done.append(path)

    with monkeypatch.context() as patched:
        patched.setattr(weights, "write_atomic", full)
        with pytest.raises(WeightsError, match="cannot write .*: No space left"):
            weights.save(tmp_path / "new", values, shards=1 << 14)
        done.clear()
        with pytest.raises(WeightsError, match="cannot write"):
            weights.save(tmp_path / "gpt.safetensors", values, shards=1 << 14)
    assert not list(tmp_path.iterdir())
    assert weights.save(tmp_path / "gpt.safetensors", values, shards=1 << 14).name == "gpt.safetensors.index.json"
    before = sorted(tmp_path.iterdir())
    for size in (1 << 14, 1 << 30):
        with pytest.raises(WeightsError, match=r"gpt-00001-of-\d+.safetensors is there already"):
            weights.save(tmp_path / "gpt.safetensors", values, shards=size)
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(WeightsError, match="cannot write"):
        weights.save(tmp_path / "no" / "where", values, shards=1)


#: what is wrong with an index and its files -> what the message says
INDEXES: dict[str, tuple[Any, str]] = {
    "a shard is missing": (lambda f: (f / "model-00002-of-00002.safetensors").unlink(),
                           "there is no file .*model-00002-of-00002.safetensors"),
    "a shard is cut": (lambda f: (f / "model-00002-of-00002.safetensors").write_bytes(
        (f / "model-00002-of-00002.safetensors").read_bytes()[:-1]), "model-00002-of-00002.safetensors is damaged"),
    "a shard lacks a tensor": (lambda f: raw(f / "model-00002-of-00002.safetensors", {}),
                               r"model-00002-of-00002.safetensors lacks transformer.wpe.weight, which model\.saf"),
    "a file outside": (lambda f: edit(f, "../x.safetensors"), "outside of its folder"),
    "a file at the root": (lambda f: edit(f, "/x.safetensors"), "outside of its folder"),
    "a number as file": (lambda f: edit(f, 3), "damaged or no index of weights"),
    "no file name": (lambda f: edit(f, ""), "damaged or no index of weights"),
    "NUL": (lambda f: edit(f, "a\0"), "damaged"),
    "a folder as file": (lambda f: edit(f, "."), "cannot read .*: it is not a regular file"),
    "a pickle": (lambda f: (f / "model-00002-of-00002.safetensors").write_bytes(b"PK\3\4" + bytes(26) + b"a/data.pkl"),
                 "is a pickle of torch.*safetensors.torch.save_file"),
    "a name of two lines": (lambda f: raw(f / "model-00001-of-00002.safetensors", {"a\nb": bfloat16(np.ones(1))}),
                            "the name of a tensor cannot be printed"),
    "a file of two lines": (lambda f: edit(f, "a\nb"), "damaged or no index of weights"),
    "no map": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "damaged or no index of weights"),
    "no JSON": (lambda f: (f / "model.safetensors.index.json").write_text("[" * 9999), "damaged or no index"),
    "both": (lambda f: raw(f / "model.safetensors", {}), "the folder has model.safetensors and model.safetensors.ind"),
    "neither": (lambda f: (f / "model.safetensors.index.json").unlink(),
                "has neither .*; it has model-00001-of-00002.safetensors, model-00002"),
    "other heads": (lambda f: (f / "config.json").write_text('{"model_type": "gpt2", "n_head": 4}'),
                    "its config.json has n_head '4', this network '2'"),
}


def edit(folder: Path, file: Any) -> None:
    """Puts another file for the last tensor."""
    index = folder / "model.safetensors.index.json"
    about = json.loads(index.read_text())
    about["weight_map"]["transformer.ln_f.bias"] = file
    index.write_text(json.dumps(about))


@pytest.mark.parametrize("fault", INDEXES)
def test_bad_shards_are_one_line_and_change_nothing(fault: str, tmp_path: Path) -> None:
    model = models.create("gpt", preset="tiny")
    folder = sharded(tmp_path / "shards", {name: value + 1 for name, value in model.state_dict().items()}).parent
    damage, says = INDEXES[fault]
    damage(folder)
    refused(folder, model, says)


@pytest.mark.parametrize("cases", [60, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "mutate"), [("model-00001-of-00002.safetensors", safetensors),
                                              ("model.safetensors.index.json", text)])
def test_mutated_shards_and_indexes_are_read_or_named(name: str, mutate: Any, cases: int, tmp_path: Path) -> None:
    model = models.create("mlp", preset="tiny")
    folder = sharded(tmp_path / "shards", model.state_dict()).parent
    whole = (folder / name).read_bytes()
    for seed in range(cases):
        (folder / name).write_bytes(mutate(np.random.default_rng(seed), whole))
        said = ""
        try:
            weights.load(folder, model)
        except WeightsError as error:
            said = str(error)
        assert "\n" not in said, seed


#: how a file's tensors (gpt, or one of one's own) differ from what the network can hold -> what the message says
REFUSED: dict[str, tuple[Any, str]] = {
    "another head": (lambda s: s | {"lm_head.weight": 2 * s["transformer.wte.weight"]},
                     "lm_head.weight and transformer.wte.weight differ"),
    "two names": (lambda s: s | {"ln_f.bias": s["transformer.ln_f.bias"] + 1},
                  "ln_f.bias and transformer.ln_f.bias differ"),
    "from DDP": (lambda s: {f"module.{k}": v for k, v in s.items()},
                 r"within another module: it has module\..*; save the state dict of the network alone"),
    "compiled": (lambda s: {f"_orig_mod.{k}": v for k, v in s.items()}, r"it has _orig_mod\..*model._orig_mod"),
    "both": (lambda s: {f"module._orig_mod.{k}": v for k, v in s.items()}, r"it has module._orig_mod\."),
    "the other way": (lambda s: {f"_orig_mod.module.{k}": v for k, v in s.items()}, r"it has _orig_mod.module\."),
    "a compiled layer": (lambda s: {k.replace(".mlp.", ".mlp._orig_mod."): v for k, v in s.items()},
                         r"it has transformer.h.0.mlp._orig_mod\."),
    "without the network's prefix": (lambda s: {k.replace("transformer.", "module."): v for k, v in s.items()},
                                     r"it has module\."),
    "a module around": (lambda s: {f"model.{k}": v for k, v in s.items()}, r"within another module: it has model\."),
    "nothing in common": (lambda s: {f"x{k}": v for k, v in s.items()}, "it lacks transformer.wte.weight and"),
    "quantised": (lambda s: {k: v.astype(np.int8) for k, v in s.items()}, "is int8 in the file and float32 in the net"),
    "too large": (lambda s: s | {"transformer.ln_f.bias": np.full(32, 1e300)}, "has numbers that float32, its type in"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_nothing_is_dropped_or_misnamed_in_silence(what: str, tmp_path: Path) -> None:
    model = models.create("gpt", preset="tiny")
    change, says = REFUSED[what]
    refused(save(tmp_path / "a.safetensors", change(model.state_dict())), model, says)


def test_a_shared_weight_has_one_value_and_its_names_are_as_good(tmp_path: Path) -> None:
    model = Shared()
    values = {**model.state_dict(), "first.weight": np.ones((3, 3), np.float32)}
    with pytest.raises(WeightsError, match="first.weight and second.weight differ"):
        weights.load(save(tmp_path / "a.safetensors", values), model)
    del values["second.weight"]
    assert weights.load(save(tmp_path / "b.safetensors", values), model) == weights.Loaded((), ())
    values["second.weight"] = 2 * values.pop("first.weight")
    assert weights.load(save(tmp_path / "c.safetensors", values), model) == weights.Loaded((), ())
    np.testing.assert_array_equal(model.first.weight.numpy(), 2)
    gpt = models.create("gpt", preset="tiny")
    values = gpt.state_dict()
    values["lm_head.weight"] = values.pop("transformer.wte.weight")  # as safetensors' own save_model may leave it
    assert weights.load(save(tmp_path / "d.safetensors", values), gpt) == weights.Loaded((), ())


def test_names_of_masks_and_heads_are_weights_where_the_network_has_them(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            self.attn, self.lm_head = nn.Linear(2, 2), nn.Linear(2, 2)

    model = Own()
    values = {f"{layer}.{name}": np.full((2, 2) if name == "weight" else 2, i + 1, np.float32)
              for i, layer in enumerate(("attn", "lm_head")) for name in ("weight", "bias")}
    assert weights.load(save(tmp_path / "a.safetensors", values), model) == weights.Loaded((), ())
    for key, value in model.state_dict().items():
        np.testing.assert_array_equal(value, values[key])
    found = weights.load(save(tmp_path / "b.safetensors", values | {"x.attn.bias": np.ones(2, np.float32)}), model)
    assert found.unused == ("x.attn.bias",)


@pytest.mark.parametrize(("name", "content", "says"), [
    ("a.pt", b"", "is a pickle of torch, .*weights_only=True"), ("a.ckpt", b"x" * 99, "is a pickle of torch"),
    ("a.safetensors", b"\x80\x02}q\x00X\x01\x00\x00\x00", "is a pickle of torch"),
    ("__0_0.distcp", b"PK\x03\x04" + bytes(26) + b"archive/data.pkl", "is a distributed checkpoint; .*dcp_to_torch"),
    ("a.npz", b"PK\x03\x04" + b"x" * 99, "is a ZIP archive; of NumPy's .npz, .* of torch.export's .pt2, "),
    ("a.h5", b"\x89HDF\r\n\x1a\n", "is an HDF5 file"),
    ("a.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "is a pointer of Git LFS"),
    ("a.safetensors", b"\n<!doctype html><html>", "or a web page"),
    ("a.gguf", b"GGUF\3\0\0\0", "is a GGUF file"),
    ("a.safetensors", b"PK\x03\x04" + bytes(26) + b"a/data.pkl", "is a pickle of torch"),
    ("a.safetensors", (0x0280).to_bytes(8, "little") + b"{" + bytes(9), "is damaged or no file of weights"),
    ("a.safetensors", content_of({"x": ("F8_E4M3", np.zeros(3, np.uint8))}),
     "x has the type F8_E4M3, which cannot be read; save it as BF16, F16 or F32"),
])
def test_a_file_in_another_format_is_named_as_what_it_is(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    refused(tmp_path / name, models.create("mlp", preset="tiny"), says)


def test_one_shard_alone_says_so(tmp_path: Path) -> None:
    model = models.create("gpt", preset="tiny")
    folder = sharded(tmp_path / "a", model.state_dict()).parent
    refused(folder / "model-00001-of-00002.safetensors", model,
            "lacks .* it is one of several files: give their folder or index")


@pytest.mark.parametrize("name", ["w.pt", "w.PTH", "pytorch_model.bin", "w.ckpt", "w.npz", "w.ONNX", "w.pt2",
                                  "w.json"])
def test_safetensors_have_no_name_of_another_format(name: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"for another format, such as a pickle of torch.*name it .*\.safetensors$"):
        weights.save(tmp_path / name, {"w": np.zeros(3)})
    assert not any(tmp_path.iterdir())
    weights.save(tmp_path / name, {"w": np.zeros(3)}, shards=100)  # a folder of this name
    assert (tmp_path / name / "model.safetensors").is_file()


def test_a_checkpoint_is_exported_and_a_run_starts_from_it(capsys: Any, tmp_path: Path) -> None:
    mlp = ("--model", "mlp", "--model-arg", "preset=tiny", "--costs", "analytic", "--batch-size", "16")
    trained = reported(capsys, "train", *mlp, "--steps", "2", "--checkpoint", str(tmp_path / "run"))
    file = tmp_path / "mlp.safetensors"
    code, record = run_json(capsys, "export", str(tmp_path / "run"), str(file))
    assert (code, record) == (0, {"file": str(file), "tensors": 4, "values": trained["parameters"], "style": "state",
                              "standardized": False})
    code, record = run_json(capsys, "export", str(tmp_path / "run"), str(tmp_path / "folder"), "--shards", "1KB")
    index = tmp_path / "folder" / "model.safetensors.index.json"
    assert (code, record["file"], record["tensors"]) == (0, str(index), 4)
    assert record["shards"] == len(list((tmp_path / "folder").iterdir())) - 1 > 1
    for place in (index, index.parent):
        assert params_sha256(Recorded(Job(model="mlp", model_args={"preset": "tiny"}, batch_size=16, init=str(place))
                                      ).model) == trained["params_sha256"]  # fmt: skip
    job = Job(model="mlp", model_args={"preset": "tiny"}, batch_size=16, init=str(file))
    assert params_sha256(Recorded(job).model) == trained["params_sha256"]
    record = reported(capsys, "train", *mlp, "--steps", "1", "--init", str(file))
    assert record["loss_first"] < trained["loss_first"]
    code, _, err = run(capsys, "train", *mlp, "--init", str(tmp_path / "run" / "checkpoint.safetensors"))
    assert "is a checkpoint; `minidl export` writes its weights" in one_line(err)
