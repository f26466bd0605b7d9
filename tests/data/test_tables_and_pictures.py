"""Tables, arrays, pictures, and functions of one's own: tiny ones of each form, read, trained on, and damaged."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from command_line import refusal, reported, run
from data_checks import TRAIN, archive, everything, refused, same, trained

from minidl import data
from minidl.data import pictures
from minidl.data.loader import fifth

# ---- tables, arrays, functions


def test_a_table_of_numbers(tmp_path, capsys):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 4))
    kinds = np.where(x[:, 0] > 0, "red", "blue")
    lines = ["a,b,species,c,d", *(f"{r[0]},{r[1]},{k},{r[2]},{r[3]}" for r, k in zip(x, kinds, strict=True))]
    path = tmp_path / "own.csv"
    path.write_text("\ufeff" + "\n".join(lines))
    loader = data.load(path, batch_size=60 - 12)
    assert (loader.classes, loader.dataset.shape, loader.dataset.serves) == (2, (4,), ("classification",))
    rows, labels = loader.dataset.rows(np.arange(48))
    np.testing.assert_array_equal(rows, x[fifth(60, "train")].astype(np.float32))
    np.testing.assert_array_equal(labels, kinds[fifth(60, "train")] == "red")
    run = ["--model", "mlp", "--model-arg", "hidden=8", "--batch-size", "16", "--data", str(path)]
    run = ["train", "--costs", "analytic", *run, "--epochs", "30"]
    assert reported(capsys, *run)["accuracy"] > 0.8
    path.write_text("\n".join(["a,y", *(f"{v},{v / 20 + 0.5}" for v in range(40))]))
    found = reported(capsys, *run, "--lr", "0.05", "--standardize")
    assert (found["objective"], found["accuracy"]) == ("regression", None)
    assert found["test"]["loss"] < 0.9 * found["loss_first"]


@pytest.mark.parametrize(("content", "culprit"), [
    ("", "empty"), ("1,2\n3,4\n", "must name the columns"), ("a,b\n1,2\n1,2,3\n", "line 3: has 3 columns"),
    ("a,label\nx,1\n", "line 2, column a: 'x' is not a finite number"), ("a,b\n1,\n", "line 2: the label is empty"),
    ("a,b\nnan,1\n", "column a"), ("a\n1\n", "two columns"),
    ("5.1,3.5,setosa\n4.9,3,setosa\n7,3.2,virginica\n", "must name the columns; it has values"),
    ("setosa,5.1\nsetosa,3\n", "must name the columns"),
])
def test_a_table_of_numbers_that_does_not_fit(tmp_path, content, culprit):
    (tmp_path / "t.csv").write_text(content)
    refused("t.csv", culprit, act=lambda: data.load(tmp_path / "t.csv", batch_size=1))


def test_arrays_of_tokens_and_of_several_numbers_to_predict(tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((20, 3))
    np.savez(tmp_path / "r.npz", x_train=x, y_train=x[:, :2], x_test=x[:5], y_test=x[:5, :2])
    r = data.load(tmp_path / "r.npz", batch_size=5, split="test")
    assert (r.dataset.serves, r.dataset.samples, r.classes) == (("regression",), 5, 2)
    for name in ("x", "y"):
        np.save(tmp_path / f"{name}.npy", rng.integers(0, 9, (20, 6)))
    monkeypatch.chdir(tmp_path)
    t = data.load(".", batch_size=4)
    assert (t.name, t.dataset.serves, t.dataset.shape) == (tmp_path.name, ("next_token",), (6,))
    np.savez(tmp_path / "t.npz", x_train=np.full((4, 2), 3), y_train=[0, 1, 0, 1], x_test=[[5, 0]], y_test=[1])
    parts = [data.load(tmp_path / "t.npz", batch_size=1, split=split).dataset for split in ("train", "test")]
    assert [part.vocabulary for part in parts] == [6, 6]  # the network must know the tokens of both
    refused("a sample has no numbers", act=lambda: data.from_arrays("own", np.zeros((20, 0)), np.zeros(20)))
    refused("20", act=lambda: data.from_arrays("own", x, np.zeros(19)))
    y = np.arange(20) % 2
    for masked in ((np.ma.masked_greater(x, x.min()), y), (x, np.ma.masked_equal(y, 1))):
        refused("some elements are masked; fill them first", act=lambda pair=masked: data.from_arrays("own", *pair))
    assert data.from_arrays("own", np.ma.array(x), np.ma.array(y)).samples


OWN = '''
import numpy as np
from minidl import data

def batches(split, seed):
    rng = np.random.default_rng(seed + (split == "test"))
    for _ in range(5):
        x = rng.standard_normal((8, 8, 8, 1))
        yield x, (x.mean((1, 2, 3)) > 0).astype(int)

def arrays():
    x = np.arange(40.0).reshape(20, 2)
    return x, np.arange(20) % 3

def lazy(split):
    def rows(i):
        x = i[:, None].astype("float32")
        return x, x * x
    return data.Dataset("squares", 10, (1,), 1, rows, ("regression",))

def broken():
    yield np.zeros((2, 2)), np.zeros(2, int)
    raise RuntimeError("no more")

def number():
    return 3

def rows(split):
    def rows(i):
        if 9 in i:
            raise KeyError("a sample\\nis missing")
        return np.zeros((len(i), 2 + (8 in i)), np.float32), np.arange(len(i) + (7 in i)) % 2
    return data.Dataset("rows", 10, (2,), 2, rows)
'''


def test_functions_of_ones_own(tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    made = data.load(f"{file}:batches", batch_size=8, seed=3)
    assert (made.dataset.samples, made.dataset.shape, made.classes) == (40, (8, 8, 1), 2)
    assert data.load(f"{file}:batches", batch_size=8, seed=3, split="test").dataset.samples == 40
    assert data.load(f"{file}:arrays", batch_size=8).dataset.samples == 16
    lazy = data.load(f"{file}:lazy", batch_size=2)
    assert (lazy.name, lazy.dataset.slow) == ("squares", True)  # its rows are read ahead
    refused("broken", "batch 1", "RuntimeError: no more", act=lambda: data.load(f"{file}:broken", batch_size=1))
    refused("number", "returned int", act=lambda: data.load(f"{file}:number", batch_size=1))
    for sample, says in ((9, "KeyError: 'a sample"), (8, "are x (1, 3) and y (1,); x must be (1, 2)"),
                         (7, "are x (1, 2) and y (2,)")):
        loader = data.load(f"{file}:rows", batch_size=1, split="test")
        loader.restore({"position": sample})
        refused("own.py:rows: ", says, act=lambda read=loader: next(read))
    refused("no function none", act=lambda: data.load(f"{file}:none", batch_size=1))
    refused("no such file", act=lambda: data.load("nothere.py:f", batch_size=1))
    trained(capsys, "--model", "mlp", "--data", f"{file}:batches", "--batch-size", "8")
    trained(capsys, "--model", "mlp", "--data", f"{file}:lazy", "--batch-size", "2", "--lr", "0.001")


ENDLESS = '''
import numpy as np

def numbered(rows=3):
    """Batch i has the samples 3 i, 3 i + 1, 3 i + 2: x is the sample's number, y its parity."""
    i = 0
    while True:
        n = np.arange(i, i + rows)
        yield np.stack([n, n % 2], 1).astype(np.float64), n % 2
        i += rows

def split(split):
    for i, batch in enumerate(numbered()):
        if split == "test" and i == 4:
            return
        yield batch

def fails():
    for i, batch in enumerate(numbered()):
        if i == 130:
            raise KeyError("no more")
        yield batch

def grows():
    for i, (x, y) in enumerate(numbered()):
        yield (x, y) if i < 130 else (x[:, :1], y)

def twice():
    for i, batch in zip(range(150), numbered()):
        yield batch
'''


def test_a_function_may_give_batches_without_end(tmp_path, capsys, monkeypatch):
    """In their order, as batches of another size, on all layouts of ranks, and from any place on."""
    monkeypatch.setattr(data.own, "MOST_BATCHES", 120)
    file = tmp_path / "own.py"
    file.write_text(ENDLESS)
    for name, first in (("numbered", 300), ("split", 0), ("twice", 300)):
        loader = data.load(f"{file}:{name}", batch_size=8)
        numbers = np.concatenate([next(loader)[0][:, 0] for _ in range(15)])
        assert numbers.tolist() == [n if name != "twice" or n < 450 else n - 150 for n in range(first, first + 120)]
        assert (loader.classes, loader.epoch, loader.ended, loader.dataset.shape) == (2, 0, False, (2,))
        halves = [data.load(f"{file}:{name}", batch_size=8).shard(rank, 2) for rank in (0, 1)]
        halves += [halves[1].shard(1, 2)]
        late = data.load(f"{file}:{name}", batch_size=8)
        late.restore({"position": 80})
        np.testing.assert_array_equal(next(late)[0][:, 0], numbers[80:88])
        late.restore({"position": 8})
        np.testing.assert_array_equal(next(late)[1], numbers[8:16] % 2)
        for _ in range(2):
            rows = np.concatenate([next(half)[0][:, 0] for half in halves[:2]])
        np.testing.assert_array_equal(rows, numbers[8:16])
        tests = data.load(f"{file}:{name}", batch_size=4, split="test")
        assert tests.dataset.samples == (12 if name == "split" else 300)
        assert next(tests)[0][:, 0].tolist() == [0, 1, 2, 3]
    flags = ["--model", "mlp", "--data", f"{file}:numbered", "--batch-size", "8", "--lr", "0.001", "--log-every", "1"]
    assert "step 2 of 2: loss" in run(capsys, *TRAIN, *flags)[2]
    said = refusal(capsys, "train", *flags, "--epochs", "1")
    assert "own.py:numbered: its batches have no end, so there is no epoch" in said
    assert "scale them in the function" in refusal(capsys, *TRAIN, *flags, "--standardize")
    for name, says in (("fails", "KeyError: 'no more' (own.py, line "), ("grows", "batch 130 has samples of shape")):
        loader = data.load(f"{file}:{name}", batch_size=100)
        refused(f"own.py:{name}", says, act=lambda read=loader: next(read))


def test_batches_that_take_long_to_read_are_told_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(data.own, "MOST_BATCHES", 120)
    (tmp_path / "own.py").write_text(ENDLESS)
    for patience, least in ((0.0, 100), (60.0, 0)):
        monkeypatch.setattr(data.own, "PATIENCE", patience)
        said = []
        data.load(f"{tmp_path}/own.py:numbered", batch_size=8, note=said.append)
        told = [line for line in said if "its batches are read to their end before training begins" in line]
        assert len(told) >= least
        assert bool(told) == bool(least)
        assert not told or told[-1].endswith("or to the first 120, or 1 GiB: 121 so far")


# ---- pictures


def jpeg(color, size=(20, 14)):
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.new("RGB", size, color).save(out, "JPEG")
    return out.getvalue()


@pytest.fixture
def imagenet(tmp_path):
    for part, count in (("train", 6), ("val", 3)):
        for name, color in (("n01", (250, 0, 0)), ("n02", (0, 0, 250))):
            folder = tmp_path / "imagenet" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                (folder / f"{name}_{i}.JPEG").write_bytes(jpeg(color, (20 + i, 14)))
    return tmp_path


def test_folders_of_classes(imagenet):
    loader = data.load("imagenet", root=imagenet, batch_size=4, image_size=8, workers=0)
    assert (loader.dataset.samples, loader.classes, loader.dataset.shape) == (12, 2, (8, 8, 3))
    x, y = everything(loader)
    assert x.shape == (12, 8, 8, 3)
    assert (x[..., 0] > x[..., 2]).all(axis=(1, 2)).tolist() == (y == 0).tolist()
    test = data.load(imagenet / "imagenet", batch_size=4, image_size=8, split="test", workers=0)
    assert same(everything(test), everything(test))
    assert everything(test)[1].tolist() == [0, 0, 0, 1, 1, 1]
    gray = data.load(imagenet / "imagenet", batch_size=4, image_size=8, channels=1, workers=0)
    assert next(gray)[0].shape == (4, 8, 8, 1)
    flat = data.load(imagenet / "imagenet" / "val", batch_size=2, image_size=8, split="test", workers=0)
    assert flat.dataset.samples == 1  # a fifth


def test_workers_and_ranks_and_resuming_see_the_same_crops(imagenet):
    noise = np.random.default_rng(0).integers(0, 256, (40, 30, 3), np.uint8)
    image = pytest.importorskip("PIL.Image")
    for file in (imagenet / "imagenet" / "train").rglob("*.JPEG"):
        image.fromarray(noise).save(file)
    options = {"root": imagenet, "batch_size": 6, "image_size": 8, "seed": 5}
    one = data.load("imagenet", workers=0, **options)
    batches = [next(one) for _ in range(4)]
    assert not np.array_equal(batches[0][0][0], batches[0][0][1])  # each its own crop
    many = data.load("imagenet", workers=2, **options)
    assert all(same(next(many), batch) for batch in batches)
    halves = [one.shard(rank, 2) for rank in range(2)]
    for half in halves:
        half.restore({"position": 18})
    assert same(batches[3], [np.concatenate(column) for column in zip(*map(next, halves), strict=True)])


def test_a_class_has_one_number_in_both_parts(imagenet):
    """Whatever lies beside the folders of classes."""
    root = imagenet / "imagenet"
    for name in ("labels.csv", "n01.txt", "n015", "Thumbs.db"):
        (root / "train" / name).write_text("notes") if name != "n015" else (root / "train" / name).symlink_to("n02")
    (root / "val" / "n00.txt").write_text("notes")
    found = {split: data.load(root, batch_size=1, image_size=8, workers=0, split=split) for split in ("train", "test")}
    assert {loader.classes for loader in found.values()} == {3}
    assert everything(found["test"])[1].tolist() == [0] * 3 + [2] * 3


def test_pictures_in_folders_within_a_class(imagenet):
    """As Tiny ImageNet has them, beside lists of words."""
    root = imagenet / "imagenet"
    wanted = everything(data.load(root, batch_size=1, image_size=8, workers=0))
    for folder in [*root.glob("*/n0?")]:
        inner = folder / "images"
        inner.mkdir()
        for file in folder.glob("*.JPEG"):
            file.rename(inner / file.name)
        (inner / f"._{file.name}").write_bytes(b"a note of macOS")
        (folder / ".ipynb_checkpoints").mkdir()
        (folder / ".ipynb_checkpoints" / "a.jpg").write_bytes(jpeg("red"))
    (root / "words.txt").write_text("n01\tred\n" * 99)
    for path in (root, root / "train"):
        found = data.load(path, batch_size=1, image_size=8, workers=0)
        assert found.samples == (12 if path == root else 10)
    assert same(everything(data.load(root, batch_size=1, image_size=8, workers=0)), wanted)


@pytest.mark.parametrize("suffix", ["pgm", "tif", "TIFF", "ppm", "bmp", "Png", "webp", "GIF"])
def test_pictures_may_end_as_in_torchvision(tmp_path, suffix):
    image = pytest.importorskip("PIL.Image")
    for i in range(10):
        folder = tmp_path / f"class {i % 2}"
        folder.mkdir(exist_ok=True)
        image.new("L", (9, 9), 20 * i).save(folder / f"{i}.{suffix}")
    assert data.load(tmp_path, batch_size=1, image_size=8, channels=1, workers=0).samples == 8


@pytest.mark.parametrize(("cores", "workers"), [({3}, 1), ({0, 2}, 1), ({*range(8, 16)}, 7)])
def test_workers_are_one_for_each_core_of_the_process_but_one(imagenet, monkeypatch, cores, workers):
    """Not of the machine: a batch system gives a job some of them."""
    asked: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda of: cores)
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(pictures, "_pool", lambda count: asked.append(count) or pool)
        data.load("imagenet", root=imagenet, batch_size=4, image_size=8).read(0)
        data.load("imagenet", root=imagenet, batch_size=4, image_size=8, workers=5).read(0)
    assert {*asked} == {workers, 5}


def test_a_worker_that_was_killed_is_one_line_and_the_next_batch_has_others(imagenet):
    loader = data.load("imagenet", root=imagenet, batch_size=4, image_size=8, workers=1)
    whole = loader.read(0)[0]
    for process in pictures._pool(1)._processes.values():
        process.kill()
        process.join()
    with pytest.raises(data.DataError, match="a worker process that decodes pictures has ended"):
        loader.read(1)
    assert (loader.read(0)[0] == whole).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["a file", "standard input"])
def test_a_script_without_a_guard_gets_pictures_from_workers(imagenet, way):
    """A process that `spawn` starts would run the script once more."""
    script = imagenet / "script.py"
    script.write_text("from minidl import data\nprint('begins')\n"
                      f"loader = data.load({str(imagenet / 'imagenet')!r}, batch_size=6, image_size=8, workers=1)\n"
                      "print(next(loader)[0].shape)\n")
    with script.open() as content:
        found = subprocess.run([sys.executable, *([str(script)] if way == "a file" else ["-"])], stdin=content,
                               capture_output=True, text=True, check=False, timeout=120)
    assert (found.stdout, found.stderr) == ("begins\n(6, 8, 8, 3)\n", "")


def test_shards(tmp_path):
    members = {}
    for i in range(4):
        members |= {f"{i}.jpg": jpeg((250, 0, 0) if i % 2 else (0, 0, 250)), f"{i}.cls": f"{i % 2}".encode()}
    archive(tmp_path / "train-0.tar", members)
    archive(tmp_path / "train-1.tar", members)
    archive(tmp_path / "validation-0.tar", members)
    loader = data.load(tmp_path, batch_size=8, image_size=6, workers=0)
    assert data.load(tmp_path, batch_size=8, split="test", workers=0).dataset.samples == 4
    (tmp_path / "validation-0.tar").rename(tmp_path / "test-0.tar")
    archive(tmp_path / "contest-train-0.tar", members)  # a word ends with "test"
    assert data.load(tmp_path, batch_size=8, workers=0).dataset.samples == 12
    assert data.load(tmp_path, batch_size=8, split="test", workers=0).dataset.samples == 4
    (tmp_path / "contest-train-0.tar").unlink()
    x, y = next(loader)
    assert (x[:, 0, 0, 0] > x[:, 0, 0, 2]).tolist() == (y == 1).tolist()
    content = (tmp_path / "train-1.tar").read_bytes()
    (tmp_path / "train-1.tar").write_bytes(content[:2000])
    refused("train-1.tar", "truncated", act=lambda: data.load(tmp_path, batch_size=8, image_size=6, workers=0))
    archive(tmp_path / "train-1.tar", {"a.jpg": members["0.jpg"]})
    refused("train-1.tar", "a has no class", act=lambda: data.load(tmp_path, batch_size=8, image_size=6, workers=0))


def test_archives_of_classes(tmp_path):
    folder = tmp_path / "train"
    folder.mkdir()
    for i, name in enumerate(("n01", "n02")):
        archive(folder / f"{name}.tar", {f"{name}_{j}.JPEG": jpeg((9, 250 * i, 9)) for j in range(5)})
    loader = data.load(tmp_path, batch_size=4, image_size=6, workers=0)
    assert (loader.dataset.samples, loader.classes) == (8, 2)  # the others are the test part


def test_pictures_that_cannot_be_used(imagenet):
    root = imagenet / "imagenet"

    def act(split="train", workers=0):
        return everything(data.load(root, batch_size=2, image_size=8, split=split, workers=workers))

    bad = root / "train" / "n01" / "n01_2.JPEG"
    whole_one = bad.read_bytes()
    for content in (whole_one[: len(whole_one) // 2], b"", b"no picture"):
        bad.write_bytes(content)
        for workers in (0, 1):
            refused("n01_2.JPEG", "not a picture, or damaged", act=lambda w=workers: act(workers=w))
    bad.write_bytes(whole_one)
    (root / "val" / "n03").mkdir()
    refused("n03", "training part does not have", act=lambda: act("test"))
    (root / "train" / "n03").mkdir()
    refused("n03", "without pictures", act=act)
    (root / "train" / "n03").rmdir()
    (root / "train" / "loose.jpg").write_bytes(whole_one)
    refused("loose.jpg", "folder of its class", act=act)


def test_pictures_train_a_network(imagenet, capsys):
    argv = ["--model", "resnet20", "--model-arg", "preset=tiny", "--batch-size", "4", "--workers", "0", "--root",
            str(imagenet)]
    assert trained(capsys, *argv, "--data", "imagenet")["data"] == "imagenet"
