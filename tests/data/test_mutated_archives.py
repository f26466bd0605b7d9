"""Mutated tar archives of text, of shards and of classes: each is read, or one line names the file. Headers are mutated
field by field and get a right checksum, so that readers believe them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data_checks import packed, refused
from helpers import need

from minidl import data
from minidl.data.dataset import DataError

FIELDS = {"name": (0, 100), "mode": (100, 8), "size": (124, 12), "mtime": (136, 12), "type": (156, 1),
          "link": (157, 100), "magic": (257, 6), "prefix": (345, 155)}
SIZES = [b"\xff" * 12, b"\xff" * 11 + b"\x80", b"\x80" + b"\0" * 10 + b"\x40", b"\x80" + b"\xff" * 11, b"-0000000001\0",
         b"77777777777\0", b"00000000000\0", b"00000000777\0", b"abc" * 4, b"\0" * 12, b" " * 12]
TYPES = [bytes([t]) for t in b"\0001234567xgLKSDVNMI\xff"]


def with_field(archive: bytes, header: int, name: str, value: bytes) -> bytes:
    """The archive with one field of the header at this byte changed, and its checksum right."""
    begin, size = FIELDS[name]
    block = bytearray(archive[header : header + 512])
    block[begin : begin + size] = value[:size].ljust(size, b"\0")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return archive[:header] + bytes(block) + archive[header + 512 :]


def mutated(rng: np.random.Generator, archive: bytes) -> bytes:
    """One or two changes: a field of a header, cut, bytes changed, a part twice."""
    for _ in range(int(rng.integers(1, 3))):
        headers = [i for i in range(0, len(archive) - 511, 512) if archive[i + 257 : i + 262] == b"ustar"] or [0]
        kind, at = rng.integers(8), int(rng.choice(headers))
        if kind < 4:
            archive = with_field(archive, at, "size", SIZES[rng.integers(len(SIZES))])
        elif kind == 4:
            archive = with_field(archive, at, "type", TYPES[rng.integers(len(TYPES))])
        elif kind == 5:
            archive = with_field(archive, at, str(rng.choice(list(FIELDS))), rng.bytes(12))
        elif kind == 6:
            archive = archive[: rng.integers(len(archive) + 1)]
        else:
            place = int(rng.integers(len(archive) or 1))
            archive = archive[:place] + rng.bytes(4) + archive[place + 4 :]
    return archive


TEXT = packed({f"{i}.txt": b"the quick brown fox\n" * 20 for i in range(3)})
SHARD = packed({f"{i}.{kind}": content for i in range(3) for kind, content in
                (("jpg", b"\xff\xd8 no picture"), ("cls", b"%d" % i))})
CLASS = packed({f"{i}.jpg": b"\xff\xd8 no picture" for i in range(3)})


def opened(folder: Path, kind: str, archive: bytes) -> None:
    """Loads the archive as text, as a shard, or as the pictures of a class."""
    if kind != "text":
        need("PIL")
    path = {"text": "text.tar", "shard": "p/train-0.tar", "class": "p/train/a.tar"}[kind]
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(archive)
    sizes = {"sequence_length": 4} if kind == "text" else {}
    data.load(folder / ("text.tar" if kind == "text" else "p"), batch_size=1, **sizes)


@pytest.mark.parametrize("kind", ["text", "shard", "class"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_a_mutated_archive_is_read_or_named(tmp_path: Path, kind: str, seed: int) -> None:
    rng, refusals = np.random.default_rng([seed, len(kind)]), 0
    archive = {"text": TEXT, "shard": SHARD, "class": CLASS}[kind]
    opened(tmp_path, kind, archive)
    for number in range(1000 if seed else 100):
        try:
            opened(tmp_path, kind, mutated(rng, archive))
        except DataError as error:
            refusals += 1
            line = str(error)
            assert "\n" not in line, (seed, number, line)
            assert ".tar" in line or "'p'" in line or line.startswith(str(tmp_path)), (seed, number, line)
            assert "'list' argument" not in line, (seed, number, line)
    assert refusals > 20


@pytest.mark.parametrize("kind", ["text", "shard", "class"])
@pytest.mark.parametrize("size", [SIZES[0], SIZES[1], SIZES[3]])
def test_a_file_of_a_negative_or_endless_size_is_named(tmp_path: Path, kind: str, size: bytes) -> None:
    archive = with_field({"text": TEXT, "shard": SHARD, "class": CLASS}[kind], 0, "size", size)
    refused(".tar", act=lambda: opened(tmp_path, kind, archive))


@pytest.mark.parametrize("label", [b"99999999999999999999", b"1048576", b"-1", b"one"])
def test_a_class_that_no_network_has_is_named(tmp_path: Path, label: bytes) -> None:
    archive = packed({"0.jpg": b"\xff\xd8", "0.cls": label})
    refused("train-0.tar, 0.cls", "is not the number of a class", act=lambda: opened(tmp_path, "shard", archive))
