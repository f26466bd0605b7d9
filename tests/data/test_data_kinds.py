"""Data in their published forms and one's own: tiny files of exactly these formats, read, trained on, and damaged."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from command_line import refusal, reported, run
from data_checks import packed as tar
from data_checks import refused, same

from minidl import data
from minidl.data import pictures, text, tokens
from minidl.data.loader import fifth

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away", "from", "it",
         "into", "deep", "woods"]


def prose(seed, lines=60):
    rng = np.random.default_rng(seed)
    return "\n".join(" ".join(rng.choice(WORDS, 8)) for _ in range(lines)) + "\n"


def everything(loader):
    """x and y of one epoch in order."""
    return [np.concatenate(column) for column in zip(*loader, strict=True)]


def archive(path, members):
    path.write_bytes(tar(members))


TRAIN = ["train", "--costs", "analytic", "--steps", "2"]


def trained(capsys, *argv):
    return reported(capsys, *TRAIN, *argv)


# ---- running text


def whole(loader):
    """The tokens of a loader of windows, in order."""
    x, _ = loader.dataset.rows(np.arange(loader.dataset.samples))
    return x.reshape(-1)


def test_text_files_and_folders(tmp_path):
    one, two = prose(1), prose(2)
    (tmp_path / "b.txt").write_text(two)
    loaded = {s: data.load(tmp_path / "b.txt", batch_size=2, sequence_length=16, split=s) for s in ("train", "test")}
    assert loaded["train"].dataset.serves == ("next_token", "masked_token")
    assert bytes(whole(loaded["train"]).astype(np.uint8)).decode() == two[: len(whole(loaded["train"]))]
    tail = bytes(whole(loaded["test"]).astype(np.uint8)).decode()
    assert two[len(two) - len(two) // 5 :].startswith(tail)
    (tmp_path / "a.md").write_text(one)
    assert bytes(whole(data.load(tmp_path, batch_size=2, sequence_length=16)).astype(np.uint8)
                 ).decode() in f"{one}\n{two}"  # fmt: skip
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "train.txt").write_text(one)
    (tmp_path / "c" / "valid.txt").write_text(two)
    for split, wanted in (("train", one), ("test", two)):
        found = bytes(whole(data.load(tmp_path / "c", batch_size=2, sequence_length=8, split=split)).astype(np.uint8))
        assert wanted.startswith(found.decode())
        assert len(wanted) - len(found) <= 8


def test_openwebtext_as_it_is_published(tmp_path):
    parts = [prose(i) for i in range(4)]
    inner = []
    for i in (0, 2):
        inner.append(lzma.compress(tar({f"{n}.txt": parts[n].encode() for n in (i, i + 1)})))
    folder = tmp_path / "openwebtext"
    folder.mkdir()
    archive(folder / "openwebtext.tar", {f"openwebtext/urlsf_subset0{i}.xz": x for i, x in enumerate(inner)})
    found = data.load("openwebtext", root=tmp_path, batch_size=2, sequence_length=16)
    wanted = "\n".join(parts).encode()
    assert wanted.startswith(bytes(whole(found).astype(np.uint8)))
    (folder / "openwebtext.tar").unlink()
    (folder / "urlsf_subset00.xz").write_bytes(inner[0])
    (folder / "more.txt.xz").write_bytes(lzma.compress(parts[2].encode()))
    (folder / "last.gz").write_bytes(gzip.compress(parts[3].encode()))
    found = data.load("openwebtext", root=tmp_path, batch_size=2, sequence_length=16)
    wanted = "\n".join([parts[3], parts[2], parts[0], parts[1]]).encode()  # by the names of the files
    assert wanted.startswith(bytes(whole(found).astype(np.uint8)))
    refused("openwebtext: not found", act=lambda: data.load("openwebtext", root=folder.parent.parent, batch_size=2))


def test_files_of_uint16_tokens(tmp_path):
    stream = (np.arange(5000) * 7 % 3000).astype("<u2")
    stream.tofile(tmp_path / "train.bin")
    stream[::-1].tofile(tmp_path / "val.bin")
    loader = data.load(tmp_path, batch_size=4, sequence_length=9)
    np.testing.assert_array_equal(whole(loader), stream[: len(whole(loader))])
    assert loader.dataset.slow
    assert loader.classes == 3000
    np.testing.assert_array_equal(whole(data.load(tmp_path, batch_size=4, sequence_length=9, split="test")),
                                  stream[::-1][: len(whole(loader))])
    refused("vocabulary of 3000 tokens", "network one of 100",
            act=lambda: data.load(tmp_path, batch_size=4, sequence_length=9, classes=100))
    (np.arange(5000) % 3500).astype("<u2").tofile(tmp_path / "val.bin")  # tokens that training does not have
    assert {data.load(tmp_path, batch_size=4, sequence_length=9, split=s).classes for s in ("train", "test")} == {3500}
    (tmp_path / "odd.bin").write_bytes(b"abc")
    refused("odd.bin", "3 bytes", act=lambda: data.load(tmp_path / "odd.bin", batch_size=1, sequence_length=1))


@pytest.mark.parametrize("name", ["a.TXT", "a.txt.GZ", "a.XZ", "a.TAR", "a.BIN", "a.CSV", "a.NPZ"])
def test_a_suffix_means_the_same_in_any_case(tmp_path, name):
    content = prose(1).encode()
    packs = {"GZ": gzip.compress, "XZ": lzma.compress, "TAR": lambda c: tar({"a.txt": c})}
    pack = packs.get(name.split(".")[-1], bytes)
    small = tmp_path / name.lower()
    if name == "a.BIN":
        (np.arange(5000) % 300).astype("<u2").tofile(small)
    elif name == "a.NPZ":
        np.savez(small, x=np.eye(20), y=np.arange(20) % 2)
    else:
        small.write_bytes(pack(content) if name != "a.CSV" else b"a,b\n" + b"0.5,0\n1.5,1\n" * 9)
    wanted = data.load(small, batch_size=2, note=lambda line: None)
    found = data.load(small.rename(tmp_path / name), batch_size=2, note=lambda line: None)
    assert same(next(found), next(wanted))


def test_hidden_files_are_no_data(tmp_path):
    """What macOS puts beside each file, ._a.txt, is no text."""
    note = b"\0\5\x16\7\0\2\0\0Mac OS X\xff\xfe"
    (tmp_path / "a.txt").write_text(prose(1))
    wanted = everything(data.load(tmp_path, batch_size=1, sequence_length=16))
    for name in ("._a.txt", ".notes.md"):
        (tmp_path / name).write_bytes(note)
    assert same(everything(data.load(tmp_path, batch_size=1, sequence_length=16)), wanted)
    archive(tmp_path / "b.tar", {"._b.txt": note, "./._c.txt": note, "../b.txt": prose(1).encode(), ".git/d": note})
    assert same(everything(data.load(tmp_path / "b.tar", batch_size=1, sequence_length=16)), wanted)


def test_text_that_cannot_be_read(tmp_path):
    packed = lzma.compress(prose(3).encode())
    (tmp_path / "cut.xz").write_bytes(packed[: len(packed) // 2])
    refused("cut.xz", "truncated", act=lambda: data.load(tmp_path / "cut.xz", batch_size=1, sequence_length=4))
    archive(tmp_path / "whole.tar", {"a.txt": prose(1).encode(), "b.txt": prose(2).encode()})
    content = (tmp_path / "whole.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(content[:3000])
    refused("cut.tar", "truncated", act=lambda: data.load(tmp_path / "cut.tar", batch_size=1, sequence_length=4))
    (tmp_path / "no.tar").write_bytes(b"not an archive" * 99)
    refused("no.tar: damaged", act=lambda: data.load(tmp_path / "no.tar", batch_size=1, sequence_length=4))
    archive(tmp_path / "none.tar", {})
    refused("none.tar: the archive has no files", act=lambda: data.load(tmp_path / "none.tar", batch_size=1))
    (tmp_path / "latin.txt").write_bytes("grün".encode("latin-1") * 100)
    refused("latin.txt", "byte 2", act=lambda: data.load(tmp_path / "latin.txt", batch_size=1, sequence_length=4))
    (tmp_path / "empty.txt").write_text("")
    refused("empty.txt", "too few", act=lambda: data.load(tmp_path / "empty.txt", batch_size=1, sequence_length=4))


def xz(content):
    return lzma.compress(content, preset=0)  # which needs little memory itself


BOMBS = {
    "a.xz": xz, "a.gz": gzip.compress, "a.tar": lambda zeros: tar({"b.xz": xz(zeros)}),
    "b.tar": lambda zeros: tar({"b.xz": xz(tar({"c.txt": zeros[1::2], "d.txt": zeros[::2]}))}),
    "c.tar": lambda zeros: tar({f"{i}.xz": xz(zeros[::32]) for i in range(5)}),
    "sparse.tar": lambda zeros: sparse(len(zeros)),
    "name.xz": lambda zeros: xz(long_name(len(zeros)) + zeros),
}


def long_name(size):
    """The head of an archive whose first file has a name of so many bytes."""
    info = tarfile.TarInfo("a.txt")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, size
    return info.tobuf(tarfile.GNU_FORMAT)


def sparse(size):
    """An archive with a file of `size` bytes of which none is stored, in GNU's form."""
    info = tarfile.TarInfo("a.txt")
    info.type = tarfile.GNUTYPE_SPARSE
    head = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    head[483:495] = b"%011o\0" % size
    head[148:156] = b"%06o\0 " % sum(head[:148] + b" " * 8 + head[156:512])
    return bytes(head) + bytes(1024)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", BOMBS)
def test_what_inflates_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch, name):
    """A file of some hundred bytes that holds more than it may."""
    monkeypatch.setattr(text, "SMALL", 1 << 20)
    (tmp_path / name).write_bytes(BOMBS[name](bytes(16 << 20)))
    tracemalloc.start()
    refused(name, "holds more text", act=lambda: data.load(tmp_path / name, batch_size=1, sequence_length=4))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < (20 if name == "name.xz" else 12) << 20  # Python makes room for a name first


def test_files_that_are_packed_in_one_another_without_end_are_refused(tmp_path):
    packed = b"text"
    for _ in range(5):
        packed = gzip.compress(packed)
    (tmp_path / "deep.gz").write_bytes(packed)
    refused("deep.gz", "more than 4 packed", act=lambda: data.load(tmp_path / "deep.gz", batch_size=1))


# ---- tokenizers


def test_a_tokenizer_is_trained_and_given(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text(prose(1, 400))
    coder = tokens.tokenizer("300", (tmp_path / "a.txt").read_bytes())
    assert coder.vocabulary <= 300
    for sample in ("the lazy dog", "größer\nthan é\n", prose(9)):
        assert coder.decode(coder.encode(sample.encode()).tolist()) == sample
    assert set(coder.special) == set(tokens.NAMES)
    assert coder.special["pad"] == 0
    again = tokens.restored(coder.saved)
    np.testing.assert_array_equal(again.encode(b"the quick fox"), coder.encode(b"the quick fox"))
    (tmp_path / "own.json").write_text(coder.saved)
    for kind in ("300", 300, str(tmp_path / "own.json"), tmp_path / "own.json"):
        found = data.load(tmp_path / "a.txt", batch_size=2, sequence_length=16, tokenizer=kind)
        assert (found.classes, found.dataset.mask) == (coder.vocabulary, coder.special["mask"])
        assert found.dataset.bytes_per_token > 2
    refused("vocabulary of", "network one of 100", act=lambda: data.load(
        tmp_path / "a.txt", batch_size=2, sequence_length=16, tokenizer="300", classes=100))
    refused("too small", act=lambda: data.load(tmp_path / "a.txt", batch_size=2, tokenizer="100"))
    refused("no such tokenizer", act=lambda: data.load(tmp_path / "a.txt", batch_size=2, tokenizer="none.json"))
    (tmp_path / "bad.json").write_text("{}")
    refused("bad.json", "not a tokenizer",
            act=lambda: data.load(tmp_path / "a.txt", batch_size=2, tokenizer=str(tmp_path / "bad.json")))
    argv = ["--model", "gpt", "--model-arg", "preset=tiny", "--data", str(tmp_path / "a.txt"), "--batch-size", "4"]
    small, large = (trained(capsys, *argv, *more) for more in (["--tokenizer", "300"], []))
    assert small["parameters"] - large["parameters"] == (coder.vocabulary - 256) * 32, "the network's follows"
    said = refusal(capsys, *TRAIN, *argv, "--tokenizer", "300", "--model-arg", "vocabulary=256")
    assert "the network one of 256" in said


def saved(path, words, **more):
    """A file of a tokenizer that knows these words."""
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.WordLevel(words, **more))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.save(str(path))
    return made


@pytest.mark.parametrize("last_use", ["truncation", "padding"])
def test_what_a_tokenizer_was_last_used_for_cuts_and_fills_no_text(tmp_path, last_use, monkeypatch):
    """A tokenizer of transformers is saved with the truncation and padding of its last call."""
    monkeypatch.setattr(tokens, "PIECE", 400)
    (tmp_path / "a.txt").write_text(prose(1))
    made = saved(tmp_path / "plain.json", {word: i for i, word in enumerate(WORDS)}, unk_token="the")
    wanted = made.encode(prose(1)).ids
    made.enable_truncation(16) if last_use == "truncation" else made.enable_padding(length=500)
    made.save(str(tmp_path / "used.json"))
    found = [data.load(tmp_path / "a.txt", batch_size=1, sequence_length=7, tokenizer=str(tmp_path / f"{name}.json"))
             for name in ("plain", "used")]
    assert found[1].dataset.tokenizer == found[0].dataset.tokenizer
    assert whole(found[1]).tolist() == wanted[: found[1].samples * 7]
    assert found[1].samples > 50


def test_a_vocabulary_with_gaps_reaches_to_its_last_token(tmp_path):
    (tmp_path / "a.txt").write_text(prose(1))
    saved(tmp_path / "t.json", {word: 3 * i + 5 for i, word in enumerate(WORDS)}, unk_token="the")
    loader = data.load(tmp_path / "a.txt", batch_size=1, sequence_length=8, tokenizer=str(tmp_path / "t.json"))
    assert loader.classes == 3 * len(WORDS) + 3 == whole(loader).max() + 1


def test_a_text_that_a_tokenizer_cannot_read_is_one_line(tmp_path):
    (tmp_path / "a.txt").write_text(prose(1))
    saved(tmp_path / "t.json", {"the": 0}, unk_token="[UNK]")
    refused("the tokenizer cannot read this text", "[UNK]", act=lambda: data.load(
        tmp_path / "a.txt", batch_size=1, tokenizer=str(tmp_path / "t.json")))


# ---- sentences in pairs

MNLI = [("a b", "b c", "entailment"), ("d \" e", "f", "neutral"), ("g", "h", "-"), ("i", "j", "contradiction")] * 3


def mnli_tsv(rows):
    head = ["index", "sentence1", "sentence2", "label1", "gold_label"]
    lines = [[str(i), a, b, label, label] for i, (a, b, label) in enumerate(rows)]
    return "\n".join("\t".join(line) for line in [head, *lines])


@pytest.mark.parametrize("form", ["tsv", "jsonl"])
def test_mnli(tmp_path, form, capsys):
    folder = tmp_path / "MNLI"
    folder.mkdir()
    if form == "tsv":
        (folder / "train.tsv").write_text(mnli_tsv(MNLI))
        (folder / "dev_matched.tsv").write_text(mnli_tsv(MNLI[:2]))
    else:
        for name, rows in (("train", MNLI), ("dev_matched", MNLI[:2])):
            (folder / f"multinli_1.0_{name}.jsonl").write_text("".join(
                json.dumps({"sentence1": a, "sentence2": b, "gold_label": label}) + "\n" for a, b, label in rows))
    loader = data.load("mnli", root=tmp_path, batch_size=3, sequence_length=12)
    assert (loader.classes, loader.dataset.samples, loader.dataset.vocabulary) == (3, 9, 256)
    x, y = loader.dataset.rows(np.arange(3))
    assert y.tolist() == [0, 1, 2]
    first, between = tokens.BYTES["first"], tokens.BYTES["separator"]
    assert x[0].tolist() == [first, *b"a b", between, *b"b c", between, 0, 0, 0]
    assert same(next(data.load(folder, batch_size=3, sequence_length=12)), next(loader))
    x, _ = data.load("mnli", root=tmp_path, batch_size=1, sequence_length=6, split="test").dataset.rows(np.arange(2))
    assert x[0].tolist() == [first, *b"a ", between, *b"b", between]
    bert = ["--model", "bert", "--model-arg", "preset=tiny", "--model-arg", "head=classes", "--batch-size", "3"]
    found = trained(capsys, *bert, "--data", "mnli", "--root", str(tmp_path))
    assert (found["objective"], found["data"]) == ("classification", "mnli")
    assert 0 <= found["accuracy"] <= 1


def test_a_tokenizer_whose_padding_is_not_0_is_refused(tmp_path):
    """Networks leave out token 0, which would be the first one of each pair."""
    library = pytest.importorskip("tokenizers")
    words = {"<s>": 0, "<pad>": 1, "</s>": 2, "a": 3}
    library.Tokenizer(library.models.WordLevel(words, unk_token="a")).save(str(tmp_path / "t.json"))
    (tmp_path / "train.tsv").write_text(mnli_tsv(MNLI))
    (tmp_path / "dev_matched.tsv").write_text(mnli_tsv(MNLI))
    refused("mnli", "the padding of the tokenizer is token 1", act=lambda: data.load(
        tmp_path, batch_size=1, sequence_length=8, tokenizer=str(tmp_path / "t.json")))


def test_mrpc(tmp_path):
    rows = "\n".join(["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", '1\t7\t8\tHe said "no.\tHe refused.',
                      "0\t9\t10\tIt rained\tThe sun"])
    (tmp_path / "msr_paraphrase_train.txt").write_text("\ufeff" + rows + "\r\n", newline="")
    (tmp_path / "msr_paraphrase_test.txt").write_text(rows)
    loader = data.load(tmp_path, batch_size=2, sequence_length=32)
    assert (loader.name, loader.classes) == ("mrpc", 2)
    x, y = loader.dataset.rows(np.arange(2))
    assert y.tolist() == [1, 0]
    assert bytes(x[0, 1:14].astype(np.uint8)) == b'He said "no.\xfa'


def test_a_sentence_that_is_null_is_no_text(tmp_path):
    (tmp_path / "validation_matched.jsonl").write_text("")
    (tmp_path / "train.jsonl").write_text("".join(
        json.dumps({"premise": "a", "hypothesis": text_of, "label": 1}) + "\n" for text_of in ("None", None)))
    refused("train.jsonl, line 2: lacks", act=lambda: data.load(tmp_path, batch_size=1, sequence_length=12))


@pytest.mark.parametrize(("change", "culprit"), [
    (lambda t: t.replace("neutral", "maybe", 2), "line 3: unknown label 'maybe'"),
    (lambda t: t.replace("\tf\t", "\t", 1), "line 3: has 4 columns, its first line 5"),
    (lambda t: t.split("\n")[0], "has no pairs"),
])
def test_a_table_that_does_not_fit(tmp_path, change, culprit):
    (tmp_path / "train.tsv").write_text(change(mnli_tsv(MNLI)))
    (tmp_path / "dev_matched.tsv").write_text(mnli_tsv(MNLI))
    refused("train.tsv", culprit, act=lambda: data.load(tmp_path, batch_size=1, sequence_length=12))


def iwslt(folder):
    folder.mkdir(parents=True)
    sentences = {"de": ["ein Hund", "zwei &amp; drei", "", "vier"], "en": ["a dog", "two & three", "x", "four"]}
    for language, words in sentences.items():
        lines = ["<url>http://x</url>", "<title>t</title>", *words]
        (folder / f"train.tags.de-en.{language}").write_text("\n".join(lines) + "\n")
        for part in ("dev2010", "tst2010"):
            (folder / f"IWSLT14.TED.{part}.de-en.{language}.xml").write_text(
                '<?xml version="1.0"?>\n<mteval><refset><doc>\n'
                + "".join(f'<seg id="{i}"> {part} {word} </seg>\n' for i, word in enumerate(words))
                + "</doc></refset></mteval>")


def test_iwslt(tmp_path, capsys):
    iwslt(tmp_path / "iwslt" / "de-en")
    loader = data.load("iwslt", root=tmp_path, batch_size=1, sequence_length=24)
    assert loader.dataset.samples == 3  # without the empty sentence
    x, y = loader.dataset.rows(np.array([0, 1]))
    between, end = tokens.BYTES["separator"], tokens.BYTES["end"]
    assert x[0].tolist() == [*b"ein Hund", between, *b"a dog", *[0] * 10]
    assert y[0].tolist() == [data.IGNORED] * 8 + [*b"a dog", end] + [data.IGNORED] * 10
    assert bytes(x[1, :11].astype(np.uint8)) == b"zwei & drei"
    test = data.load("iwslt", root=tmp_path, batch_size=1, sequence_length=48, split="test")
    assert bytes(next(test)[0][0, :16].astype(np.uint8)) == b"tst2010 ein Hund"
    rnn = ["--model", "rnn", "--model-arg", "preset=tiny", "--batch-size", "3", "--data", "iwslt"]
    assert trained(capsys, *rnn, "--root", str(tmp_path))["objective"] == "translation"
    pytest.importorskip("tokenizers")
    pairs = [*rnn, "--root", str(tmp_path), "--tokenizer", "300"]
    trained(capsys, *pairs)  # the vocabulary of the network follows
    assert "and the network one of 256" in refusal(capsys, *TRAIN, *pairs, "--model-arg", "vocabulary=256")
    with open(tmp_path / "iwslt" / "de-en" / "train.tags.de-en.en", "a") as file:
        file.write("one more\n")
    refused("4 sentences", "5", act=lambda: data.load(tmp_path / "iwslt" / "de-en", batch_size=1, sequence_length=9))


def test_plain_parallel_text(tmp_path):
    for part in ("train", "test"):
        (tmp_path / f"{part}.de").write_text("eins\nzwei\n")
        (tmp_path / f"{part}.en").write_text("one\ntwo\n")
    assert data.load(tmp_path, batch_size=1, sequence_length=12).dataset.serves == ("translation",)
    (tmp_path / "test.en").unlink()
    refused("no test or dev text", act=lambda: data.load(tmp_path, batch_size=1, sequence_length=12, split="test"))


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
