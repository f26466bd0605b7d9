"""Weights in safetensors files under their published names, both ways.

A state dict has these names already: torchvision's for images (which are also timm's, but for MobileNetV3), Hugging
Face's for BERT and GPT-2. So a file is a state dict, and this module knows how published files differ from it: other
prefixes and older names, counters and masks that are no weights, a second copy of a tied weight, other heads. It knows
no run and no checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data import Scaling
from ..nn import Module
from ..nn.module import put, state_shape
from ..system.files import write_atomic

STYLES = ("state", "timm")  #: names as in a state dict, or as timm has them
PREFIXES = ("bert.", "transformer.")  #: of the network without its head, which some files leave out
#: no weights, or copies of weights that are tied: a file may have them, and they are not read
LEFT_OUT = re.compile(r".*\.attn\.(bias|masked_bias)|.*\.?position_ids|lm_head\.weight"
                      r"|cls\.predictions\.decoder\.(weight|bias)")
COUNTER = "num_batches_tracked"  #: of a batch norm: a file may lack it
#: by which mean and deviation the training data were standardised, see `data.Scaling`: no weights, but what goes with
#: them: the network reads (x - mean) / std
STANDARDIZE = ("standardize.mean", "standardize.std")
#: prefixes of the task head: a file may lack it, or have it for other classes
HEADS = re.compile(r"fc\.|classifier\.|cls\.|bert\.pooler\.|pooler\.|conv_head\.")


class WeightsError(ValueError):
    """A file of weights cannot be written, or does not fit the network. The message is one line and says why."""


@dataclass(frozen=True)
class Loaded:
    """The outcome of a load: `initial`, names of the head's weights that keep their initial values; `unused`, names in
    the file that the network does not have; `standardized`, whether the network was trained on standardised data."""

    initial: tuple[str, ...]
    unused: tuple[str, ...]
    standardized: bool = False

    def said(self, file: str | Path) -> tuple[str, ...]:
        """Messages for the user, a line each."""
        return tuple(f"{file}: {what} {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}" for what, names in (
            ("not in it, or for other classes, so these keep their initial values:", self.initial),
            ("of no use here:", self.unused),
            ("its network reads standardised data, (x - mean) / std, by its", self.standardized and STANDARDIZE))
            if names)


def save(path: str | Path, values: Mapping[str, Any], style: str = "state") -> Path:
    """Writes a state dict. The file appears whole or not at all. Raises WeightsError for names that have no such
    style, and for a file that cannot be written."""
    from safetensors.numpy import save as serialize

    if style not in STYLES:
        raise WeightsError(f"unknown style of names {style!r}; known: {', '.join(STYLES)}")
    if style == "timm":
        values = to_timm(values)
    content = serialize({name: np.asarray(value, order="C") for name, value in values.items()}, {"format": "pt"})
    try:
        write_atomic(Path(path), content)
    except OSError as error:
        raise WeightsError(f"cannot write {path}: {error.strerror or error}") from None
    return Path(path)


def load(path: str | Path, model: Module) -> Loaded:
    """Copies the weights of a file to a network. Its head keeps its initial values where the file has none, or one for
    other classes. Raises WeightsError, before anything changes, for a file that is missing, damaged or of another
    network."""
    found = _named(read(path), model)
    mine = {name: state_shape(t) for name, t in model.named_tensors()}
    fits = {name: found[name].shape == shape for name, shape in mine.items() if name in found}
    initial = tuple(name for name in mine if not fits.get(name, False) and HEADS.match(name))
    missing = [name for name in mine if not (name in fits or name in initial or name.endswith(COUNTER))]
    if missing:
        if f"model.{missing[0]}" in found:
            raise WeightsError(f"{path} is a checkpoint; `minidl export` writes its weights to a file that fits here")
        raise WeightsError(f"{path} is of another network: it lacks {missing[0]}" + (
            f" and {len(missing) - 1} others" if len(missing) > 1 else ""))
    for name, ok in fits.items():
        if not ok and name not in initial:
            raise WeightsError(f"{path} is of another network: {name} is {found[name].shape} in the file, "
                               f"{mine[name]} in the network")
    for name, t in model.named_tensors():
        if name in found and name not in initial:
            put(t, found[name].astype(t.dtype))
    return Loaded(initial, tuple(sorted(found.keys() - mine.keys() - {*STANDARDIZE})), {*STANDARDIZE} <= found.keys())


def scaling(path: str | Path) -> Scaling | None:
    """The mean and deviation by which the data of these weights were standardised, in a file of weights or a checkpoint
    (a file); None for a file without them, or one that cannot be read, which a load says."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as content:
            if {*STANDARDIZE} <= {*content.keys()}:
                return Scaling(*(np.asarray(content.get_tensor(name), np.float64) for name in STANDARDIZE))
    except (OSError, SafetensorError, ValueError, TypeError):
        pass
    return None


def read(path: str | Path) -> dict[str, Any]:
    """The arrays of a safetensors file by name. Raises WeightsError."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(Path(path))
    except FileNotFoundError:
        raise WeightsError(f"there is no file {path}") from None
    except OSError as error:
        if Path(path).is_dir():
            raise WeightsError(f"cannot read {path}: it is a folder; give a file of weights in it, such as "
                               f"model.safetensors") from None
        raise WeightsError(f"cannot read {path}: {error.strerror or error}") from None
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightsError(f"{path} is damaged or no file of weights that NumPy can read: "
                           f"{str(error).splitlines()[0][:200]}") from None


def _named(values: Mapping[str, Any], model: Module) -> dict[str, Any]:
    """The arrays under the network's own names."""
    mine = {name for name, _ in model.named_tensors()}
    if "conv_stem.weight" in values:
        values = from_timm(values, mine)
    found = {_modern(name): value for name, value in values.items() if not LEFT_OUT.fullmatch(name)}
    prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in mine)), "")
    return {prefix + name if name not in mine and prefix + name in mine else name: value
            for name, value in found.items()}


def _modern(name: str) -> str:
    """Names as in today's files: older ones have gamma and beta, and dots within the layers of DenseNets."""
    name = re.sub(r"(LayerNorm|layer_norm)\.gamma$", r"\1.weight", name)
    name = re.sub(r"(LayerNorm|layer_norm)\.beta$", r"\1.bias", name)
    return re.sub(r"(denselayer\d+\.(?:norm|conv))\.(\d\.)", r"\1\2", name)


# ------------------------------------------------------------------------------------------ timm's names of MobileNetV3
STAGES = (1, 2, 3, 4, 2, 3)  #: inverted residuals in each stage of timm's MobileNetV3-Large
EXPANDED = ("conv_pw", "bn1"), ("conv_dw", "bn2"), ("conv_pwl", "bn3")  #: the layers of one
PLAIN = ("conv_dw", "bn1"), ("conv_pw", "bn2")  #: of one without expansion


def timm_names(names: Iterable[str]) -> dict[str, str]:
    """timm's name of each module of a MobileNetV3 in torchvision's names. Raises WeightsError for another network."""
    modules = {name.rpartition(".")[0] for name in names}
    if not {"features.0.0", "features.16.1", "classifier.3"} <= modules:
        raise WeightsError("timm's names differ only for MobileNetV3-Large; other networks have them already, or are "
                           "not in timm")
    found = {"features.0.0": "conv_stem", "features.0.1": "bn1", "features.16.0": "blocks.6.0.conv",
             "features.16.1": "blocks.6.0.bn1", "classifier.0": "conv_head", "classifier.3": "classifier"}
    places = [f"blocks.{stage}.{i}" for stage, count in enumerate(STAGES) for i in range(count)]
    for number, place in enumerate(places, 1):
        block = f"features.{number}.block"
        parts = sorted({int(m[len(block) + 1 :].split(".")[0]) for m in modules if m.startswith(block + ".")})
        excite = [p for p in parts if f"{block}.{p}.fc1" in modules]
        layers = [p for p in parts if p not in excite]
        for part, (conv, norm) in zip(layers, EXPANDED if len(layers) == 3 else PLAIN, strict=True):
            found[f"{block}.{part}.0"], found[f"{block}.{part}.1"] = f"{place}.{conv}", f"{place}.{norm}"
        for part in excite:
            found |= {f"{block}.{part}.{ours}": f"{place}.se.conv_{theirs}"
                      for ours, theirs in (("fc1", "reduce"), ("fc2", "expand"))}
    return found


def to_timm(values: Mapping[str, Any]) -> dict[str, Any]:
    """A MobileNetV3's state dict under timm's names; in timm the first linear layer of the head is a convolution."""
    if "features.0.0.weight" not in values:
        if any(name.startswith(PREFIXES) for name in values):
            raise WeightsError("BERT and GPT are not in timm; their names are Hugging Face's")
        return dict(values)
    names = timm_names(name for name in values if name not in STANDARDIZE)
    found = {name: values[name] for name in STANDARDIZE if name in values}
    for name, value in values.items():
        if name in found:
            continue
        module, _, what = name.rpartition(".")
        found[f"{names[module]}.{what}"] = value[:, :, None, None] if name == "classifier.0.weight" else value
    return found


def from_timm(values: Mapping[str, Any], ours: Iterable[str]) -> dict[str, Any]:
    """The reverse of `to_timm` for a network with our names. Names that it does not know stay."""
    back = {theirs: mine for mine, theirs in timm_names(ours).items()}
    found = {}
    for name, value in values.items():
        module, _, what = name.rpartition(".")
        flat = module == "conv_head" and what == "weight" and value.ndim == 4
        found[f"{back.get(module, module)}.{what}"] = value[:, :, 0, 0] if flat else value
    return found
