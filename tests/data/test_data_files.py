"""Data from files that are whole, truncated, foreign or hostile: nothing is executed, one line says what is wrong."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from data_checks import refused, same
from helpers import drawn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minidl import data
from minidl.data import DataError, arrays, formats, pickles
from minidl.data.dataset import Wanted
from minidl.data.loader import permutation

# ---- MNIST idx

PIXELS = np.random.default_rng(0).integers(0, 256, (23, 7, 5), np.uint8)
LABELS = np.arange(23, dtype=np.uint8) % 10


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_mnist(folder: Path, suffix: str = "", dotted: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in (("train", slice(0, 20)), ("t10k", slice(20, 23))):
        for what, array in (("images-idx3", PIXELS[rows]), ("labels-idx1", LABELS[rows])):
            content = idx(array)
            name = f"{split}-{what.replace('-', '.') if dotted else what}-ubyte{suffix}"
            (folder / name).write_bytes(gzip.compress(content) if suffix else content)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(("folder", "dotted"), [(".", False), ("MNIST/raw", False), ("mnist", True)])
def test_mnist(tmp_path, suffix, folder, dotted):
    write_mnist(tmp_path / folder, suffix, dotted)
    train = data.load("mnist", root=tmp_path, batch_size=5)
    test = data.load("mnist", root=tmp_path, batch_size=2, split="test")
    x, y = train.dataset.rows(np.arange(20))
    np.testing.assert_allclose(x, ((PIXELS[:20] / 255 - 0.1307) / 0.3081)[..., None], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(y, LABELS[:20])
    assert [len(y) for _, y in test] == [2, 1]
    assert (train.name, train.classes, train.steps()) == ("mnist", 10, 4)
    assert same(next(data.load(tmp_path / folder, batch_size=5)), next(train))


def huge(dimensions: int) -> bytes:
    return struct.pack(f">BBBB{dimensions}I", 0, 0, 8, dimensions, *[2**32 - 1] * dimensions) + bytes(100)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(("file", "content", "culprit"), [
    ("images-idx3", idx(PIXELS[:20])[:-1], "truncated"),
    ("images-idx3", idx(PIXELS[:20])[:9], "truncated"),
    ("images-idx3", b"", "truncated"),
    ("images-idx3", idx(PIXELS[:20]) + b"x", "holds more"),
    ("images-idx3", b"GIF89a" + bytes(50), "not an idx file"),
    ("images-idx3", huge(3), "truncated"),
    ("images-idx3", huge(4), "truncated"),
    ("images-idx3", idx(PIXELS[:0]), "(0, 7, 5)"),
    ("images-idx3", idx(LABELS[:20]), "(20,)"),
    ("labels-idx1", idx(LABELS[:19]), "19"),
    ("labels-idx1", idx(np.where(np.arange(20) == 7, 10, 0).astype(np.uint8)), "sample 7 has label 10"),
])  # fmt: skip
def test_bad_idx_files(tmp_path, suffix, file, content, culprit):
    write_mnist(tmp_path, suffix)
    bad = tmp_path / f"train-{file}-ubyte{suffix}"
    bad.write_bytes(gzip.compress(content) if suffix else content)
    bounded(lambda: refused(str(bad), culprit, act=lambda: data.load("mnist", root=tmp_path, batch_size=4)), 8 << 20)


def test_bad_gzip_files(tmp_path):
    write_mnist(tmp_path, ".gz")
    bad = tmp_path / "train-images-idx3-ubyte.gz"
    whole = bad.read_bytes()
    checksum = bytearray(whole)
    checksum[-8] ^= 1
    for content, says in ((whole[:-20], "damaged"), (b"no gzip at all", "not an idx"), (bytes(checksum), "damaged")):
        bad.write_bytes(content)
        refused(str(bad), says, act=lambda: data.load("mnist", root=tmp_path, batch_size=4))


def test_files_that_a_browser_has_unpacked_or_renamed(tmp_path):
    """What a file holds says whether it is packed, not its name."""
    write_mnist(tmp_path, ".gz")
    wanted = next(data.load("mnist", root=tmp_path, batch_size=5))
    images, labels = (tmp_path / f"train-{what}-ubyte.gz" for what in ("images-idx3", "labels-idx1"))
    images.write_bytes(gzip.decompress(images.read_bytes()))
    labels.rename(labels.with_suffix(""))
    assert same(next(data.load("mnist", root=tmp_path, batch_size=5)), wanted)


def test_half_a_data_set_is_enough_for_its_half(tmp_path):
    write_mnist(tmp_path)
    for name in ("t10k-labels-idx1-ubyte", "t10k-images-idx3-ubyte"):
        (tmp_path / name).unlink()
        refused(str(tmp_path), "t10k-", act=lambda: data.load("mnist", root=tmp_path, batch_size=4, split="test"))
    assert data.load("mnist", root=tmp_path, batch_size=4).name == "mnist"


def test_a_pipe_is_no_file(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    os.mkfifo(tmp_path / "train-labels-idx1-ubyte")
    refused("labels", "not a regular file", act=lambda: data.load("mnist", root=tmp_path, batch_size=4))
    os.mkfifo(tmp_path / "pipe.npz")
    refused("pipe.npz", "not a regular file", act=lambda: data.load(tmp_path / "pipe.npz", batch_size=4))


# ---- CIFAR pickles

CIFAR = np.random.default_rng(1).integers(0, 256, (6, 3072), np.uint8)
CIFAR_LABELS = [3, 1, 4, 1, 5, 9]


def python2_pickle(pixels: np.ndarray, labels: list[int], key: bytes = b"labels") -> bytes:
    """A batch as Python 2 and an old NumPy pickled it: protocol 2, byte strings, `numpy.core`."""
    def string(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<I", len(value)) + value

    array = (b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09(K\x01"
             + b"".join(b"M" + struct.pack("<H", size) for size in pixels.shape)
             + b"\x86cnumpy\ndtype\n"
               b"q\x0aU\x02u1K\x00K\x01\x87Rq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
             + string(pixels.tobytes()) + b"tb")  # fmt: skip
    return (b"\x80\x02}q\x01(" + string(b"batch_label") + string(b"training batch 1 of 5") + string(key) + b"]q\x05("
            + b"".join(b"K" + bytes([label]) for label in labels) + b"e" + string(b"data") + array
            + string(b"filenames") + b"](" + string(b"a.png") * len(labels) + b"eu.")  # fmt: skip


def batch(pixels=CIFAR, labels=CIFAR_LABELS, key=b"labels") -> dict:
    return {b"batch_label": b"training", key: list(labels), b"data": pixels, b"filenames": [b"a.png"] * len(labels)}


def write_cifar10(folder: Path, content: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (folder / name).write_bytes(content)


ENCODINGS = {"python2": python2_pickle(CIFAR, CIFAR_LABELS),
             **{f"protocol{p}": pickle.dumps(batch(), p) for p in range(2, 6)},
             "text keys": pickle.dumps({"data": CIFAR, "labels": CIFAR_LABELS})}  # fmt: skip


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("folder", [".", "cifar-10-batches-py"])
def test_cifar10(tmp_path, folder, encoding):
    write_cifar10(tmp_path / folder, ENCODINGS[encoding])
    train = data.load("cifar10", root=tmp_path, batch_size=7)
    test = data.load("cifar10", root=tmp_path, batch_size=6, split="test")
    assert (train.dataset.samples, train.classes, test.dataset.samples) == (30, 10, 6)
    x, y = next(test)
    mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
    want = (CIFAR.reshape(6, 3, 32, 32).transpose(0, 2, 3, 1) / 255 - mean) / std
    np.testing.assert_allclose(x, want, rtol=1e-4, atol=1e-5)
    assert y.tolist() == CIFAR_LABELS
    assert same(next(data.load(str(tmp_path / folder), batch_size=7)), next(train))


def test_cifar100(tmp_path):
    content = {**batch(labels=[99, 0, 5, 50, 7, 8], key=b"fine_labels"), b"coarse_labels": [0] * 6}
    for name in ("train", "test"):
        (tmp_path / name).write_bytes(pickle.dumps(content, 2))
    loader = data.load("cifar100", root=tmp_path, batch_size=6, split="test")
    assert loader.classes == 100
    assert next(loader)[1].tolist() == [99, 0, 5, 50, 7, 8]


@pytest.mark.few(1)
@pytest.mark.parametrize("protocol", range(2, 6))
@given(value=st.recursive(
    st.none() | st.booleans() | st.integers(-2**70, 2**70) | st.text() | st.binary() | st.floats(allow_nan=False),
    lambda part: st.lists(part) | st.tuples(part, part, part, part) | st.dictionaries(st.text() | st.binary(), part),
    max_leaves=20))  # fmt: skip
@settings(deadline=None, max_examples=drawn(60))
def test_plain_values_read_as_pickle_reads_them(protocol, value):
    if protocol == 2 and b"" in _leaves(value):
        return  # protocol 2 makes it by calling a builtin, which no CIFAR file does
    got = pickles.read(pickle.dumps(value, protocol))
    assert got == value
    assert repr(got) == repr(value)


def _leaves(value):
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


@pytest.mark.parametrize("dtype", ["u1", "<i8", ">i4", "<f4", ">f8", "<u2"])
@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("order", "CF")
def test_arrays_read_as_pickle_reads_them(dtype, protocol, order):
    array = np.array(np.arange(12).reshape(3, 4), dtype, order=order)
    got = pickles.read(pickle.dumps({"a": array}, protocol))["a"]
    np.testing.assert_array_equal(got, array)
    assert got.dtype == array.dtype


class Payload:
    """Runs `call(*arguments)` where it is unpickled."""

    def __init__(self, call, *arguments):
        self.reduced = call, arguments

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("where", ["alone", "data", "labels", "filenames", "key", "unused"])
@pytest.mark.parametrize("protocol", range(6))
def test_a_hostile_pickle_executes_nothing(tmp_path, where, protocol):
    mark = tmp_path / "executed"
    payload = Payload(os.system, f"touch {mark}")
    content = {"alone": payload, "data": {**batch(), b"data": payload}, "labels": {**batch(), b"labels": [payload]},
               "filenames": {**batch(), b"filenames": payload}, "key": {**batch(), payload: 1},
               "unused": [batch(), payload]}[where]  # fmt: skip
    hostile = pickle.dumps(content, protocol)
    write_cifar10(tmp_path / "c", hostile)
    refused("data_batch_1", "system", "nothing is executed", act=lambda: data.load(tmp_path / "c", batch_size=4))
    assert not mark.exists()
    if where != "key":
        pickle.loads(hostile)  # the payload is a real one
        assert mark.exists()


def op(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


HOSTILE = {
    "eval": op(b"cbuiltins\neval\n", b"X\x03\0\0\x001+1\x85R"),
    "nested name": b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.dumps\x93.",
    "numpy's own loader": op(b"cnumpy\nload\nX\x01\0\0\0x\x85R"),
    "instance": b"(ios\nsystem\n.",
    "object": b"(cos\nsystem\no.",
    "new object": op(b"cnumpy\ndtype\n)\x81"),
    "persistent": op(b"X\x01\0\0\0aQ"),
    "extension": op(b"\x82\x01"),
    "object array": op(b"cnumpy\ndtype\nX\x02\0\0\0O8\x89\x88\x87R"),
    "call of a value": op(b"X\x01\0\0\0a)R"),
    "build on a dict": op(b"}}b"),
    "empty stack": op(b"R"),
    "no mark": op(b"]e"),
    "takes below a mark": op(b"K\x01K\x02(\x86"),
    "unknown memo": op(b"h\x07"),
    "huge memo": op(b"Nr\xff\xff\xff\xff"),
    "huge bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"abc.",
    "huge bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"abc.",
    "huge frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
    "huge shape": op(b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01\x8a\x08", bytes([255] * 7 + [127]), b"\x85",
                     b"cnumpy\ndtype\nU\x02u1\x85R\x89U\x01atb"),
    "deep key": op(b")" + b"\x85" * 100_000, b"q\x00}h\x00Ns"),
    "equal keys": op(b"}(" + b"".join(b"\x8a\x10" + (i * (2**61 - 1)).to_bytes(16, "little") + b"N"
                                    for i in range(10_000)) + b"u"),
    "buffer": b"\x80\x05\x97.",
    "amplified": op(b"c_codecs\nencode\nq\x00X", struct.pack("<I", 1000), b"a" * 1000, b"X\x06\0\0\0latin1\x86q\x01",
                    b"h\x00h\x01R" * 1000),
    "many opcodes": op(b"]" * 200),
    "empty": b"",
    "no end": b"\x80\x02}",
    "text": b"hello, this is no pickle at all",
    "elf": b"\x7fELF" + bytes(60),
}  # fmt: skip


CULPRITS = {"eval": "builtins.eval", "nested name": "numpy.ndarray.dumps", "numpy's own loader": "numpy.load",
            "instance": "INST", "object": "OBJ", "new object": "NEWOBJ", "persistent": "BINPERSID",
            "extension": "EXT1", "object array": "'O8'", "call of a value": "not callable",
            "build on a dict": "damaged", "takes below a mark": "unexpected MARK", "huge shape": "but has 1",
            "deep key": "more than 1000 tuples", "equal keys": "large numbers", "buffer": "NEXT_BUFFER",
            "amplified": "makes bytes", "many opcodes": "more than 200",
            "huge bytes": "bytes8", "huge bytearray": "bytearray8"}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_and_foreign_pickles(tmp_path, case, monkeypatch):
    monkeypatch.setattr(pickles, "OPCODES", 200 if case == "many opcodes" else pickles.OPCODES)
    file = tmp_path / "data_batch_1"
    file.write_bytes(HOSTILE[case])
    bounded(lambda: refused(str(file), CULPRITS.get(case, ""), act=lambda: formats.read_cifar(file, 10)), 64 << 20)


@pytest.mark.parametrize(("content", "culprit"), [
    ([1, 2], "not a pickled dict"),
    ({b"data": CIFAR}, "labels"),
    ({b"labels": CIFAR_LABELS}, "'data'"),
    (batch(pixels=CIFAR.astype(np.int64)), "'data'"),
    (batch(pixels=CIFAR[:, :-1]), "'data'"),
    (batch(labels=CIFAR_LABELS[:-1]), "list of 6"),
    (batch(pixels=CIFAR[:0], labels=[]), "at least one"),
    (batch(labels=[3, 1, 10, 1, 5, 9]), "sample 2 has label 10"),
    (batch(labels=[3, 1, 4, -1, 5, 9]), "sample 3 has label -1"),
    (batch(labels=[3, 1, 4, 2.0, 5, 9]), "whole number"),
    (batch(labels=[3, 1, 4, 2**80, 5, 9]), "damaged"),
])  # fmt: skip
def test_pickles_that_are_no_cifar(tmp_path, content, culprit):
    write_cifar10(tmp_path, pickle.dumps(batch(), 2))
    bad = tmp_path / "data_batch_3"
    bad.write_bytes(pickle.dumps(content, 4))
    refused(str(bad), culprit, act=lambda: data.load("cifar10", root=tmp_path, batch_size=4))


def test_a_file_larger_than_any_cifar_is_not_read(tmp_path):
    with open(tmp_path / "data_batch_1", "wb") as file:
        file.write(ENCODINGS["python2"])
        file.truncate(300 << 20)  # a hole: it takes no room on the disk
    refused("data_batch_1", "larger", act=lambda: formats.read_cifar(tmp_path / "data_batch_1", 10))


# ---- npz


def split_npz(path: Path, **changes) -> Path:
    rng = np.random.default_rng(2)
    arrays = {"x_train": rng.integers(0, 256, (20, 6, 6), np.uint8), "y_train": np.arange(20) % 4,
              "x_test": rng.integers(0, 256, (5, 6, 6), np.uint8), "y_test": np.arange(5) % 4}  # fmt: skip
    arrays.update(changes)
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize(("keys", "divided"), [
    (("x_train", "y_train", "x_test", "y_test"), False),
    (("train_images", "train_labels", "test_images", "test_labels"), False),
    (("x", "y"), True), (("images", "labels"), True),
])  # fmt: skip
def test_npz(tmp_path, save, keys, divided):
    rng = np.random.default_rng(3)
    x, y = np.asfortranarray(rng.random((25, 6, 4, 3))), np.arange(25, dtype=np.uint8)[:, None] % 3
    parts = (x, y) if divided else (x[:20], y[:20], x[20:], y[20:])
    save(tmp_path / "a.npz", **dict(zip(keys, parts, strict=True)))
    train = data.load(tmp_path / "a.npz", batch_size=20)
    test, raw = (data.load(tmp_path / "a.npz", batch_size=5, split="test", standardize=yes) for yes in (True, False))
    assert (train.dataset.samples, test.dataset.samples, train.classes, train.name) == (20, 5, 3, "a.npz")
    rows = permutation(25, "split", seed=0) if divided else np.arange(25)
    seen = x[rows[:20]]
    want = (x[rows[20:]] - seen.mean((0, 1, 2))) / seen.std((0, 1, 2))
    u, v = next(test)
    np.testing.assert_allclose(u, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(next(raw)[0], x[rows[20:]].astype(np.float32))
    np.testing.assert_array_equal(v, y[rows[20:], 0])
    assert (u.dtype, v.dtype) == (np.float32, np.int64)


@pytest.mark.parametrize(("standardize", "value"), [(True, 0.0), (False, 1.0)])
def test_a_constant_channel_is_standardised_to_0(tmp_path, standardize, value):
    np.savez(tmp_path / "b.npz", x=np.ones((10, 3, 3)), y=np.zeros(10, np.int64))
    x, _ = next(data.load(tmp_path / "b.npz", batch_size=2, standardize=standardize))
    np.testing.assert_array_equal(x, np.full((2, 3, 3, 1), value))


NAN = np.where(np.arange(20)[:, None, None] == 6, np.nan, np.ones((20, 6, 6)))


def images(value: float, others: np.ndarray | float = 1.0) -> np.ndarray:
    """Images of which the sixth has this value."""
    return np.where(np.isnan(NAN), value, np.full((20, 6, 6), others))


@pytest.mark.parametrize(("changes", "culprit"), [
    ({"x_train": np.zeros((20, 36, 2, 2, 2))}, "channels last"),
    ({"x_train": np.zeros((20, 3, 6, 6))}, "these look like channels first: save x.transpose(0, 2, 3, 1)"),
    ({"x_train": images(1e39)}, "its numbers reach 1e+39, which is out of the range of float32"),
    ({"x_train": images(-3e38, 3e38)}, "range of float32"),
    ({"x_train": np.where(np.arange(20)[:, None, None] % 2 == 0, 0, np.full((20, 6, 6), 1e-150))}, "range of float32"),
    ({"x_train": np.zeros((20, 6, 6), np.longdouble)}, "not numbers"),
    ({"x_train": np.zeros((0, 6, 6)), "y_train": np.zeros(0, int)}, "0 samples are too few"),
    ({"x_train": NAN}, "sample 6 of x"), ({"x_train": NAN.astype(np.float16)}, "a number that is not finite"),
    ({"x_train": images(np.inf).astype(np.float16)}, "sample 6 of x holds a number that is not finite"),
    ({"x_train": np.array([Payload(os.system, "touch executed")] * 20, object)}, "never read"),
    ({"x_train": np.array(["a"] * 20)}, "not numbers"),
    ({"x_train": np.zeros(20, [("a", "u1")])}, "not numbers"),
    ({"y_train": np.zeros(20), "y_test": np.zeros(5)}, "whole number"),
    ({"y_train": np.zeros((20, 4), int), "y_test": np.zeros((5, 4), int)}, "whole number"),
    ({"y_train": np.zeros(19, int)}, "(19,)"),
    ({"y_train": np.where(np.arange(20) == 9, -2, 0)}, "sample 9 has label -2"),
    ({"x_test": np.zeros((5, 7, 6))}, "(7, 6, 1)"), ({"y_train": None}, "has no array y_train; name them x_train and"),
])  # fmt: skip
def test_npz_that_does_not_fit(tmp_path, monkeypatch, changes, culprit):
    monkeypatch.chdir(tmp_path)
    path = split_npz(tmp_path / "a.npz", **changes)
    standardize = culprit == "range of float32"  # each number is within it, their deviations or scale are not
    refused("a.npz", culprit, act=lambda: data.load(path, batch_size=4, standardize=standardize))
    assert not (tmp_path / "executed").exists()


def test_npz_labels_against_the_classes_of_a_model(tmp_path):
    path = split_npz(tmp_path / "a.npz", y_train=np.where(np.arange(20) == 11, 7, 0))
    refused("a.npz", "sample 11 has label 7", act=lambda: data.load(path, batch_size=4, classes=4))
    assert data.load(path, batch_size=4).classes == data.load(path, batch_size=4, split="test").classes == 8


def npy(shape: str, content: bytes = bytes(16), descr: str = "'|u1'", version: bytes = b"\x01\x00") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header + content


@pytest.mark.parametrize(("member", "culprit"), [
    (npy("(1000000000000, 8, 8)"), "holds 16"), (npy("(4, 3, 1)"), "holds 16"), (npy("(-4, -4, 1)"), "declares"),
    (npy("(-" * 2000), ""), (npy("-" * 9000 + "1"), ""), (b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31), ""),
    (npy("(2, 2, 2)", descr="'|O'"), "never read"), (npy("__import__('os').system('touch executed')"), ""),
    (npy("(" * 5000), ""), (npy("(4, 2, 2)", version=b"\x03\x00"), "npy version"), (b"no array", ""), (b"", ""),
])  # fmt: skip
def test_arrays_that_lie(tmp_path, monkeypatch, member, culprit):
    """In an archive as in a folder."""
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", member)
        archive.writestr("y.npy", npy("(4,)", bytes(4)))
        archive.extractall(tmp_path / "folder")
    for name in ("x.npz", "folder"):
        bounded(lambda n=name: refused(n, culprit, act=lambda: data.load(tmp_path / n, batch_size=2)), 8 << 20)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(("compression", "packed"), [(zipfile.ZIP_STORED, 2**30), (zipfile.ZIP_DEFLATED, None)])
def test_npz_whose_index_lies_as_its_header_does(tmp_path, compression, packed):
    path, member = tmp_path / "x.npz", npy("(1073741824,)")
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("x.npy", member)
        archive.writestr("y.npy", npy("(4,)", bytes(4)))
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")  # of x.npy: its packed size at 20, its size at 24
    struct.pack_into("<I", content, entry + 24, 2**30 + len(member) - 16)
    if packed is not None:
        struct.pack_into("<I", content, entry + 20, packed)
    path.write_bytes(content)
    bounded(lambda: refused("x.npz", "x.npy: truncated, or compressed more",
                            act=lambda: data.load(path, batch_size=2)), 8 << 20)


def bounded(act, limit: int) -> None:
    """Within `limit` bytes of memory."""
    tracemalloc.start()
    try:
        act()
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def test_a_small_file_that_unpacks_to_much_is_refused_before_it_does(tmp_path):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=np.zeros((4000, 100, 100)), y=np.zeros(4000, np.int64))  # 320 MB
    assert path.stat().st_size < 400_000
    bounded(lambda: refused("x.npz", "compressed more", act=lambda: data.load(path, batch_size=2)), 4 << 20)
    np.savez_compressed(path, x=np.zeros((400, 10, 10)), y=np.zeros(400, np.int64))  # few bytes: packed as it may be
    assert data.load(path, batch_size=2).dataset.samples == 320
    path = tmp_path / "images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(idx(np.zeros((30_000, 32, 32), np.uint8))))
    bounded(lambda: refused(path.name, "compressed more", act=lambda: formats.read_idx(path)), 1 << 20)


def test_an_npz_of_more_than_is_read_is_refused_before_it_is(tmp_path, monkeypatch):
    path = tmp_path / "x.npz"
    x = np.random.default_rng(0).integers(0, 256, (2000, 50, 50), np.uint8)
    np.savez(path, x=x, y=np.zeros(2000, np.int64))
    bounded(lambda: data.load(path, batch_size=2), 2 * x.nbytes + formats.SPARE // 4)
    monkeypatch.setattr(arrays, "LARGEST", 5_000_000)
    bounded(lambda: refused("x.npz", "limit is", act=lambda: data.load(path, batch_size=2)), 1 << 20)


def test_npz_that_is_none(tmp_path):
    for name, content in (("a.npz", b"no zip"), ("b.npz", b""), ("c.npz", pickle.dumps(Payload(os.system, "exit 1")))):
        (tmp_path / name).write_bytes(content)
        refused(name, "damaged", act=lambda n=name: data.load(tmp_path / n, batch_size=2))
    (tmp_path / "d.txt").write_text("hello")
    refused("d.txt", "too few", act=lambda: data.load(tmp_path / "d.txt", batch_size=2))
    (tmp_path / "e").mkdir()
    refused("has none of the files", act=lambda: data.load(tmp_path / "e", batch_size=2))
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", npy("(4, 2, 2)"))
        archive.writestr("y.npy", npy("(4,)", bytes(4)))
    refused("x.npz", "compressed more, or otherwise", act=lambda: data.load(tmp_path / "x.npz", batch_size=2))


# ---- every damage


def whole_files() -> dict[str, bytes]:
    archive = io.BytesIO()
    np.savez_compressed(archive, x=PIXELS, y=LABELS)
    return {"images-idx3-ubyte": idx(PIXELS), "images-idx3-ubyte.gz": gzip.compress(idx(PIXELS), mtime=0),
            "data_batch_1": ENCODINGS["python2"], "test_batch": ENCODINGS["protocol5"],
            "a.npz": archive.getvalue()}


WHOLE = whole_files()


def read_any(path: Path):
    if path.suffix == ".npz":
        return arrays.load_arrays(path, Wanted("train"))
    return formats.read_idx(path) if "idx" in path.name else formats.read_cifar(path, 10)


@pytest.mark.parametrize("name", WHOLE)
@given(draw=st.data())
@settings(deadline=None, max_examples=drawn(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_read_or_refused_in_one_line(tmp_path, name, draw):
    content = bytearray(WHOLE[name])
    for _ in range(draw.draw(st.integers(0, 3))):
        near_an_end = st.integers(0, min(300, len(content) - 1)) | st.integers(-min(300, len(content)), -1)
        content[draw.draw(near_an_end)] = draw.draw(st.integers(0, 255))
    content = content[: draw.draw(st.just(len(content)) | st.integers(0, len(content)))]
    path = tmp_path / name
    path.write_bytes(content)
    if bytes(content) == WHOLE[name]:
        read_any(path)
        return
    line = str(path)
    try:
        read_any(path)
    except DataError as error:  # and nothing else
        line = str(error)
    assert str(path) in line
    assert "\n" not in line


@pytest.mark.few(2)
@pytest.mark.parametrize("name", WHOLE)
def test_a_truncated_file_is_refused_at_every_length(tmp_path, name):
    path, content = tmp_path / name, WHOLE[name]
    path.write_bytes(content)
    read_any(path)
    for size in {*range(200), *range(0, len(content), 331), *range(len(content) - 100, len(content))}:
        path.write_bytes(content[:size])
        refused(name, act=lambda: read_any(path))
