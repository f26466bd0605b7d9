"""What a reader makes of columns, labels and pictures: it says so, and refuses what would change their meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import reported
from data_checks import refused
from helpers import need

from minidl import data
from minidl.data import arrays
from minidl.data.loader import fifth
from minidl.data.pictures import Picture, decode


def table(folder: Path, labels: list[str], features: list[str] | None = None, head: str = "a,b,label") -> Path:
    path = folder / "t.csv"
    rows = [f"{(features or ['0.5'] * len(labels))[i]},{i},{label}" for i, label in enumerate(labels)]
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


def read(path: Any, **more: Any) -> tuple[Any, Any, list[str]]:
    """The data set, the labels of its training part in the order of the file, and the notes."""
    notes: list[str] = []
    found = data.load(path, batch_size=1, note=notes.append, **more).dataset
    return found, found.rows(np.arange(found.samples))[1], notes


#: the labels of a column -> what they are, and the words of the note
COLUMNS: dict[str, tuple[list[str], list[float] | list[int], str]] = {
    "ids": (["9007199254740993", "9007199254740992", "9007199254740994"], [1, 0, 2],
            "of 3 whole numbers, which are classes in their order: 0 is 9007199254740992, 1 is 9007199254740993"),
    "very long ids": (["1" + "0" * 400 + "1", "1" + "0" * 400, "7"], [2, 1, 0], "of 3 whole numbers"),
    "classes": (["0", "2", "1"], [0, 2, 1], "whole numbers, which are its classes"),
    "zeros in front": (["01", "1", "0"], [1, 1, 0], "whole numbers, which are its classes"),
    "not from 0": (["3", "10", "-1"], [1, 2, 0],
                   "of 3 whole numbers, which are classes in their order: 0 is -1, 1 is 3, 2 is 10"),
    "words": (["red", "blue", "light blue"], [2, 0, 1], "of 3 words, which are classes in their order: 0 is blue"),
    "booleans": (["True", "False", "True"], [1, 0, 1], "of 2 words, which are classes in their order: 0 is False"),
    "numbers and words": (["1", "b", "2"], [0, 2, 1], "of 3 words"),
    "underscores": (["1_0", "10", "3"], [1, 0, 2], "of 3 words, which are classes in their order: 0 is 10, 1 is 1_0"),
    "other digits": (["\u0661", "1", "2"], [2, 0, 1], "of 3 words"),
    "dates": (["2026-01-02", "2026-01-01", "2026-01-01"], [1, 0, 0], "of 2 words"),
    "floats": (["0.0", "1.0", "2.0"], [0, 1, 2], "numbers for regression"),
    "exponents": (["1e0", "2", "3"], [1, 2, 3], "numbers for regression"),
    "ignored": (["-100", "1", "0"], [-100, 1, 0], "whole numbers, which are its classes"),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_column_of_labels_keeps_its_meaning_and_the_reader_says_which(kind: str, tmp_path: Path) -> None:
    labels, wanted, says = COLUMNS[kind]
    found, y, notes = read(table(tmp_path, labels * 5))
    np.testing.assert_array_equal(y.reshape(-1), np.array(wanted * 5)[fifth(15, "train")])
    assert y.dtype == (np.float32 if "regression" in says else np.int64)
    assert any(note.startswith(f"t.csv: the label is the column label, {says}") for note in notes), notes
    assert found.uneven == (kind == "ignored")


@pytest.mark.parametrize(("labels", "says"), [
    (["1", "nan", "0"], "line 3, column label: 'nan' is not a finite number, and other labels are numbers"),
    (["1.5", "?", "0"], "line 3, column label: '?'"), (["1.5", "two", "0"], "'two' is not a finite number"),
    (["1", "0", "inf"], "line 4, column label: 'inf'"), (["1.5", "1e999", "0"], "'1e999' is not a finite number"),
    (["1.5", "1_0", "0"], "'1_0' is not a finite number"), (['"1,5"', '"2,5"', '"0,5"'], "'1,5' has a comma; write a"),
    (["-100", "-100", "-100"], "every label is -100, so there are no classes"),
    (["1.5", "1e300", "2.5"], "y has numbers that are out of the range of float32"),
])
def test_labels_that_would_change_their_meaning_are_refused(labels: list[str], says: str, tmp_path: Path) -> None:
    refused("t.csv", says, act=lambda: data.load(table(tmp_path, labels), batch_size=1))


@pytest.mark.parametrize(("cell", "says"), [
    ("1_0", "line 2, column a: '1_0' is not a finite number"), ("9007199254740993", "has more digits than a float64"),
    ("\u0661", "is not a finite number"), ("1e999", "not a finite"), ("True", "not a finite"), ("", "not a finite"),
    ("inf", "not a finite"), ('"1,5"', "not a finite"), ("0x10", "not a finite"), ("2026-01-01", "not a finite"),
])
def test_cells_that_are_no_plain_numbers_are_refused(cell: str, says: str, tmp_path: Path) -> None:
    refused("t.csv", says, act=lambda: data.load(table(tmp_path, ["0", "1"] * 5, [cell] * 10), batch_size=1))


def test_a_row_has_its_numbers_whether_or_not_it_is_plain(tmp_path: Path, monkeypatch: Any) -> None:
    """Rows of plain numbers, of which large tables are made, are not looked at cell by cell."""
    plain, odd = ["0", "-0.5", "007", "12.", "999999999999999"], [".5", "+1", "1e-3", " 2 ", "9007199254740992"]
    number, seen = arrays._number, list[str]()
    monkeypatch.setattr(arrays, "_number", lambda text: seen.append(text) or number(text))
    found, _, _ = read(table(tmp_path, ["no", "yes"] * 10, (plain + odd) * 2))
    wanted = np.array([[float(cell), i] for i, cell in enumerate((plain + odd) * 2)])[fifth(20, "train")]
    np.testing.assert_array_equal(found.rows(np.arange(found.samples))[0], wanted.astype(np.float32))
    assert {*seen} & {*plain, *odd} == {*odd}


def test_a_word_that_is_also_a_missing_number_takes_no_time(tmp_path: Path) -> None:
    """Half of 100,000 labels: were there a look for numbers among all labels for each, this would be slow."""
    (path := tmp_path / "t.csv").write_text("a,label\n" + "1,none\n2,mild\n" * 50_000)
    _, y, _ = read(path)
    assert 0 < y.sum() < len(y)


@pytest.mark.parametrize(("head", "says"), [
    (",b,label", "its column 1 has no name; if these are pandas' numbers of lines"),
    ("a,,label", "its column 2 has no name"), ("a,a,label", "two of its columns are called a"),
    ("label,b,label", "two of its columns are called label")])
def test_columns_need_names_of_their_own(head: str, says: str, tmp_path: Path) -> None:
    refused("t.csv", says, act=lambda: data.load(table(tmp_path, ["0", "1"], head=head), batch_size=1))


def test_lines_within_names_and_labels_do_not_break_a_message(tmp_path: Path) -> None:
    """Spreadsheets break long names; labels stay what they are."""
    table = 'petal,"class\n(type)"\n1,"a\nb"\n2,a b\n3,"a\nb"\n4,a b\n5,"a\nb"\n6,a b\n'
    (path := tmp_path / "t.csv").write_text(table)
    _, y, notes = read(path)
    assert {*y.tolist()} == {0, 1}
    assert notes == ["t.csv: the label is the column class (type), of 2 words, which are classes in their order: 0 is "
                     "a b, 1 is a b; the others are numbers"]
    path.write_text(table.replace("petal", '"petal\r\nlength"').replace("5,", "x,"))
    refused("column petal length: 'x' is not a finite number", act=lambda: data.load(path, batch_size=1))


def test_a_table_may_have_many_columns(tmp_path: Path) -> None:
    """40,000, such as genes: were each name counted among all, this would be slow."""
    names = [f"gene_{i}" for i in range(40_000)]
    (path := tmp_path / "t.csv").write_text("\n".join([",".join([*names, "y"]), *(f"{'1,' * 40_000}{i % 2}"
                                                                              for i in range(10))]))
    assert read(path)[0].shape == (40_000,)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64", "bool", "float32", "float64"])
def test_labels_of_arrays_and_of_a_table_mean_the_same(dtype: str, tmp_path: Path) -> None:
    """By their type alone: floats without a fraction are floats, in both."""
    x, labels = np.random.default_rng(0).standard_normal((20, 2)), np.arange(20) % 2
    np.savez(tmp_path / "a.npz", x=x, y=labels.astype(dtype))
    rows = zip(x.tolist(), labels.astype(dtype).tolist(), strict=True)
    (tmp_path / "b.csv").write_text("a,b,y\n" + "".join(f"{a!r},{b!r},{label!r}\n" for (a, b), label in rows))
    (one, y, notes), (two, z, more) = read(tmp_path / "a.npz"), read(tmp_path / "b.csv")
    assert one.serves == two.serves == (("regression",) if "float" in dtype else ("classification",))
    np.testing.assert_array_equal(y, z)
    for name, lines in (("a.npz", notes), ("b.csv", more)):
        assert any(f"{name}: y holds floats, though none has a fraction: it is for regression" in line
                   for line in lines) == ("float" in dtype)


def test_whole_numbers_are_tokens_and_the_reader_says_so(tmp_path: Path) -> None:
    x, y = np.arange(40).reshape(10, 4), np.arange(10) % 2
    np.savez(tmp_path / "a.npz", x=x, y=y)
    found, _, notes = read(tmp_path / "a.npz")
    assert found.vocabulary == 40
    assert any("a.npz: x holds whole numbers, so they are tokens, of a vocabulary of 40; save x as floats" in note
               for note in notes)
    np.savez(tmp_path / "a.npz", x=x.astype(float), y=y)
    found, _, notes = read(tmp_path / "a.npz")
    assert (found.vocabulary, [note for note in notes if "tokens" in note]) == (0, [])


@pytest.mark.parametrize(("x", "y", "says"), [
    (np.ones((6, 2)), np.eye(6, 2, dtype=int), "y.argmax(1) is the class"),
    (np.ones((6, 2)), np.eye(6, 2, dtype=bool), "y.argmax(1) is the class"),
    (np.ones((6, 2), int), np.ones((6, 3), int), "one token for each of x"),
    (np.full((6, 2), 1 << 63, "uint64"), np.ones(6, int), "a token is 9223372036854775808; the largest"),
    (np.ones((6, 2)), np.full(6, (1 << 64) - 100, "uint64"), "a label is 18446744073709551516; the largest"),
    (np.ones((6, 2, 2)), np.full(6, (1 << 64) - 100, "uint64"), "a label is 18446744073709551516; the largest"),
    (np.ones((6, 2)), np.full(6, 1e39), "out of the range of float32"),
    (np.ones((6, 2)), np.array(["a"] * 6), "not numbers"),
    (np.ones((6, 2)), np.array(["2026-01-01"] * 6, "M8[D]"), "not numbers"),
    (np.ones((6, 2)), np.full(6, -100), "every label is -100"),
    (np.ones((6, 2)), np.full(6, -1), "label -1; labels are"),
    *((x, y, "and y must be (n,) or (n, k)") for one in (1.0, np.nan)
      for x, y in ((np.ones((6, 2)), np.float64(one)), (np.float64(one), np.ones(6, int)))),
])
def test_arrays_that_would_change_their_meaning_are_refused(x: Any, y: Any, says: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=x, y=y)
    refused("a.npz", says, act=lambda: data.load(tmp_path / "a.npz", batch_size=1))
    refused(says, act=lambda: data.from_arrays("own", x, y))


OWN = """
import numpy as np
from minidl import data
X = np.random.default_rng(0).standard_normal((64, 3)).astype("float32")
Y = np.where(np.arange(64) % 4 == 0, -100, np.arange(64) % 3)
ROWS = lambda i: (X[i], Y[i])

def arrays(): return X, Y
def images(): return np.repeat(X[:, :, None, None], 3, 2), Y
def even(): return data.Dataset("own", 64, (3,), 3, ROWS)
def dataset(): return data.Dataset("own", 64, (3,), 3, ROWS, uneven=True)
def endless():
    while True: yield X[:8], Y[:8]
def late():
    for i in range(60_000): yield X[1:2], Y[1:2] if i < 110 else Y[:1]
"""


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["arrays", "images", "dataset", "endless", "t.npz", "i.npz"])
def test_labels_that_do_not_count_are_trained_on(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    x, y = np.random.default_rng(0).standard_normal((64, 3)), np.where(np.arange(64) % 4 == 0, -100, np.arange(64) % 3)
    np.savez("t.npz", x=x, y=y)
    np.savez("i.npz", x=np.repeat(x[:, :, None], 3, 2), y=y)
    source = name if name.endswith("npz") else f"own.py:{name}"
    record = reported(capsys, "train", "--model", "mlp", "--model-arg", "hidden=4", "--model-arg", "classes=3",
                      "--data", source, "--costs", "analytic", "--batch-size", "8", "--micro-batches", "4", "--steps",
                      "4")
    assert np.isfinite([record["loss_first"], record["loss_last"], record["accuracy"]]).all()


@pytest.mark.parametrize(("name", "says"), [("even", "make its Dataset with uneven=True"),
                                            ("late", "batch 110 has labels of -100, its first batches had none")])
def test_labels_that_come_unexpected_are_refused(name: str, says: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    loader = data.load(f"own.py:{name}", batch_size=64)
    refused(says, act=lambda: next(loader))


def test_wide_tokens_are_not_read_as_narrow_ones(tmp_path: Path) -> None:
    for dtype in ("<u2", "<u4", "<i8"):
        np.arange(200, dtype=dtype).tofile(tmp_path / "a.bin")
        if dtype == "<u2":
            assert data.load(tmp_path / "a.bin", batch_size=1, sequence_length=8).dataset.classes == 200
        else:
            refused("a.bin", "it seems to hold wider ones; save them as uint16",
                    act=lambda: data.load(tmp_path / "a.bin", batch_size=1, sequence_length=8))


def test_large_vocabularies_in_wide_tokens_are_noticed(tmp_path: Path) -> None:
    """Of tokens up to 2**20 the upper halves are small, and not all 0."""
    for most in (1 << 17, 1 << 20):
        for dtype in ("<u4", "<i8"):
            np.random.default_rng(0).integers(0, most, 3000).astype(dtype).tofile(tmp_path / "a.bin")
            refused("a.bin", "it seems to hold wider ones; save them as uint16",
                    act=lambda: data.load(tmp_path / "a.bin", batch_size=1, sequence_length=8))
    for least, most in ((0, 12), (0, 300), (0, 1 << 16), (5, 6)):  # tokens of one type are read
        for count in (20, 5000):
            np.random.default_rng(0).integers(least, most, count).astype("<u2").tofile(tmp_path / "a.bin")
            assert data.load(tmp_path / "a.bin", batch_size=1, sequence_length=3).samples


@pytest.mark.parametrize(("begins", "says"), [
    (np.array([20240520, 1, 900], "<i4").tobytes(), "is a file of llm.c, with a header, not tokens alone"),
    (np.array([20240801, 7, 900], "<i4").tobytes(), "is a file of llm.c, with a header, not tokens alone"),
    (b"\x93NUMPY\1\0", "is a NumPy array, not tokens alone"), (b"PK\3\4" + bytes(8), "is a ZIP archive, as torch"),
], ids=["llm.c", "llm.c of Llama", "NumPy", "torch"])
def test_what_is_not_tokens_alone_is_named(begins: bytes, says: str, tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 50257, 900).astype("<u2")
    (tmp_path / "train.bin").write_bytes(begins.ljust(1024, b"\0") + tokens.tobytes())
    tokens.tofile(tmp_path / "val.bin")
    for path in (tmp_path, tmp_path / "train.bin"):
        refused("train.bin", says, "save them as uint16", act=lambda at=path: data.load(at, batch_size=1))


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_a_table_in_another_encoding_is_not_called_damaged(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,label\n1,größer\n2,kleiner\n", encoding=encoding)
    said = refused("t.csv: not a text in UTF-8", act=lambda: data.load(tmp_path / "t.csv", batch_size=1))
    assert "damaged" not in said


def gray(values: Any, **more: Any) -> Any:
    return need("PIL.Image").fromarray(np.array(values, **more))


DEEP = [[0, 255, 256, 4095], [32768, 65280, 65535, 1000]] * 2
#: a picture's file -> the gray of its first pixels, or what the message says
PICTURES: dict[str, tuple[str, Any, Any]] = {
    "16 bits": ("a.png", lambda i: gray(DEEP, dtype=np.uint16), [0, 0, 1, 15, 128, 255, 255, 3]),
    "16 bits of PGM": ("a.ppm", lambda i: gray(DEEP, dtype=np.uint16), [0, 0, 1, 15, 128, 255, 255, 3]),
    "16 bits of TIFF": ("a.tiff", lambda i: gray(DEEP, dtype=np.uint16), [0, 0, 1, 15, 128, 255, 255, 3]),
    "8 bits": ("a.png", lambda i: gray([[1, 2], [3, 4]], dtype=np.uint8), [1, 2, 3, 4]),
    "1 bit": ("a.png", lambda i: i.new("1", (2, 2), 1), [255, 255, 255, 255]),
    "a palette": ("a.gif", lambda i: gray([[1, 2], [3, 4]], dtype=np.uint8).convert("P"), [1, 2, 3, 4]),
    "opaque": ("a.png", lambda i: i.new("RGBA", (2, 2), (7, 7, 7, 255)), [7, 7, 7, 7]),
    "inks": ("a.jpg", lambda i: i.new("CMYK", (2, 2), (0, 0, 0, 255)), [0, 0, 0, 0]),
    "seen through": ("a.png", lambda i: i.new("LA", (2, 2), (7, 100)), "one can see through it"),
    "colours seen through": ("a.png", lambda i: i.new("RGBA", (2, 2), (7, 7, 7, 0)), "one can see through it"),
    "a palette seen through": ("a.gif", lambda i: i.new("RGBA", (2, 2), (7, 7, 7, 0)), "one can see through it"),
    "floats": ("a.tiff", lambda i: gray([[0.5, 1], [2, 3]], dtype=np.float32), "what is white is not known"),
    "32 bits": ("a.tiff", lambda i: gray([[5, 1], [2, 3]], dtype=np.int32), "what is white is not known"),
}


@pytest.mark.parametrize("kind", PICTURES)
def test_pictures_keep_their_gray(kind: str, tmp_path: Path) -> None:
    name, make, wanted = PICTURES[kind]
    image = need("PIL.Image")
    picture = make(image)
    picture.save(tmp_path / name)
    for channels in (1, 3):
        if isinstance(wanted, str):
            refused(name, wanted, act=lambda c=channels: decode([(Picture(str(tmp_path / name)), None)], 2, c))
            continue
        with image.open(tmp_path / name) as opened:
            from minidl.data.pictures import _shown

            shown = np.asarray(_shown(opened, "L" if channels == 1 else "RGB"))
        assert shown.reshape(shown.shape[0], -1, channels)[..., 0].reshape(-1)[: len(wanted)].tolist() == wanted


def test_folders_called_by_numbers_say_which_class_they_are(tmp_path: Path) -> None:
    image = need("PIL.Image")
    for name in ("0", "1", "2", "10"):
        (tmp_path / name).mkdir()
        for i in range(5):
            image.new("L", (2, 2), 9).save(tmp_path / name / f"{i}.png")
    notes: list[str] = []
    data.load(tmp_path, batch_size=1, note=notes.append, workers=0)
    assert any(note.endswith("in the order of their names as text: 10 is class 2") for note in notes)
