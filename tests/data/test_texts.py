"""Texts in their published forms: tiny files of exactly these, read, put into tokens, trained on, and damaged."""

from __future__ import annotations

import gzip
import json
import lzma
import tarfile
import tracemalloc

import numpy as np
import pytest
from command_line import refusal
from data_checks import TRAIN, archive, everything, refused, same, trained
from data_checks import packed as tar

from minidl import data
from minidl.data import text, tokens

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away", "from", "it",
         "into", "deep", "woods"]


def prose(seed, lines=60):
    rng = np.random.default_rng(seed)
    return "\n".join(" ".join(rng.choice(WORDS, 8)) for _ in range(lines)) + "\n"


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
    refused("whole.tar has tokens, not images", "a folder of shards is given by itself",
            act=lambda: data.load(tmp_path / "whole.tar", batch_size=1, image_size=4))
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


def test_a_tokenizer_that_was_written_anew_is_read_anew(tmp_path):
    (tmp_path / "a.txt").write_text(prose(1))
    found = []
    for words in (WORDS, WORDS[::-1]):
        saved(tmp_path / "t.json", {word: i for i, word in enumerate(words)}, unk_token=words[0])
        found.append(whole(data.load(tmp_path / "a.txt", batch_size=1, sequence_length=8,
                                     tokenizer=str(tmp_path / "t.json"))))
    assert found[0].tolist() == (len(WORDS) - 1 - found[1]).tolist()


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
