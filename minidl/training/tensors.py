"""The tensors of safetensors files, read from where they are, and written. Nothing in a file is ever executed."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..system.files import LARGEST

#: NumPy's type of each type of safetensors; bfloat16 is the upper half of a float32
TYPES = {"BOOL": "?", "BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8",
         **{f"{kind.upper()}{8 * size}": f"<{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)}}
KINDS = {np.dtype(name).name: kind for kind, name in TYPES.items()} | {"uint16": "U16", "bfloat16": "BF16"}
#: how files in other formats begin -> what they are, and how they become safetensors
TORCH = ("a pickle of torch, which could run any code; with torch, safetensors.torch.save_file({n: t.contiguous()"
         ".clone() for n, t in torch.load(FILE, weights_only=True).items()}, NEW) writes the tensors of a state dict")
DCP = "a distributed checkpoint; torch.distributed.checkpoint.format_utils.dcp_to_torch_save makes a pickle of it"
FORMATS = {rb"PK\x03\x04.*data\.pkl|\x80[\x02-\x05]": TORCH, rb"PK\x03\x04": "a ZIP archive; of NumPy's .npz, "
           "safetensors.numpy.save_file(dict(numpy.load(FILE)), NEW) writes the arrays, of torch.export's .pt2, "
           "safetensors.torch.save_file(torch.export.load(FILE).state_dict, NEW) the weights", rb"GGUF": "a GGUF file",
           rb"(?i)version https://git-lfs|\s*<(!doctype|html)": "a pointer of Git LFS (git lfs pull) or a web page",
           rb"\x89HDF": "an HDF5 file, such as Keras writes", rb"\x93NUMPY": "a NumPy array"}
SUFFIXES = {".distcp": DCP, **dict.fromkeys((".bin", ".ckpt", ".pt", ".pth"), TORCH)}  #: the same by suffix
OTHERS = (".gguf", ".h5", ".hdf5", ".json", ".keras", ".msgpack", ".npy", ".npz", ".onnx", ".pt2", ".zip")  #: and more


class WeightsError(ValueError):
    """A file of tensors cannot be written or read, or does not fit here. The message is one line and says why."""


@contextmanager
def doing(what: str, more: str = "") -> Iterator[None]:
    """Raises WeightsError, as in `cannot read FILE: REASON`, for what the system refuses inside."""
    try:
        yield
    except OSError as error:
        raise WeightsError(f"cannot {what}: {error.strerror or error}{more}") from error


@dataclass(frozen=True)
class Slot:
    """A tensor in a file: its name and type there, its shape, and its first byte."""

    file: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    begin: int

    @property
    def dtype(self) -> str:
        """NumPy's name of its type; the file's own name if NumPy has none."""
        return np.dtype(TYPES[self.kind]).name if self.kind in TYPES and self.kind != "BF16" else self.kind

    def read(self) -> Any:
        """Its array: a view on the file, which is read as it is used; bfloat16 as float32. Raises WeightsError."""
        if self.kind not in TYPES:
            raise WeightsError(f"{self.file}: {self.name} has the type {self.kind}, which cannot be read; save it as "
                               f"BF16, F16 or F32")
        count = math.prod(self.shape)
        with doing(f"read {self.file}"):
            value: Any = (np.memmap(self.file, TYPES[self.kind], "c", self.begin, (count,)) if count else
                          np.empty(0, TYPES[self.kind]))
        value = (value.astype("<u4") << 16).view("<f4") if self.kind == "BF16" else value
        return value.reshape(self.shape)


def in_order(layout: Mapping[str, tuple[Any, tuple[int, ...]]]) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Types and shapes of tensors by name, in an order in which each begins at a multiple of its elements' size."""
    return dict(sorted(layout.items(), key=lambda item: (-np.dtype(item[1][0]).itemsize, item[0])))


def beginning(layout: Mapping[str, tuple[Any, tuple[int, ...]]], texts: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file, which the bytes of these tensors follow, in their order. Raises WeightsError
    for a type that such files do not have."""
    about, end = dict[str, Any]({"__metadata__": {**texts}} if texts else {}), 0
    for name, (dtype, shape) in layout.items():
        kind = np.dtype(dtype)
        if kind.name not in KINDS:
            raise WeightsError(f"{name} has the type {kind}, which no file of safetensors has")
        begin, end = end, end + math.prod(shape) * kind.itemsize
        about[name] = {"dtype": KINDS[kind.name], "shape": [*shape], "data_offsets": [begin, end]}
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def raw(value: Any) -> memoryview:
    """The bytes of an array as such a file has them."""
    value = np.ascontiguousarray(value)
    return memoryview(value.astype(value.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8))


def serialized(arrays: Mapping[str, Any], texts: Mapping[str, str]) -> Iterator[Any]:
    """A safetensors file, in pieces. Raises WeightsError."""
    layout = in_order({name: (value.dtype, value.shape) for name, value in arrays.items()})
    yield beginning(layout, texts)
    for name in layout:
        yield raw(arrays[name])


def header(file: Path) -> tuple[dict[str, Slot], dict[str, str]]:
    """A safetensors file's tensors and texts by name. Raises WeightsError."""
    from safetensors import SafetensorError, safe_open

    if os.path.exists(file) and not os.path.isfile(file):  # pathlib's raise errors for some names
        raise WeightsError(f"cannot read {file}: it is not a regular file")
    start = b""
    try:
        with open(file, "rb") as content:
            start = content.read(1 << 10)
            size = int.from_bytes(start[:8], "little")
            if size > LARGEST["checkpoint header"]:
                raise ValueError("its header is too large")
            content.seek(8)
            with safe_open(file, framework="np"):  # raises if the header does not fit the file
                about = json.loads(content.read(size))
        if not all(map(str.isprintable, about)):
            raise ValueError("the name of a tensor cannot be printed")
        texts = about.pop("__metadata__", None) or {}
        return {name: Slot(file, name, slot["dtype"], tuple(slot["shape"]), 8 + size + slot["data_offsets"][0])
                for name, slot in about.items()}, texts
    except FileNotFoundError:
        raise WeightsError(f"there is no file {file}") from None
    except OSError as error:
        raise WeightsError(f"cannot read {file}: {error.strerror or error}") from None
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = "" if start[8:9] == b"{" else DCP if file.suffix == ".distcp" else next(
            (what for begins, what in FORMATS.items() if re.match(begins, start, re.DOTALL)),
            SUFFIXES.get(file.suffix, ""))
        raise WeightsError(f"{file} is {what}" if what else f"{file} is damaged or no file of weights in safetensors: "
                           f"{str(error).splitlines()[0][:200]}") from None
