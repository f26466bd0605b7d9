"""Data: order and places, ranks, resizing, embedded and generated sets, names and missing files."""

from __future__ import annotations

import gzip
import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
from data_checks import refused, same
from helpers import drawn, need, python
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl import data
from minidl.data import dataset
from minidl.data.loader import permutation


def counting(samples: int) -> data.Dataset:
    """A set whose sample i is the number i."""
    return data.Dataset("counting", samples, (), samples, lambda i: (i.astype(np.float32), i))


# ---- order, places, ranks


@given(samples=st.integers(1, 200), batch=st.integers(1, 50), seed=st.integers(0, 2**64 - 1), epochs=st.integers(1, 4))
@settings(deadline=None)
def test_a_training_epoch_holds_every_sample_once(samples, batch, seed, epochs):
    """All batches are of one size, and an epoch ends in the first batch with which all its samples have come."""
    if batch > samples:
        refused("counting", str(samples), act=lambda: data.Loader(counting(samples), batch, seed=seed))
        return
    loader, seen = data.Loader(counting(samples), batch, seed=seed), []
    for epoch in range(epochs):
        for _, y in loader:
            assert loader.ended == (loader.epoch == epoch + 1)
            assert len(y) == batch
            seen.append(y)
        assert loader.ended
        assert loader.epoch == epoch + 1
        assert len(seen) == loader.steps(epoch + 1)
        assert (len(seen) - 1) * batch < (epoch + 1) * samples <= len(seen) * batch
    order = np.concatenate(seen)
    for epoch in range(epochs):
        assert sorted(order[epoch * samples : (epoch + 1) * samples]) == list(range(samples))
    assert loader.state() == {"position": len(order)}
    assert loader.position == len(order)


@given(samples=st.integers(1, 200), batch=st.integers(1, 50))
@settings(deadline=None)
def test_evaluation_keeps_order_and_every_sample(samples, batch):
    loader = data.Loader(counting(samples), batch, training=False)
    for _ in range(2):
        seen = [y for _, y in loader]
        assert len(seen) == loader.steps()
        assert loader.ended
        np.testing.assert_array_equal(np.concatenate(seen), np.arange(samples))


def test_orders_differ_by_purpose_seed_and_epoch_and_never_change():
    orders = [permutation(50, purpose, epoch, seed=seed)
              for purpose in ("order", "split") for seed in (0, 1, 2**32, 2**40) for epoch in range(3)]  # fmt: skip
    assert len({order.tobytes() for order in orders}) == 24
    np.testing.assert_array_equal(np.sort(orders[4]), np.arange(50))
    assert permutation(50, "order", seed=0).tobytes() != orders[0].tobytes()  # a place of its own
    assert permutation(8, "order", 2, seed=1).tolist() == [3, 6, 7, 0, 5, 4, 1, 2]  # saved places rely on it


def test_a_loader_goes_through_the_order_of_its_epoch():
    loader = data.Loader(counting(20), 5, seed=3)
    got = np.concatenate([next(loader)[1] for _ in range(8)])
    np.testing.assert_array_equal(got, np.concatenate([permutation(20, "order", epoch, seed=3) for epoch in (0, 1)]))


@given(batches=st.integers(1, 8), rest=st.integers(0, 11), seed=st.integers(0, 99), random=st.booleans(),
       slow=st.booleans(), parts=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1, 2, 3, 4, 6])), max_size=5))
@settings(deadline=None, max_examples=drawn(60))
def test_however_often_a_run_resumes_on_other_ranks_each_sample_comes_once_an_epoch(batches, rest, seed, random, slow,
                                                                                   parts):
    """Parts of a run: steps, and on how many ranks. Also where rows are read ahead, and made by random choices, which
    are those of the sample in this epoch. Where batches do not fill an epoch, one holds the start of the next."""
    samples, rows = 12 * batches + rest, (lambda i, n: (n, i)) if random else (lambda i: (i, i))
    found = data.Dataset("found", samples, (), samples, rows, random=random, slow=slow)
    whole = data.Loader(data.Dataset("whole", samples, (), samples, rows, random=random), 12, seed=seed)
    place, seen = whole.state(), []
    for steps, ranks in [*parts, (batches + 1, 1)]:
        one = data.Loader(found, 12, seed=seed)
        one.restore(place)
        own = [one.shard(rank, ranks) for rank in range(ranks)]
        for _ in range(steps):
            x, y = (np.concatenate(column) for column in zip(*map(next, own), strict=True))
            assert same((x, y), next(whole))
            seen.append(y)
        place = own[-1].state()
        assert {part.steps() for part in own} == {one.steps()}
        assert all(part.state() == place for part in own)
        assert all(type(value) is int for value in place.values())
    order = np.concatenate(seen)
    for epoch in range(len(order) // samples):
        assert sorted(order[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


def test_a_batch_that_ranks_cannot_share_is_refused():
    refused("batch of 10", "4 ranks", act=lambda: data.Loader(counting(40), 10).shard(0, 4))
    refused("batch of 3", "2 ranks", act=lambda: data.Loader(counting(43), 10, training=False).shard(0, 2))
    assert data.Loader(counting(44), 10, training=False).shard(1, 2).steps() == 5
    for rank, ranks in ((2, 2), (-1, 2), (0, 0), (0.5, 2)):
        refused("rank", act=lambda r=rank, n=ranks: data.Loader(counting(40), 4).shard(r, n))


def test_for_is_one_epoch_from_its_start_and_next_is_endless():
    loader = data.Loader(counting(12), 4, seed=1)
    first = next(loader)
    epoch = list(loader)
    assert len(epoch) == 3
    assert same(epoch[0], first)
    other = list(loader)
    assert loader.epoch == 2
    assert not all(same(a, b) for a, b in zip(epoch, other, strict=True))
    for _ in loader:
        break
    assert loader.state() == {"position": 28}
    assert len(list(itertools.islice(iter(lambda: next(loader), None), 20))) == 20


def test_a_place_that_is_none_is_refused_and_changes_nothing():
    loader = data.Loader(counting(12), 4)
    next(loader)
    for state in ({}, {"epoch": 0}, {"position": -4}, {"position": 2}, {"position": 4.0}, {"position": 2**64}):
        refused("place", act=lambda s=state: loader.restore(s))
        assert loader.state() == {"position": 4}
    judging = data.Loader(counting(10), 4, training=False)
    for position in (4, 8, 10, 14):
        judging.restore({"position": position})
    refused("place", act=lambda: judging.restore({"position": 12}))


@pytest.mark.parametrize(("options", "culprit"), [
    ({"batch_size": 0}, "batch size"), ({"batch_size": 2.5}, "batch size"), ({"batch_size": True}, "batch size"),
    ({"batch_size": 2000}, "1438 samples"), ({"seed": -1}, "seed"), ({"seed": 2**64}, "seed"), ({"seed": "a"}, "seed"),
    ({"split": "valid"}, "valid"), ({"dtype": "int8"}, "int8"), ({"dtype": "bf16"}, "bf16"),
    ({"image_size": 0}, "image_size"),
    ({"workers": -1}, "workers is -1; it must be a whole number >= 0"), ({"workers": "2"}, "workers is '2'"),
    ({"channels": 1.5}, "channels"), ({"classes": -3}, "classes"), ({"sequence_length": 4}, "images, not tokens"),
])  # fmt: skip
def test_arguments_that_do_not_fit(options, culprit):
    refused(culprit, act=lambda: data.load("digits", **{"batch_size": 8, **options}))


# ---- digits, resizing


def test_digits():
    train, test = data.digits(64), data.digits(64, split="test")
    x, y = next(train)
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((64, 8, 8, 1), np.float32, (64,), np.int64)
    assert (train.name, train.classes, train.steps()) == ("digits", 10, 23)
    assert (train.dataset.samples, test.dataset.samples) == (1438, 359)
    seen = train.dataset.rows(np.arange(1438))[0]
    assert abs(seen.mean()) < 1e-4
    assert abs(seen.std() - 1) < 1e-4
    assert [len(y) for _, y in test] == [64] * 5 + [39]
    assert set(np.concatenate([y for _, y in test]).tolist()) == set(range(10))


def test_the_split_of_the_digits_is_the_embedded_file_whatever_the_seed():
    with gzip.open(Path(dataset.__file__).parent / "optdigits.csv.gz", "rt") as file:
        stored = sorted(tuple(map(int, line.split(","))) for line in file)
    rows = []
    for split in ("train", "test"):
        images, labels = zip(*data.load("digits", batch_size=1, split=split, seed=5), strict=True)
        rows.append(np.concatenate([np.concatenate(images).reshape(-1, 64), np.concatenate(labels)[:, None]], 1))
    both = np.concatenate(rows)
    pixels = both[:, :64] - both[:, :64].min()
    pixels = np.rint(pixels / pixels.max() * 16).astype(int)
    assert sorted(zip(*pixels.T.tolist(), both[:, 64].astype(int).tolist(), strict=True)) == stored
    one, other = (data.load("digits", batch_size=359, split="test", seed=seed) for seed in (0, 7))
    assert same(next(one), next(other))


def test_batches_are_fresh_arrays():
    loader = data.digits(8, split="test")
    x, y = next(loader)
    kept = x.copy(), y.copy()
    x[:], y[:] = 99, 99
    loader.restore({"position": 0})
    assert same(next(loader), kept)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_precision_sees_the_same_numbers(dtype):
    x, _ = next(data.digits(16, dtype=dtype))
    assert x.dtype == dtype
    np.testing.assert_array_equal(x, next(data.digits(16))[0].astype(dtype))


def test_a_label_that_the_model_does_not_know_is_named():
    line = refused("digits", "5 classes", act=lambda: data.load("digits", batch_size=4, classes=5))
    assert "sample 5 has label 5" in line  # the file starts 0 1 2 3 4 5
    assert data.load("digits", batch_size=4, classes=12).classes == 12


@given(height=st.integers(1, 9), width=st.integers(1, 9), size=st.integers(1, 12), channels=st.integers(1, 4))
@settings(deadline=None)
def test_adapt_against_torch(height, width, size, channels):
    torch = need("torch")
    x = np.random.default_rng(height * 10 + width).standard_normal((2, height, width, 3), np.float32)
    got = data.adapt(x, size, channels)
    want = torch.nn.functional.interpolate(torch.from_numpy(x).permute(0, 3, 1, 2), (size, size), mode="bilinear")
    want = want.permute(0, 2, 3, 1).numpy()
    want = want.mean(3, keepdims=True) if channels == 1 else want[..., np.arange(channels) % 3]
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert got.dtype == np.float32


def test_adapt_changes_nothing_needlessly():
    x = np.arange(2 * 3 * 3, dtype=np.float64).reshape(2, 3, 3, 1)
    assert data.adapt(x, None, None) is x
    assert data.adapt(x, 3, 1) is x
    assert data.adapt(x.astype(np.uint8), 6, 2).dtype == np.float32
    np.testing.assert_array_equal(data.adapt(x, None, 3), np.repeat(x, 3, 3))
    ones = data.adapt(np.ones((1, 5, 5, 1), np.float32), 7, 3)
    np.testing.assert_array_equal(ones, np.ones((1, 7, 7, 3), np.float32))


def test_resized_batches_say_so_and_hold_the_same_bits_prepared_or_not(monkeypatch):
    notes: list[str] = []

    def loader():
        return data.load("digits", batch_size=12, image_size=28, channels=3, seed=2, note=notes.append)

    prepared = loader()
    assert notes == ["digits: images of 8x8x1 are resized and repeated to 28x28x3"]
    assert prepared.dataset.shape == (28, 28, 3)
    monkeypatch.setattr(dataset, "PREPARED_BYTES", 0)
    per_batch = loader()
    parts = [per_batch.shard(rank, 3) for rank in range(3)]
    for _ in range(3):
        x, y = next(prepared)
        assert x.shape == (12, 28, 28, 3)
        assert same((x, y), next(per_batch))
        assert same((x, y), [np.concatenate(columns) for columns in zip(*map(next, parts), strict=True)])


def test_the_line_goes_to_stderr_once():
    code = ("from minidl import data\nfor _ in range(3):\n    data.load('digits', batch_size=4, image_size=4)\n"
            "    data.load('digits', batch_size=4, image_size=6)")  # fmt: skip
    run = python("-c", code)
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""
    assert len(run.stderr.splitlines()) == 2
    assert "are resized and repeated to 4x4x1" in run.stderr


def test_numpy_is_enough():
    code = ("import sys\nfor name in ('torch', 'numba', 'cupy', 'mpi4py', 'rich'): sys.modules[name] = None\n"
            "from minidl import data\nnext(data.digits())")  # fmt: skip
    assert python("-c", code).stderr == ""


# ---- generated data and text


@pytest.mark.parametrize(("size", "channels", "classes"), [(8, 1, 2), (17, 3, 10), (8, 2, 251)])
def test_synthetic_images(size, channels, classes):
    options = {"batch_size": 256, "image_size": size, "channels": channels, "classes": classes}
    train, test = (data.load("synthetic", split=split, **options) for split in ("train", "test"))
    x, y = train.dataset.rows(np.arange(4096))
    u, v = next(test)
    assert (x.shape, x.dtype, y.dtype) == ((4096, size, size, channels), np.float32, np.int64)
    assert set(y.tolist()) == set(range(classes))
    assert same((x, y), data.load("synthetic", **options).dataset.rows(np.arange(4096)))
    assert not same((x,), (data.load("synthetic", seed=1, **options).dataset.rows(np.arange(4096))[0],))
    assert min(len(np.unique(x[y == label].reshape(-1, size * size * channels), axis=0)) for label in (0, 1)) > 10
    means = np.stack([x[y == label].mean(0).ravel() for label in range(classes)])
    distances = (u.reshape(len(u), -1) ** 2).sum(1)[:, None] - 2 * u.reshape(len(u), -1) @ means.T + (means**2).sum(1)
    assert (distances.argmin(1) == v).mean() > 0.8


def test_synthetic_tokens():
    train = data.load("synthetic", batch_size=64, sequence_length=16, classes=50)
    x, y = train.dataset.rows(np.arange(train.dataset.samples))
    assert (x.shape, x.dtype, y.shape, y.dtype) == (y.shape, np.int64, (len(x), 16), np.int64)
    assert (x.min(), x.max(), train.classes) == (0, 49, 50)
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    follower = np.array([np.bincount(y[x == token], minlength=50).argmax() for token in range(50)])
    u, v = next(data.load("synthetic", batch_size=64, sequence_length=16, classes=50, split="test"))
    assert (follower[u] == v).mean() > 0.85


def test_pydoc():
    train, test = (data.load("pydoc", batch_size=8, sequence_length=32, split=split) for split in ("train", "test"))
    x, y = next(train)
    assert (x.shape, x.dtype, y.dtype, train.classes, train.name) == ((8, 32), np.int64, np.int64, 256, "pydoc")
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    text = b"".join(bytes(row) for row in train.dataset.rows(np.arange(train.dataset.samples))[0].astype(np.uint8))
    rest = b"".join(bytes(row.astype(np.uint8)) for batch, _ in test for row in batch)
    assert b"statement" in text
    assert 3 * len(rest) < len(text) < 5 * len(rest)
    refused("pydoc", "the network one of 100", act=lambda: data.load("pydoc", batch_size=8, classes=100))
    refused("too few for a window", act=lambda: data.load("pydoc", batch_size=8, sequence_length=10**6))
    refused("tokens, not images", act=lambda: data.load("pydoc", batch_size=8, image_size=4))


# ---- names and missing files


def test_unknown_names():
    refused("'mnits'", "did you mean mnist?", act=lambda: data.load("mnits", batch_size=4))
    refused("'zzzzzz'", "digits", "pydoc", act=lambda: data.load("zzzzzz", batch_size=4))


@pytest.mark.parametrize(("name", "looked", "other"), [
    ("mnist", "train-images-idx3-ubyte", "digits"), ("cifar10", "data_batch_1", "digits"),
    ("cifar100", "train", "synthetic"), ("imagenet", "imagenet/train", "synthetic"),
    ("openwebtext", "train.bin", "pydoc"), ("iwslt", "train.tags.de-en.de", "synthetic"),
    ("mnli", "train.tsv", "synthetic"), ("mrpc", "msr_paraphrase_train.txt", "synthetic"),
])  # fmt: skip
def test_a_named_data_set_without_files_is_an_error(tmp_path, name, looked, other):
    refused(f"{name}: not found (looked for", looked, str(tmp_path), f"--root DIR), or give --data {other}",
            act=lambda: data.load(name, root=tmp_path, batch_size=4))


@pytest.mark.parametrize("name", ["none.npz", "none", "no/such", "x.csv", "x.txt", "x.bin", "own.py:f"])
def test_nothing_stands_in_for_a_path(tmp_path, name):
    refused(str(tmp_path / name), "no such", act=lambda: data.load(tmp_path / name, batch_size=4))
    refused(str(tmp_path / name), "no such", act=lambda: data.load(str(tmp_path / name), batch_size=4, root=tmp_path))
    refused(str(tmp_path / name), "does not exist", act=lambda: data.load("mnist", batch_size=4, root=tmp_path / name))


def test_statistics_are_those_of_the_whole_whatever_the_pieces(monkeypatch):
    x = np.random.default_rng(0).integers(0, 256, (1000, 5, 4, 3), np.uint8)
    for pixels in (x, x.astype(np.float32) / 7):
        scaling = dataset.statistics(pixels)
        np.testing.assert_array_equal(scaling.mean, pixels.mean((0, 1, 2), np.float64))
        np.testing.assert_array_equal(scaling.std, pixels.std((0, 1, 2), np.float64))
        wanted, rows = dataset.Wanted("train", image_size=7, channels=1), np.random.default_rng(1).permutation(1000)

        def read(pixels=pixels, scaling=scaling, wanted=wanted, rows=rows):
            return dataset.of_images("x", pixels, np.zeros(1000, np.int64), 10, scaling, wanted).rows(rows)[0]

        whole = read()
        with monkeypatch.context() as patch:
            patch.setattr(dataset, "PIECE", 977)
            found = dataset.statistics(pixels)
            np.testing.assert_allclose([found.mean, found.std], [scaling.mean, scaling.std], rtol=1e-12)
            np.testing.assert_array_equal(read(), whole)


def test_a_path_that_cannot_be_looked_at(tmp_path):
    refused("too long", act=lambda: data.load(tmp_path / ("a" * 300 + ".npz"), batch_size=4))


# ---- reading ahead


def test_reading_ahead_gives_the_batches_of_reading_in_turn_and_is_bounded():
    asked: list[int] = []
    release = threading.Event()

    def rows(i):
        asked.append(threading.get_ident())
        release.wait(20)
        return i, i

    plain = data.Dataset("plain", 10, (), 10, lambda i: (i, i))
    slow = data.Loader(data.Dataset("slow", 10, (), 10, rows, slow=True), 2, seed=1)
    wanted = data.Loader(plain, 2, seed=1)
    release.set()
    for _ in range(7):
        assert same(next(slow), next(wanted))
        assert slow.state() == wanted.state()
        assert len(asked) <= 7 + 3
    assert threading.get_ident() not in asked
    slow.restore({"position": 6})
    wanted.restore({"position": 6})
    for _ in range(4):
        assert same(next(slow), next(wanted))


def test_a_batch_that_cannot_be_read_is_told_where_it_is_used_and_can_be_read_later():
    broken = [True]

    def rows(i):
        if broken[0] and 3 in i:
            raise data.DataError("sample 3 is damaged")
        return i, i

    loader = data.Loader(data.Dataset("slow", 8, (), 8, rows, slow=True), 2, training=False)
    next(loader)
    place = loader.state()
    refused("sample 3", act=lambda: next(loader))
    assert loader.state() == place
    broken[0] = False
    assert next(loader)[0].tolist() == [2, 3]
