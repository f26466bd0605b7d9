"""Sentences in pairs: GLUE's MNLI and MRPC (tables with tabs, or JSON lines), and parallel text as of IWSLT.

A pair becomes one row of tokens: `first a separator b separator` for a class, `a separator b end` for a translation,
cut to the network's length and padded with 0.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dataset import IGNORED, Array, DataError, Dataset, Wanted, check_labels, check_vocabulary
from .text import checked
from .tokens import Tokenizer, tokenizer

LARGEST = 1 << 30  #: the largest file, in bytes; MNLI's has 400 MB
Pair = tuple[str, str]


def _lines(file: Path) -> list[str]:
    """The lines of a text file. Raises DataError."""
    if file.stat().st_size > LARGEST:
        raise DataError(f"{file}: larger than {LARGEST >> 30} GiB")
    text = checked(file, file.read_bytes()).decode("utf-8-sig")
    return [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")]


# ---------------------------------------------------------------------------------------------------------------- GLUE
@dataclass(frozen=True)
class Glue:
    """A set of sentence pairs with a class each. `files`: the names of each split's file, any of which may be there;
    `columns`: (a, b, class) in tables and in JSON lines; `labels`: the classes in order, as in either."""

    name: str
    files: dict[str, tuple[str, ...]]
    columns: tuple[tuple[str, str, str], ...]
    labels: tuple[str, ...]

    def find(self, root: Path) -> Path | None:
        """The folder at or below `root` with its training file."""
        folders = (root, *(root / name for name in (self.name, self.name.upper(), f"glue/{self.name}")))
        return next((f for f in folders if self._fits(self._file(f, "train"))), None)

    def _fits(self, file: Path | None) -> bool:
        """Whether the first line of a file has the columns: several sets have a train.tsv."""
        if file is None:
            return False
        with open(file, "rb") as opened:
            line = opened.readline(1 << 16).decode("utf-8-sig", "replace").strip()
        names = re.findall(r'"(\w+)"\s*:', line) if file.suffix == ".jsonl" else line.split("\t")
        return any({*columns} <= {*names} for columns in self.columns)

    def _file(self, folder: Path, split: str) -> Path | None:
        return next((folder / n for n in self.files[split] if (folder / n).is_file()), None)

    def rows(self, folder: Path, split: str) -> tuple[list[Pair], Array]:
        """The pairs and classes of a split. Raises DataError that names file and line."""
        file = self._file(folder, split)
        if file is None:
            raise DataError(f"{folder}: has no {' or '.join(self.files[split])}, which {split} needs")
        pairs, labels = list[Pair](), list[int]()
        known = {name: i for i, label in enumerate(self.labels) for name in (str(i), label)}
        for number, row in _records(file):
            columns = next((c for c in self.columns if all(row.get(name) is not None for name in c)), None)
            if columns is None:
                raise DataError(f"{file}, line {number}: lacks {' or '.join(', '.join(c) for c in self.columns)}")
            a, b, label = (str(row[column]) for column in columns)
            if label == "-":  # MNLI: the judges did not agree
                continue
            if label not in known:
                raise DataError(f"{file}, line {number}: unknown label {label[:40]!r}; known: {', '.join(self.labels)}")
            pairs.append((a, b))
            labels.append(known[label])
        if not pairs:
            raise DataError(f"{file}: has no pairs of sentences")
        return pairs, np.array(labels, np.int64)


GLUE = (
    Glue("mnli", {"train": ("train.tsv", "multinli_1.0_train.jsonl", "multinli_1.0_train.txt", "train.jsonl"),
                  "test": ("dev_matched.tsv", "multinli_1.0_dev_matched.jsonl", "multinli_1.0_dev_matched.txt",
                           "dev_matched.jsonl", "validation_matched.jsonl")},
         (("sentence1", "sentence2", "gold_label"), ("premise", "hypothesis", "label")),
         ("entailment", "neutral", "contradiction")),
    Glue("mrpc", {"train": ("msr_paraphrase_train.txt", "train.tsv", "train.jsonl"),
                  "test": ("msr_paraphrase_test.txt", "dev.tsv", "dev.jsonl", "validation.jsonl", "test.tsv",
                           "test.jsonl")},
         (("#1 String", "#2 String", "Quality"), ("sentence1", "sentence2", "label")), ("0", "1")),
)  # fmt: skip


def _records(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, row) of a table with tabs, in which quotes mean nothing, or of JSON lines. Raises DataError."""
    head, *lines = _lines(file)
    if file.suffix != ".jsonl":
        names = head.split("\t")
        for number, line in enumerate(lines, 2):
            cells = line.split("\t")
            if len(cells) != len(names):
                raise DataError(f"{file}, line {number}: has {len(cells)} columns, its first line {len(names)}")
            yield number, dict(zip(names, cells, strict=True))
        return
    for number, line in enumerate((head, *lines), 1):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}, line {number}: not JSON ({str(error)[:100]})") from None
        if row is not None:
            yield number, row if isinstance(row, dict) else {}


def load_glue(glue: Glue, folder: Path, wanted: Wanted) -> Dataset:
    """Pairs of sentences with their classes: x (B, length) tokens, y (B,). Raises DataError."""
    length, classes = wanted.length, wanted.classes or len(glue.labels)
    pairs, labels = glue.rows(folder, wanted.split)
    check_labels(labels, classes, folder)
    coder = _coder(wanted, lambda: glue.rows(folder, "train")[0])
    first, between = (coder.token(name, glue.name) for name in ("first", "separator"))
    if coder.special.get("pad", 0):
        raise DataError(f"{glue.name}: the padding of the tokenizer is token {coder.special['pad']}, and networks "
                        f"leave out token 0; use a tokenizer whose padding is 0, such as BERT's, or bytes")
    if length < 5:
        raise DataError(f"{glue.name}: a length of {length} is too small for two sentences; the least is 5")

    def rows(indices: NDArray[np.int64]) -> tuple[Array, Array]:
        x = np.zeros((len(indices), length), np.int64)
        for i, index in enumerate(indices.tolist()):
            a, b = (coder.encode(part.encode()).tolist() for part in pairs[index])
            while len(a) + len(b) > length - 3:  # the longer one loses its end
                (a if len(a) > len(b) else b).pop()
            tokens = [first, *a, between, *b, between]
            x[i, : len(tokens)] = tokens
        return x, labels[indices]

    return Dataset(glue.name, len(pairs), (length,), classes, rows, vocabulary=coder.vocabulary, slow=True,
                   tokenizer=coder.saved)


def _coder(wanted: Wanted, pairs: Callable[[], Sequence[Pair]]) -> Tokenizer:
    """The tokenizer that is wanted, which may learn from the pairs for training."""
    learns = wanted.tokenizer.isdigit()
    return tokenizer(wanted.tokenizer, "\n".join(part for pair in pairs() for part in pair).encode() if learns else b"")


# --------------------------------------------------------------------------------------------------------------- IWSLT
def find_parallel(root: Path) -> Path | None:
    """The folder at or below `root` with parallel training text."""
    folders = [root, *sorted(f for f in root.glob("*-*") if f.is_dir())]
    return next((f for f in folders if f.is_dir() and _training(f)), None)


def _training(folder: Path) -> tuple[Path, Path] | None:
    """The training text: train.tags.SRC-TGT.SRC and .TGT as of IWSLT, or train.SRC and train.TGT, sorted by name."""
    for file in sorted(folder.glob("train.tags.*-*.*")):
        source, target = file.name.split(".")[2].split("-", 1)
        files = tuple(folder / f"train.tags.{source}-{target}.{language}" for language in (source, target))
        if all(f.is_file() for f in files):
            return files[0], files[1]
    plain = sorted(f for f in folder.glob("train.*") if re.fullmatch(r"train\.[a-z]{2,3}", f.name))
    return (plain[0], plain[1]) if len(plain) == 2 else None


def _testing(folder: Path, languages: tuple[str, str]) -> tuple[Path, Path]:
    """The test text, or else the development text. Raises DataError."""
    for part in ("tst", "test", "dev", "valid"):
        first = sorted(f for f in folder.iterdir() if re.search(rf"(^|\.){part}\d*\.", f.name)
                       and f.name.removesuffix(".xml").rsplit(".", 1)[-1] == languages[0])
        for file in first:
            stem, _, _ = file.name.removesuffix(".xml").rpartition(".")
            other = folder / (f"{stem}.{languages[1]}" + (".xml" if file.suffix == ".xml" else ""))
            if other.is_file():
                return file, other
    raise DataError(f"{folder}: has no test or dev text for {' and '.join(languages)}, such as "
                    f"IWSLT14.TED.tst2010.{languages[0]}-{languages[1]}.{languages[0]}.xml or test.{languages[0]}")


def _sentences(file: Path) -> list[str]:
    """A sentence per line without the lines of tags; or the <seg> elements of an XML file."""
    lines = _lines(file)
    if file.suffix == ".xml":
        found = [html.unescape(s.strip()) for line in lines for s in re.findall(r"<seg[^>]*>(.*?)</seg>", line)]
        if not found:
            raise DataError(f"{file}: has no <seg> elements")
        return found
    return [html.unescape(line.strip()) for line in lines if not (file.name.startswith("train.tags")
                                                                and line.lstrip().startswith("<"))]


def _parallel(folder: Path, split: str) -> list[Pair]:
    training = _training(folder)
    assert training is not None
    files = training if split == "train" else _testing(folder, (training[0].suffix[1:], training[1].suffix[1:]))
    source, target = (_sentences(f) for f in files)
    if len(source) != len(target):
        raise DataError(f"{files[0]} has {len(source)} sentences, {files[1].name} {len(target)}; they must be parallel")
    pairs = [(a, b) for a, b in zip(source, target, strict=True) if a and b]
    if not pairs:
        raise DataError(f"{files[0]}: has no sentences")
    return pairs


def load_parallel(folder: Path, wanted: Wanted) -> Dataset:
    """Sentences and their translations: x (B, length) `a separator b`, y (B, length) the tokens that follow, of which
    only b's and the end count. Half of the length is for each. Raises DataError."""
    pairs, length = _parallel(folder, wanted.split), wanted.length
    coder = _coder(wanted, lambda: _parallel(folder, "train"))
    between, end = (coder.token(name, "translation") for name in ("separator", "end"))
    if length < 4:
        raise DataError(f"{folder.name}: a length of {length} is too small for a sentence and its translation; the "
                        f"least is 4")

    def rows(indices: NDArray[np.int64]) -> tuple[Array, Array]:
        x, y = np.zeros((len(indices), length), np.int64), np.full((len(indices), length), IGNORED, np.int64)
        for i, index in enumerate(indices.tolist()):
            a, b = (coder.encode(part.encode()).tolist() for part in pairs[index])
            a = a[: length // 2]
            tokens = [*a, between, *b, end][: length + 1]
            x[i, : len(tokens) - 1] = tokens[:-1]
            y[i, len(a) : len(tokens) - 1] = tokens[len(a) + 1 :]
        return x, y

    return Dataset(folder.name, len(pairs), (length,), check_vocabulary(coder.vocabulary, wanted.classes, folder.name),
                   rows, ("translation",), slow=True, uneven=True, vocabulary=coder.vocabulary,
                   tokenizer=coder.saved, references=tuple(b for _, b in pairs))
