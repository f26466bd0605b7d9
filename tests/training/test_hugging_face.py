"""Weights as transformers writes them, and transformers' networks as judges: the same logits both ways."""

from __future__ import annotations

import json
import re
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import need, torch_or_skip

import minidl as ml
from minidl import models
from minidl.training import weights
from minidl.training.weights import WeightsError

GPT = {"vocab_size": 256, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0,
       "eos_token_id": 0}
BERT = {"vocab_size": 256, "max_position_embeddings": 16, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 128, "num_labels": 3}
#: its network -> ours, and the arguments of ours
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("gpt", {}),
    "BertForMaskedLM": ("bert", {"head": "masked"}),
    "BertForSequenceClassification": ("bert", {"head": "classes", "classes": 3}),
}


def theirs(name: str, seed: int = 0, **more: Any) -> Any:
    """A tiny network of transformers with random weights, biases and scales included."""
    torch, transformers = torch_or_skip(), need("transformers")
    torch.manual_seed(seed)
    config = transformers.GPT2Config(**GPT, **more) if name.startswith("GPT") else transformers.BertConfig(
        **BERT, **more)
    found = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for p in found.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return found


def ours(name: str) -> Any:
    model, arguments = NETWORKS[name]
    return models.create(model, preset="tiny", **arguments).eval()


def check_equal(mine: Any, other: Any) -> None:
    import torch

    ids = np.random.default_rng(0).integers(1, 256, (3, 16))
    with torch.no_grad(), ml.no_grad():
        np.testing.assert_allclose(mine(ids).numpy(), other(torch.from_numpy(ids)).logits.numpy(), rtol=0, atol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("shard", ["5GB", "40KB"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_what_transformers_saves_gives_its_logits(name: str, dtype: str, shard: str, tmp_path: Path) -> None:
    torch = torch_or_skip()
    saved = theirs(name).to(getattr(torch, dtype))
    saved.save_pretrained(tmp_path, max_shard_size=shard)
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (shard == "40KB")
    judge = type(saved).from_pretrained(tmp_path, dtype=torch.float32).eval()
    for place in (tmp_path, index if index.exists() else tmp_path / "model.safetensors"):
        mine = ours(name)
        assert weights.load(place, mine) == weights.Loaded((), ())
        check_equal(mine, judge)


@pytest.mark.parametrize("shards", [None, 1 << 15])
@pytest.mark.parametrize("name", NETWORKS)
def test_transformers_reads_what_is_exported(name: str, shards: int | None, tmp_path: Path) -> None:
    other = theirs(name)
    other.config.save_pretrained(tmp_path)
    mine = ours(name)
    weights.save(tmp_path if shards else tmp_path / "model.safetensors", mine.state_dict(), shards=shards)
    judge, about = type(other).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(about[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    check_equal(mine, judge.eval())


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForMaskedLM"])
def test_a_head_of_its_own_is_taken_if_it_equals_the_embedding_and_else_refused(name: str, tmp_path: Path) -> None:
    torch = torch_or_skip()
    other = theirs(name, tie_word_embeddings=False)
    other.save_pretrained(tmp_path / "apart")
    mine = ours(name)
    with pytest.raises(WeightsError, match=r"differ, and this network has one parameter for both \(tied weights\)"):
        weights.load(tmp_path / "apart", mine)
    with torch.no_grad():
        other.get_output_embeddings().weight.copy_(other.get_input_embeddings().weight)
        if name == "BertForMaskedLM":
            other.cls.predictions.decoder.bias.copy_(other.cls.predictions.bias)
    other.save_pretrained(tmp_path / "equal")
    assert weights.load(tmp_path / "equal", mine) == weights.Loaded((), ())
    check_equal(mine, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_line_about_a_file_of_torch_says_how_it_is_read(name: str, dtype: str, tmp_path: Path) -> None:
    """Also with tied weights, and tensors that are not contiguous."""
    torch, old, new = torch_or_skip(), tmp_path / "pytorch_model.bin", tmp_path / "new.safetensors"
    saved = theirs(name).to(getattr(torch, dtype))
    torch.save({key: t.t().contiguous().t() if t.ndim == 2 else t for key, t in saved.state_dict().items()}, old)
    for place in (old, tmp_path):
        with pytest.raises(WeightsError, match=r"with torch, (.*) writes the tensors") as caught:
            weights.load(place, ours(name))
    found = re.search(r"with torch, (.*) writes the tensors", str(caught.value))
    assert found is not None
    exec("import safetensors.torch, torch\n" + found[1].replace("FILE", repr(str(old))).replace("NEW", repr(str(new))))
    mine = ours(name)
    assert weights.load(new, mine) == weights.Loaded((), ())
    check_equal(mine, saved.float())


def test_the_line_about_a_distributed_checkpoint_says_what_makes_a_pickle_of_it(tmp_path: Path) -> None:
    """`torch.load` of one of its files gives its last tensor, or an error."""
    torch, folder, old = torch_or_skip(), tmp_path / "dcp", tmp_path / "old.pt"
    saved = theirs("GPT2LMHeadModel")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.save(saved.state_dict(), checkpoint_id=folder, no_dist=True)
        for place in (folder, folder / "__0_0.distcp"):
            with pytest.raises(WeightsError, match=r"a distributed checkpoint; (\S+) makes a pickle of it$") as caught:
                weights.load(place, ours("GPT2LMHeadModel"))
        found = re.search(r"; (\S+) makes", str(caught.value))
        assert found is not None
        module, _, function = found[1].rpartition(".")
        getattr(import_module(module), function)(folder, old)
    with pytest.raises(WeightsError, match="a pickle of torch"):
        weights.load(old, ours("GPT2LMHeadModel"))
    read = torch.load(old, weights_only=True)
    assert all(read[name].equal(value) for name, value in saved.state_dict().items())


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "more"), [
    *(("GPT2LMHeadModel", {"activation_function": f"gelu_{way}"})
      for way in ("new", "pytorch_tanh", "python_tanh", "fast", "accurate")),
    ("BertForMaskedLM", {"hidden_act": "gelu_python"}), ("BertForMaskedLM", {"hidden_act": "gelu"}),
])
def test_an_activation_under_another_name_is_the_same(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    other = theirs(name, **more)
    other.save_pretrained(tmp_path)
    mine = ours(name)
    weights.load(tmp_path, mine)
    check_equal(mine, other)


@pytest.mark.parametrize(("name", "more", "says"), [
    ("GPT2LMHeadModel", {"n_head": 4}, "config.json has n_head '4', this network '2'"),
    ("GPT2LMHeadModel", {"activation_function": "relu"}, "activation_function 'relu', this network 'gelu_new'"),
    ("GPT2LMHeadModel", {"activation_function": "gelu_python"}, "activation_function 'gelu_python', this network"),
    ("BertForMaskedLM", {"hidden_act": "gelu_fast"}, "hidden_act 'gelu_fast', this network 'gelu'"),
    ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx 'True'"),
    ("BertForMaskedLM", {"layer_norm_eps": 1e-3}, "layer_norm_eps '0.001', this network '1e-12'"),
    ("BertForMaskedLM", {"num_attention_heads": 4}, "num_attention_heads '4', this network '2'"),
])
def test_what_no_shape_shows_is_read_from_its_config(name: str, more: dict[str, Any], says: str, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    for key in more:
        for known in (GPT, BERT):
            monkeypatch.delitem(known, key, raising=False)
    theirs(name, **more).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match=says):
        weights.load(tmp_path, ours(name))


@pytest.mark.parametrize("name", ["Roberta", "Data2VecText", "LayoutLM"])
def test_another_network_with_the_same_names_is_refused(name: str, tmp_path: Path) -> None:
    """Its arrays fit, and its numbers are others: positions begin after the padding, or boxes have embeddings."""
    torch_or_skip()
    transformers = need("transformers")
    config = getattr(transformers, f"{name}Config")(**BERT, pad_token_id=0)
    getattr(transformers, f"{name}Model")(config).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match=rf"config.json has model_type '{config.model_type}', this network 'bert'"):
        weights.load(tmp_path, models.create("bert", preset="tiny"))


@pytest.mark.parametrize(("model", "fits", "other"), [
    ("resnet18", "resnet18", "resnetaa18"), ("resnet50", "resnet50", "seresnet50"),
    ("densenet121", "densenet121", "densenetblur121d"),
    ("mobilenet_v3_large", "mobilenetv3_large_100", "tf_mobilenetv3_large_100")])
def test_timms_config_says_which_of_its_networks_the_weights_are_of(model: str, fits: str, other: str,
                                                                    tmp_path: Path) -> None:
    """Names and shapes of some are the same: pooling or padding is another one."""
    mine = models.create(model, preset="tiny")
    weights.save(tmp_path / "model.safetensors", mine.state_dict())
    for architecture in (fits, other):
        (tmp_path / "config.json").write_text(json.dumps({"architecture": architecture, "pretrained_cfg": {}}))
        if architecture == fits:
            weights.load(tmp_path, mine)
    with pytest.raises(WeightsError, match=f"its config.json has architecture '{other}', this network '"):
        weights.load(tmp_path, mine)
