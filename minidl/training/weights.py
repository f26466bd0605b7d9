"""Weights in safetensors files under their published names, both ways: one file, or shards with an index, in the form
of Hugging Face's `save_pretrained`.

A state dict has these names already: torchvision's for images (which are also timm's, but for MobileNetV3), Hugging
Face's for BERT and GPT-2. So a file is a state dict, and this module knows how published files differ from it: other
prefixes and older names, counters and masks that are no weights, a second copy of a tied weight, other heads. It knows
no run and no checkpoint.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ..core.columns import in_parts
from ..data import Scaling
from ..nn import Module
from ..nn.module import put, state_shape
from ..system.files import FileError, read_text, write_atomic
from .tensors import OTHERS, SUFFIXES, Slot, WeightsError, doing, header, serialized

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"  #: the file, or the index, in a folder of weights
PT = {"format": "pt"}  #: the text that a file needs for transformers to read it
STYLES = ("state", "timm")  #: names as in a state dict, or as timm has them
PREFIXES = ("bert.", "transformer.")  #: of the network without its head, which some files leave out
#: masks and numbers of positions, which are no weights (a bias has one axis): a file may have them
LEFT_OUT = re.compile(r".*\.attn\.(bias|masked_bias)|(.*\.)?position_ids")
#: what wrappers put into names: DistributedDataParallel, torch.compile, FSDP, checkpointing, a module around it
WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|model)\.")
_bare = partial(WRAPPERS.sub, "")  #: a name without them
COUNTER = "num_batches_tracked"  #: of a batch norm: a file may lack it
#: by which mean and deviation the training data were standardised, see `data.Scaling`: no weights, but what goes with
#: them: the network reads (x - mean) / std
STANDARDIZE = ("standardize.mean", "standardize.std")
#: activations of transformers -> the same function under another name
ACTIVATIONS = {"gelu_python": "gelu", **dict.fromkeys(
    ("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"), "gelu_new")}
#: prefixes of the task head: a file may lack it, or have it for other classes
HEADS = re.compile(r"fc\.|classifier\.|cls\.|bert\.pooler\.|pooler\.|conv_head\.")


@dataclass(frozen=True)
class Loaded:
    """The outcome of a load: `initial`, names of the head's weights that keep their initial values; `unused`, names in
    the file that the network does not have; `standardized`, whether the network was trained on standardised data;
    `epsilon`, the network's in batch norms, if the file has timm's names and timm's networks have another one."""

    initial: tuple[str, ...]
    unused: tuple[str, ...]
    standardized: bool = False
    epsilon: tuple[str, ...] = ()

    def said(self, file: str | Path) -> tuple[str, ...]:
        """Messages for the user, a line each."""
        return tuple(f"{file}: {what} {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}" for what, names in (
            ("not in it, or for other classes, so these keep their initial values:", self.initial),
            ("of no use here:", self.unused),
            (f"its names are timm's, whose network has --model-arg eps={TIMM_EPS:g}; here eps is", self.epsilon),
            ("its network reads standardised data, (x - mean) / std, by its", self.standardized and STANDARDIZE))
            if names)


def save(path: str | Path, values: Mapping[str, Any], style: str = "state", shards: int | None = None) -> Path:
    """Writes a state dict to a file; or, with `shards`, to files of at most so many bytes of tensors (one tensor may be
    larger) and their index, as `save_pretrained` does: beside the file `path` if that ends in .safetensors, else in
    the folder `path`, which is made. If all fit into one file, there is no index. Returns the file or the index. It
    appears whole or not at all. Raises WeightsError for names that have no such style, for files that cannot be
    written or have another format's suffix, and for shards where there are weights already."""
    if style not in STYLES:
        raise WeightsError(f"unknown style of names {style!r}; known: {', '.join(STYLES)}")
    if shards is not None and not (isinstance(shards, int | np.integer) and shards > 0):
        raise WeightsError(f"shards is {str(shards)[:40]}; it must be a whole number of bytes, at least 1")
    path, named = Path(path), to_timm(values) if style == "timm" else values
    if path.suffix.lower() in (*SUFFIXES, *OTHERS) and shards is None:
        raise WeightsError(f"{path}: programs take {path.suffix} for another format, such as a pickle of torch, and "
                           f"weights are written as safetensors; name it {path.with_suffix('.safetensors')}")
    arrays = {name: np.asarray(value, order="C") for name, value in named.items()}
    with doing(f"write {path}"):
        if shards is not None:
            return _save_shards(path if path.suffix == ".safetensors" else path / ONE, arrays, shards)
        write_atomic(path, serialized(arrays, PT))
    return path


def _save_shards(path: Path, arrays: Mapping[str, Any], size: int) -> Path:
    """Writes the index, or the one file, last: without it there are no weights. Raises OSError and WeightsError."""
    parts = [{name: arrays[name] for name in own}
             for own in in_parts(((name, value.nbytes) for name, value in arrays.items()), size)]
    index, stem = path.with_name(f"{path.name}.index.json"), glob.escape(path.stem)
    if there := sorted(f for f in (path, index, *path.parent.glob(f"{stem}-*-of-*.safetensors")) if f.exists()):
        raise WeightsError(f"{there[0]} is there already; remove the weights in {path.parent}, or name another folder")
    files = [path.with_name(f"{path.stem}-{i + 1:05}-of-{len(parts):05}.safetensors") for i in range(len(parts))]
    about = {"metadata": {"total_size": sum(value.nbytes for value in arrays.values())},
             "weight_map": {name: file.name for file, part in zip(files, parts, strict=True) for name in part}}
    if len(parts) <= 1:
        index, files = path, []
    made = not path.parent.exists()
    try:
        path.parent.mkdir(exist_ok=True)
        for file, part in zip(files, parts, strict=False):
            write_atomic(file, serialized(part, PT))
        write_atomic(index, json.dumps(about, indent=2) + "\n" if files else serialized(arrays, PT))
    except BaseException:
        for file in files:
            file.unlink(missing_ok=True)
        if made:
            with suppress(OSError):
                path.parent.rmdir()
        raise
    return index


def load(path: str | Path, model: Module) -> Loaded:
    """Copies the weights of a file, of an index of shards, or of a folder that has either, to a network, in the types
    of its parameters. Its head keeps its initial values where the file has none, or one for other classes. Raises
    WeightsError, before anything changes, for files that are missing, damaged or of another network, and for values
    that the network cannot hold."""
    values = read(path)
    _check_config(Path(path), model)
    found, places = _named(path, values, model), _places(model)
    mine = {name: state_shape(t) for name, t in model.named_tensors() if places[name] == name}
    fits = {name: found[name].shape == shape for name, shape in mine.items() if name in found}
    bare = _named(path, {_bare(name): value for name, value in values.items()}, model)
    if len(fits) < len(mine) and len({*map(_bare, bare)} & {*map(_bare, mine)}) > len(fits):
        if os.path.isfile(path) and Path(path).suffix != ".json" and "minidl" in header(Path(path))[1]:
            raise WeightsError(f"{path} is a checkpoint; `minidl export` writes its weights to a file that fits here")
        raise WeightsError(f"{path} is of a network within another module: it has "
                           f"{next(name for name in values if WRAPPERS.search(name))}; save the state dict of the "
                           f"network alone, as in model.module (DistributedDataParallel) or model._orig_mod "
                           f"(torch.compile)")
    initial = tuple(name for name in mine if not fits.get(name, False) and HEADS.match(name))
    missing = [name for name in mine if not fits or not (name in fits or name in initial or name.endswith(COUNTER))]
    if missing:
        part = "; it is one of several files: give their folder or index" if re.search(
            r"-\d+-of-\d+\.safetensors$", str(path)) else ""
        raise WeightsError(f"{path} is of another network: it lacks {missing[0]}" + (
            f" and {len(missing) - 1} others" if len(missing) > 1 else "") + part)
    for name, ok in fits.items():
        if not ok and name not in initial:
            raise WeightsError(f"{path} is of another network: {name} is {found[name].shape} in the file, "
                               f"{mine[name]} in the network")
    fitted = [(t, _typed(path, name, found[name], t.dtype)) for name, t in model.named_tensors()
              if name in found and name not in initial]
    for t, value in fitted:
        put(t, value)
    return Loaded(initial, tuple(sorted(found.keys() - mine.keys() - {*STANDARDIZE})), {*STANDARDIZE} <= found.keys(),
                  (str(model.eps),) if TIMM in values and getattr(model, "eps", TIMM_EPS) != TIMM_EPS else ())


def _check_config(path: Path, model: Module) -> None:
    """Raises WeightsError if a config.json of transformers or timm beside the weights says something of their network
    that this one does otherwise, such as another number of heads, which no shape shows (timm's sizes they do)."""
    try:
        about = json.loads(read_text((path if path.is_dir() else path.parent) / "config.json", "index of weights"))
        theirs = {"model_type", "pretrained_cfg"} & {*about}  # transformers', timm's
        said = {name: about[name] for name in model.config if theirs and name in about}
    except (OSError, ValueError, TypeError, RecursionError):
        return
    if wrong := next((name for name, value in said.items() if model.config[name] not in (
            value, ACTIVATIONS.get(str(value)), re.sub(r"_?\d+$", "", str(value)))), None):
        raise WeightsError(f"{path} is of another network: its config.json has {wrong} {str(said[wrong])[:40]!r}, this "
                           f"network {str(model.config[wrong])!r}")


def _typed(path: str | Path, name: str, value: Any, dtype: str) -> Any:
    """The values in the type of a parameter or state. Raises WeightsError if they would be others: whole numbers in
    the place of floats are quantised, large numbers become infinite."""
    with np.errstate(all="ignore"):
        made = value.astype(dtype)
    floats = made.dtype.kind == "f"
    if floats and value.dtype.kind != "f":
        raise WeightsError(f"{path}: {name} is {value.dtype} in the file and {dtype} in the network; if it is "
                           f"quantised, save it as floats")
    if not np.array_equal(np.isfinite(made), np.isfinite(value)) if floats else not np.array_equal(made, value):
        raise WeightsError(f"{path}: {name} has numbers that {dtype}, its type in the network, cannot hold")
    return made


def scaling(path: str | Path) -> Scaling | None:
    """The mean and deviation by which the data of these weights were standardised, in weights that `load` reads or a
    checkpoint (a file); None for those without them, or that cannot be read, which a load says."""
    with suppress(WeightsError):
        slots = _slots(Path(path))
        if {*STANDARDIZE} <= slots.keys():
            return Scaling(*(slots[name].read().astype(np.float64) for name in STANDARDIZE))
    return None


# -------------------------------------------------------------------------------------------------------- what is there
def read(path: str | Path) -> dict[str, Any]:
    """The arrays by name of a safetensors file, of the shards of an index (.json), or of a folder that has either;
    bfloat16 as float32. Raises WeightsError."""
    return {name: slot.read() for name, slot in _slots(Path(path)).items()}


def _slots(path: Path) -> dict[str, Slot]:
    """The tensors by name. Raises WeightsError."""
    if os.path.isdir(path):
        there = [name for name in (ONE, INDEX) if (path / name).exists()]
        if len(there) != 1:
            other = sorted(f.name for f in path.iterdir() if f.suffix in (".safetensors", *SUFFIXES))
            what = {SUFFIXES.get(Path(name).suffix) for name in other}
            raise WeightsError(f"{path}: the folder has " + (
                f"{ONE} and {INDEX}; give one of them" if there else f"neither {ONE} nor {INDEX}" + (
                    f"; it has {', '.join(other[:3])}{' ...' if len(other) > 3 else ''}" if other else "")
                + (f", {what.pop()}" if len(what) == 1 and None not in what else "")))
        path = path / there[0]
    return header(path)[0] if path.suffix != ".json" else in_shards(path, weight_map(path)[0])


def in_shards(index: Path, places: Mapping[str, str]) -> dict[str, Slot]:
    """The tensors of all files, each from the file of its place, if it has one. Raises WeightsError, also for a file
    outside the folder of the index."""
    found = dict[str, Slot]()
    for name, place in places.items():
        if PurePosixPath(place).is_absolute() or ".." in PurePosixPath(place).parts:
            raise WeightsError(f"{index}: the file of {name} is {place[:100]!r}, which is outside of its folder")
    for file in dict.fromkeys(places.values()):
        found |= {name: slot for name, slot in header(index.parent / file)[0].items() if places.get(name, file) == file}
    if lost := next((name for name in places if name not in found), None):
        raise WeightsError(f"{index.parent / places[lost]} lacks {lost}, which {index.name} says it has")
    return found


def weight_map(index: Path) -> tuple[dict[str, str], Any]:
    """The file of each tensor, by its name in the folder of the index, and the metadata. Raises WeightsError."""
    try:
        about = json.loads(read_text(index, "index of weights"))
        return files_by(about["weight_map"]), about.get("metadata")
    except FileError as error:
        raise WeightsError(f"there is no file {index}" if error.errno == errno.ENOENT else f"cannot read {error}"
                           ) from None  # fmt: skip
    except (ValueError, TypeError, KeyError, RecursionError):
        raise WeightsError(f"{index} is damaged or no index of weights: it needs a weight_map, the file of each tensor"
                           ) from None  # fmt: skip


def files_by(places: Any) -> dict[str, str]:
    """The files of tensors by an index. Raises TypeError if it is none."""
    if not isinstance(places, dict) or not all(
            isinstance(file, str) and file and f"{name}{file}".isprintable() for name, file in places.items()):
        raise TypeError
    return places


# --------------------------------------------------------------------------------------------------------------- names
def _places(model: Module) -> dict[str, str]:
    """Of each name for a network's tensor, in its state dict or published files, its first: some have several."""
    first: dict[int, str] = {}
    return {**model.tied, **{name: first.setdefault(id(t), name) for name, t in model.named_tensors()}}


def _named(path: str | Path, values: Mapping[str, Any], model: Module) -> dict[str, Any]:
    """The arrays under the network's own names. Raises WeightsError if names for one parameter have other values."""
    mine = _places(model)
    if TIMM in values:
        values = _renamed(values, {theirs: ours for ours, theirs in timm_names(mine).items()})
    prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in mine)), "")
    found, source = dict[str, Any](), dict[str, str]()
    for name, value in values.items():
        known = next((n for n in (name, _modern(name), prefix + _modern(name)) if n in mine), None)
        if known is None and LEFT_OUT.fullmatch(name) and value.ndim != 1:
            continue
        key = mine[known] if known else name
        if key in found and not np.array_equal(value, found[key], equal_nan=value.dtype.kind == "f"):
            raise WeightsError(f"{path}: {' and '.join(sorted((name, source[key])))} differ, and this network has one "
                               f"parameter for both (tied weights), so it cannot hold them")
        found[key], source[key] = value, name
    return found


def _modern(name: str) -> str:
    """Names as in today's files: older ones have gamma and beta, and dots within the layers of DenseNets."""
    name = re.sub(r"(LayerNorm|layer_norm)\.gamma$", r"\1.weight", name)
    name = re.sub(r"(LayerNorm|layer_norm)\.beta$", r"\1.bias", name)
    return re.sub(r"(denselayer\d+\.(?:norm|conv))\.(\d\.)", r"\1\2", name)


# ------------------------------------------------------------------------------------------ timm's names of MobileNetV3
TIMM, TIMM_EPS = "conv_stem.weight", 1e-5  #: a name that shows whose they are; what batch norms add to variances there
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
    if "features.0.0.weight" in values:
        return _renamed(values, timm_names(name for name in values if name not in STANDARDIZE))
    if any(name.startswith(PREFIXES) for name in values):
        raise WeightsError("BERT and GPT are not in timm; their names are Hugging Face's")
    return dict(values)


def _renamed(values: Mapping[str, Any], modules: Mapping[str, str]) -> dict[str, Any]:
    """The values under the names of other modules; others stay. The weight of timm's `conv_head` has four axes,
    elsewhere two."""
    found = {}
    for name, value in values.items():
        module, _, what = name.rpartition(".")
        if what == "weight" and modules.get(module) == "conv_head":
            value = value[:, :, None, None]
        elif name == "conv_head.weight" and value.ndim == 4:
            value = value[:, :, 0, 0]
        found[f"{modules.get(module, module)}.{what}"] = value
    return found
