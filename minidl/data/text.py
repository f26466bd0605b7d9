"""Running text as windows of tokens: Python's manual, text files and folders (also compressed, as OpenWebText is), and
files of uint16 tokens.

A folder whose files say train and val, valid, dev or test is split so; of other text, the last fifth is the test part.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from . import tokens
from .archives import HIDDEN, reading, unpacked
from .dataset import Array, DataError, Dataset, Wanted, check_vocabulary
from .tokens import Tokenizer

TEXT = ("next_token", "masked_token")  #: the objectives that running text serves
LARGEST = 4 << 30  #: the most bytes of text that are read; more is for a file of tokens
SMALL = 64 << 20  #: bytes of text that any file may hold
INFLATED = 200  #: how many times the size of its file more text may have
PLAIN = (".txt", ".md", ".rst", ".py", ".text")
PACKED = (".xz", ".tar", ".gz")
TOKENS = (".bin",)
#: the first bytes of .bin files that are not tokens alone
HEADS = {b"PK\x03\x04": "a ZIP archive, as torch writes", b"\x93NUM": "a NumPy array",
         **{number.to_bytes(4, "little"): "a file of llm.c, with a header" for number in (20240520, 20240801)}}
TESTS = ("test", "val", "valid", "validation", "dev")


def windows(name: str, text: Array, length: int, vocabulary: int, *, bytes_per_token: float | None = None,
            mask: int | None = None, slow: bool = False, tokenizer: str = "") -> Dataset:
    """A data set of windows: in sample i, x is tokens i*length to (i+1)*length and y the same shifted by one; both (B,
    length) int64. Raises DataError if the text is too short."""
    if len(text) <= length:
        raise DataError(f"{name}: {len(text)} tokens are too few for a window of {length} and the token after it")
    steps = np.arange(length + 1)

    def rows(indices: NDArray[np.int64]) -> tuple[Array, Array]:
        window = np.take(text, indices[:, None] * length + steps).astype(np.int64, copy=False)
        return window[:, :-1].copy(), window[:, 1:].copy()

    return Dataset(name, (len(text) - 1) // length, (length,), vocabulary, rows,
                   TEXT if mask is not None else TEXT[:1], bytes_per_token=bytes_per_token, mask=mask, slow=slow,
                   tokenizer=tokenizer)


def running(name: str, train: bytes, test: bytes, wanted: Wanted) -> Dataset:
    """Windows of one part of a text, by a tokenizer that has seen the training part."""
    part = test if wanted.split == "test" else train
    ids = _encoded(coder := tokens.tokenizer(wanted.tokenizer, train), part)
    size = check_vocabulary(coder.vocabulary, wanted.classes, name)
    return windows(name, ids, wanted.length, size, bytes_per_token=len(part) / max(1, len(ids)),
                   mask=coder.special.get("mask"), tokenizer=coder.saved)


@functools.lru_cache(maxsize=4)
def _encoded(coder: Tokenizer, part: bytes) -> Array:
    return coder.encode(part)


def pydoc_text() -> tuple[bytes, bytes]:
    """The topics of Python's manual in the order of their names: the training part, and the last fifth. The manual
    belongs to the running Python, so its bytes differ between Python versions."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise DataError("pydoc: this Python lacks pydoc_data.topics; use synthetic or a path") from error
    return _cut("\n".join(topics[name] for name in sorted(topics)).encode())


def _cut(text: bytes) -> tuple[bytes, bytes]:
    at = len(text) - len(text) // 5
    while 0 < at < len(text) and text[at] & 0xC0 == 0x80:  # within a character
        at -= 1
    return text[:at], text[at:]


# --------------------------------------------------------------------------------------------------------------- files
def find(path: Path) -> Path | None:
    """The path, if it or a file in it is text or tokens."""
    return path if _files(path, PLAIN + PACKED + TOKENS) else None


def _files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The file, or the files in the folder but hidden ones, if they end so, in any case."""
    files = [f for f in sorted(path.iterdir()) if not HIDDEN.search(f.name)] if path.is_dir() else [path]
    return [f for f in files if f.suffix.lower() in suffixes and f.is_file()]


def load_text(path: Path, wanted: Wanted) -> Dataset:
    """Windows of a file or a folder. Raises DataError."""
    if streams := _files(path, TOKENS):
        return _memmap(path, streams, wanted)
    files = _files(path, PLAIN + PACKED)
    apart = _of_split(files)
    train, test = (_joined(part, path) for part in apart) if apart else _cut(_joined(files, path))
    return running(path.name, train, test, wanted)


def _of_split(files: Iterable[Path]) -> tuple[list[Path], list[Path]] | None:
    """(training files, test files) where their names say which is which."""
    words = {f: set(f.name.lower().replace("-", ".").replace("_", ".").split(".")) for f in files}
    test = [f for f in words if words[f] & set(TESTS)]
    train = [f for f in words if "train" in words[f]]
    return (train, test) if train and test else None


def _joined(files: Iterable[Path], folder: Path) -> bytes:
    """The texts of the files, or of what archives hold. Raises DataError for bytes that are not UTF-8, and for more
    text than there can be in a file of its size, or than is read."""
    parts, size = list[bytes](), 0
    for file in files:
        room = min(LARGEST, max(SMALL, INFLATED * file.stat().st_size))
        with reading(file), open(file, "rb") as opened:
            for where, text in unpacked(opened, str(file), room, tar=file.suffix.lower() == ".tar"):
                parts.append(checked(where, text))
                size += len(parts[-1])
                if size > LARGEST:
                    raise DataError(f"{folder}: more than {LARGEST >> 30} GiB of text; save its tokens as uint16 in "
                                    f"train.bin and val.bin")
    return b"\n".join(parts)


def checked(where: object, text: bytes) -> bytes:
    """The text with a line feed alone at the ends of lines. Raises DataError for bytes that are not UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not a text in UTF-8 (byte {error.start})") from None
    return text.replace(b"\r\n", b"\n")


def _memmap(path: Path, files: list[Path], wanted: Wanted) -> Dataset:
    """Windows of uint16 tokens that stay on disk."""
    apart = _of_split(files)
    if max(map(len, apart or [files])) > 1:
        raise DataError(f"{path}: has {', '.join(f.name for f in files)}; tokens are in train.bin and val.bin, or in "
                        f"one file")
    text = _tokens(files[0] if apart is None else apart[wanted.split == "test"][0])
    size = check_vocabulary(1 + max(_largest(f, f.stat().st_mtime_ns, f.stat().st_size) for f in files),
                            wanted.classes, path)
    if apart is None:
        cut = len(text) - len(text) // 5
        text = text[cut:] if wanted.split == "test" else text[:cut]
    return windows(path.name, text, wanted.length, size, slow=True)


def _tokens(file: Path) -> Array:
    """The uint16 tokens of a file, which stay there. Raises DataError."""
    size = file.stat().st_size
    if not size or size % 2:
        raise DataError(f"{file}: has {size} bytes, which are not uint16 tokens")
    found = np.memmap(file, "<u2", "r")
    if (head := found[:2].tobytes()) in HEADS:
        raise DataError(f"{file}: is {HEADS[head]}, not tokens alone; save them as uint16 with nothing before them")
    if len(found) >= 16 and int(found[1:4096:2].max()) << 8 < found[:4096:2].max():
        raise DataError(f"{file}: every second of its uint16 tokens is 0 or small, so it seems to hold wider ones; "
                        f"save them as uint16")
    return found


@functools.lru_cache
def _largest(file: Path, changed: int, size: int) -> int:
    """The largest token of a file. Both parts of a text ask for the tokens of both; reading them takes long."""
    text = _tokens(file)
    return max(int(text[i : i + (1 << 22)].max()) for i in range(0, len(text), 1 << 22))
