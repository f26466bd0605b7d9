"""Mutated files of every format that is read: one line and exit 2 (or 1 from `check`, for a plan that is one but not
valid), nothing executed, nothing lost, no memory beyond what is stated, no hang.

    MINIDL_MUTATED_FILES=10000 python -m pytest -m campaign tests/fuzz/test_mutated_files.py

A case is its seed and its number: `Campaign(folder).case(seed, number)` runs the one that a failure names.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import gzip
import io
import json
import os
import pickle
import re
import struct
import sys
import tracemalloc
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pipelines
from helpers import deadline

import minidl as ml
from minidl.cli import main
from minidl.core.torch_trace import load_torch
from minidl.data import formats
from minidl.pricing.corun import CoRun
from minidl.pricing.memory import Memory
from minidl.training import job, recorded

Rng = np.random.Generator
Bytes = Callable[[Rng, bytes], bytes]

#: reading a file takes at most this many times its size in memory, plus SPARE
MEMORY = {"plan": 10, "costs": 40, "config": 400, "trace": 40}
SPARE = 128 << 20
SMALL = ["--model", "mlp", "--model-arg", "preset=tiny", "--batch-size", "16"]
DATA = ["plan", "--model", "mlp", "--model-arg", "preset=tiny", "--batch-size", "4", "--costs", "analytic",
        "--data"]


# ------------------------------------------------------------------------------------------------------------ mutations
NUMBERS = ["-1", "0", "1e308", "-1e308", "1e999", "NaN", "nan", "inf", "Infinity", "-0.0", "9" * 30, "9" * 5000, "0x10",
           "1e-320", "0.1", "1_0", "99999999", "2147483648", "18446744073709551616", "null", "true", "false", "''",
           '""', "[]", "{}", '"5"', "[1, 2]", "٣", "1.5.2", "--2", "1@2", "@", " "]
WORDS = ["__import__('os').system('touch executed')", "!!python/object/apply:os.system ['touch executed']", "${HOME}",
         "$(touch executed)", "../../etc/passwd", "\x00", "\r", "\n\n", "\t", '"', "'", "\\", "é", "\U0001f600",
         "\u2028", "\x85", "\x1b[31m", "%s%n", "a" * 3000, "(" * 300, "[" * 20_000, "{'a':" * 500, ",", ",,,,", ";",
         ":", "=", "#", "(0F0;1F0)", "((0F0;1F0);2F0)", "0F0", "W", "cos\nsystem\n(S'touch executed'\ntR."]


def _place(rng: Rng, content: bytes, most: int = 64) -> tuple[int, int]:
    """A range of the content: anywhere, or near one of its ends, where headers are."""
    size, where = len(content), rng.random()
    begin = (int(rng.integers(0, size + 1)) if where < 0.6 else min(size, int(rng.integers(0, 200))) if where < 0.85
             else max(0, size - int(rng.integers(0, 200))))
    return begin, min(size, begin + int(rng.integers(1, most)))


def flip(rng: Rng, content: bytes) -> bytes:
    out = bytearray(content)
    for _ in range(int(rng.integers(1, 5))):
        if out:
            out[min(len(out) - 1, _place(rng, content)[0])] ^= 1 << int(rng.integers(0, 8))
    return bytes(out)


def overwrite(rng: Rng, content: bytes) -> bytes:
    begin, end = _place(rng, content)
    new = rng.bytes(end - begin) if rng.random() < 0.5 else bytes([int(rng.choice([0, 255, 32, 128]))]) * (end - begin)
    return content[:begin] + new + content[end:]


def delete(rng: Rng, content: bytes) -> bytes:
    begin, end = _place(rng, content, 300)
    return content[:begin] + content[end:]


def insert(rng: Rng, content: bytes) -> bytes:
    begin, _ = _place(rng, content)
    return content[:begin] + rng.bytes(int(rng.integers(1, 50))) + content[begin:]


def repeat(rng: Rng, content: bytes) -> bytes:
    begin, end = _place(rng, content, 300)
    return content[:end] + content[begin:end] * int(rng.integers(1, 4)) + content[end:]


def swap(rng: Rng, content: bytes) -> bytes:
    (a, b), (c, d) = sorted([_place(rng, content), _place(rng, content)])
    return content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:] if b <= c else content


def truncate(rng: Rng, content: bytes) -> bytes:
    return content[: int(rng.integers(0, len(content) + 1))]


def foreign(rng: Rng, content: bytes) -> bytes:
    """Another file altogether."""
    kinds = [b"", b"\x00" * 1000, rng.bytes(500), b"PK\x03\x04" + content, b"\x1f\x8b" + content,
             pickle.dumps(Payload()), content[::-1], content * 3, b"%PDF-1.7\n", b"#!/bin/sh\ntouch executed\n",
             content.decode("latin-1").encode("utf-16"), b"\xef\xbb\xbf" + content, gzip.compress(content)]
    return kinds[int(rng.integers(0, len(kinds)))]


def number(rng: Rng, content: bytes) -> bytes:
    """A number of the text becomes another, or something else."""
    found = list(re.finditer(rb"-?\d+(\.\d+)?([eE][-+]?\d+)?|true|false|null", content))
    if not found:
        return flip(rng, content)
    match = found[int(rng.integers(0, len(found)))]
    return content[: match.start()] + str(rng.choice(NUMBERS)).encode() + content[match.end() :]


def word(rng: Rng, content: bytes) -> bytes:
    """A word of the text becomes another, or something is put between."""
    found = list(re.finditer(rb"[A-Za-z_]\w*", content))
    new = WORDS[int(rng.integers(0, len(WORDS)))].encode()
    if not found or rng.random() < 0.4:
        begin, _ = _place(rng, content)
        return content[:begin] + new + content[begin:]
    match = found[int(rng.integers(0, len(found)))]
    if rng.random() < 0.3:
        new = found[int(rng.integers(0, len(found)))][0]
    return content[: match.start()] + new + content[match.end() :]


def lines(rng: Rng, content: bytes) -> bytes:
    """Lines swapped, doubled or gone; another end of line."""
    rows = content.split(b"\n")
    i, j = (int(rng.integers(0, len(rows))) for _ in range(2))
    how = int(rng.integers(0, 5))
    if how == 0:
        rows[i], rows[j] = rows[j], rows[i]
    elif how == 1:
        rows.insert(i, rows[j])
    elif how == 2:
        del rows[i]
    else:
        return content.replace(b"\n", [b"\r\n", b"\r"][how - 3])
    return b"\n".join(rows)


BINARY: tuple[Bytes, ...] = (flip, flip, overwrite, delete, insert, repeat, swap, truncate, foreign)
TEXT: tuple[Bytes, ...] = (*BINARY, number, number, number, number, word, word, word, lines, lines)


def mutated(rng: Rng, content: bytes, how: tuple[Bytes, ...]) -> bytes:
    for _ in range(int(rng.choice([1, 1, 1, 2, 3]))):
        content = how[int(rng.integers(0, len(how)))](rng, content)
    return content


class Payload:
    """What a pickle machine would execute."""

    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


# -------------------------------------------------------------------------------------------------------------- formats
@dataclass
class Format:
    """`whole`: a file's bytes; `mutate`: another content of it; `argv`: the command that reads it, from the folder that
    it is put in as `name`; or `act`, a call in place of it. `memory`: what the whole command may take, the SPARE that
    is stated."""

    name: str
    whole: bytes
    argv: list[str]
    mutate: Callable[[Rng, bytes], bytes]
    beside: dict[str, bytes]
    memory: int
    act: Callable[[Path], Any] | None = None


def text(rng: Rng, content: bytes) -> bytes:
    return mutated(rng, content, TEXT)


def binary(rng: Rng, content: bytes) -> bytes:
    return mutated(rng, content, BINARY)


def packed(rng: Rng, content: bytes) -> bytes:
    """Gzip: outside, or inside, where the checksum is right."""
    inner = TEXT if gzip.decompress(content)[:1] == b"{" else BINARY
    return (gzip.compress(mutated(rng, gzip.decompress(content), inner), 1, mtime=0) if rng.random() < 0.6
            else binary(rng, content))


def npz(rng: Rng, content: bytes) -> bytes:
    """A zip: outside, or one of its members, header or numbers, where the checksums are right."""
    if rng.random() < 0.4:
        return binary(rng, content)
    out = io.BytesIO()
    with (zipfile.ZipFile(io.BytesIO(content)) as old,
          zipfile.ZipFile(out, "w", int(rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))) as new):
        chosen = str(rng.choice(old.namelist()))
        for name in old.namelist():
            member = old.read(name)
            if name == chosen:
                head = 128 if rng.random() < 0.7 else len(member)
                member = mutated(rng, member[:head], TEXT) + member[head:]
            new.writestr(name, member)
    return out.getvalue()


def safetensors(rng: Rng, content: bytes) -> bytes:
    """Outside, or the JSON header with its length right."""
    if rng.random() < 0.4:
        return binary(rng, content)
    size = struct.unpack("<Q", content[:8])[0]
    header = mutated(rng, content[8 : 8 + size], TEXT)
    return struct.pack("<Q", len(header)) + header + content[8 + size :]


def quiet(argv: list[str]) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    return code, out.getvalue(), err.getvalue()


def every_format(folder: Path) -> dict[str, Format]:
    """Whole files, made by the program itself where it writes them."""
    made: dict[str, Format] = {}

    def add(kind: str, name: str, whole: bytes, argv: list[str], mutate: Any, memory: int = 0, act: Any = None,
            **beside: bytes) -> None:
        made[kind] = Format(name, whole, argv, mutate, beside, memory or SPARE, act)

    def written(argv: list[str], flag: str, name: str) -> bytes:
        assert quiet([*argv, flag, str(folder / name)])[0] == 0, argv
        return (folder / name).read_bytes()

    analytic = [*SMALL, "--costs", "analytic"]
    plan = written(["plan", *analytic, "--scheduler", "multi_stream"], "--save", "plan.csv")
    add("plan", "plan.csv", plan, ["check", "plan.csv", *SMALL], text)
    late = written(["plan", *analytic, "--scheduler", "multi_region"], "--save", "late.csv")
    add("plan with late tasks", "plan.csv", late, ["check", "plan.csv", *SMALL], text)
    shape = ["--ranks", "3", "--micro-batches", "4"]
    pipe = written(["plan", "--scheduler", "zb_h1", *shape], "--save", "pipe.csv")
    add("pipeline", "plan.csv", pipe, ["check", "plan.csv", *shape], text)
    grid = ml.schedulers.pipeline.to_torch(pipelines.plan("dualpipe_v", 2, 4).schedule)
    add("grid", "grid.csv", grid.encode(),
        ["check", "grid.csv", "--ranks", "2", "--micro-batches", "4", "--chunks", "2"], text)
    network = [*analytic, "--model-arg", "layers=6", *shape]
    cuts = written(["plan", "--scheduler", "one_f_one_b", *network], "--save", "cuts.csv")
    add("pipeline of a network", "plan.csv", cuts, ["check", "plan.csv", *network], text)
    costs = written(["plan", *analytic, "--scheduler", "multi_region"], "--save-costs", "costs.json")
    add("costs", "costs.json", costs, ["plan", *SMALL, "--scheduler", "multi_region", "--costs", "costs.json"], text)
    graph = recorded.Recorded(job.Job(model_args={"preset": "tiny"}, batch_size=16)).graph
    given = ml.CostModel({t.name: 1.5 for t in graph}, {"F": [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0], "U": 3.0},
                         ml.Link(0.5, 100.0), corun=CoRun(
                             {"0W0": "w", "1F0": "f"}, {"w": {"f": 1.5}, "f": {"w": 1.2}}),
                         launch=0.5, sync=0.1, wake=2.0, step=3.0, memory=Memory(8e3, 9e3))
    given.save(folder / "given.json")
    add("costs of tasks and pairs", "costs.json", (folder / "given.json").read_bytes(),
        ["simulate", *SMALL, "--scheduler", "multi_stream", "--costs", "costs.json"], text)
    config = ('model = "mlp"\nbatch-size = 16\ncosts = "analytic"\nscheduler = "multi_stream"\nstreams = 3\n'
              'memory-limit = "1GiB"\noptimizer = "adam"\n'
              'fusion = "none"\ndtype = "float32"\n[model-arg]\npreset = "tiny"\n[scheduler-arg]\n')
    add("config", "run.toml", config.encode(), ["plan", "--config", "run.toml"], text)
    shape_file = ("ranks = 2\nmicro-batches = 4\nscheduler = 'zb_auto'\nforward = [1, 2]\noutput-grad = 1.5\n"
                  "weight-grad = 1\nlatency = 0.25\nactivation-cap = 3\n")
    add("config of a pipeline", "run.toml", shape_file.encode(), ["simulate", "--config", "run.toml"], text)

    train = ["train", *analytic, "--checkpoint", "run", "--steps"]
    with contextlib.chdir(folder):
        assert quiet([*train, "2", "--optimizer", "adam"])[0] == 0
    saved = (folder / "run" / ml.checkpoint.NAME).read_bytes()
    add("checkpoint", f"run/{ml.checkpoint.NAME}", saved, [*train, "3", "--optimizer", "adam", "--resume"], safetensors,
        memory=2 * SPARE)

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (20, 8, 8), np.uint8), (np.arange(20) % 10).astype(np.uint8)
    for kind, save, dtype in (("npz", np.savez, np.uint8), ("npz, compressed", np.savez_compressed, np.float64)):
        stream = io.BytesIO()
        save(stream, x_train=x.astype(dtype), y_train=y, x_test=x[:5].astype(dtype), y_test=y[:5])
        add(kind, "a.npz", stream.getvalue(), [*DATA, "a.npz"], npz, memory=formats.SPARE // 4)
    images = struct.pack(">BBBBIII", 0, 0, 8, 3, *x.shape) + x.tobytes()
    labels = struct.pack(">BBBBI", 0, 0, 8, 1, len(y)) + y.tobytes()
    mnist = {"data/train-images-idx3-ubyte": images, "data/train-labels-idx1-ubyte": labels}
    for i, name in enumerate(mnist):
        other = {n: c for n, c in mnist.items() if n != name}
        add(f"idx {i}", name, mnist[name], [*DATA, "mnist"], binary, memory=formats.SPARE // 4, **other)
        add(f"idx {i}, gzipped", f"{name}.gz", gzip.compress(mnist[name], mtime=0), [*DATA, "mnist"], packed,
            memory=formats.SPARE // 4, **other)
    pixels = rng.integers(0, 256, (5, 3072), np.uint8)
    batches = {f"data/data_batch_{i}": pickle.dumps({b"data": pixels, b"labels": [3, 1, 4, 1, 5]},
                                                    protocol=2 if i % 2 else 5) for i in range(1, 6)}
    for i in (1, 2):
        name = f"data/data_batch_{i}"
        other = {n: c for n, c in batches.items() if n != name}
        add(f"cifar {i}", name, batches[name], [*DATA, "cifar10"], binary, memory=formats.SPARE, **other)
    timeline = ml.simulate(graph, ml.schedulers.multi_stream(graph), ml.CostModel.analytic())
    for kind, name, mutate in (("trace", "t.json", text), ("trace, gzipped", "t.json.gz", packed)):
        timeline.save(folder / name)
        add(kind, name, (folder / name).read_bytes(), [], mutate, act=lambda path: ml.Timeline.load(path).report())
    others = {"baseTimeNanoseconds": 10**18, "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 5, "ts": 0.5, "dur": 9, "args": {}},
        {"ph": "B", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 5, "ts": 1, "args":
            {"correlation": 1}}, {"ph": "E", "pid": 1, "tid": 5, "ts": 2.25},
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "pid": 0, "tid": 7, "ts": 3, "dur": 4,
         "args": {"correlation": 1, "device": 0, "stream": 7, "Process Group Name": "0"}}]}
    raw = json.dumps(others, indent=1).encode()
    for kind, name, whole, change in (("trace of torch", "t.json", raw, text),
                                      ("trace of torch, gzipped", "t.json.gz", gzip.compress(raw, mtime=0), packed)):
        add(kind, name, whole, [], change, act=lambda path: load_torch([path]).report())
    return made


# ------------------------------------------------------------------------------------------------------ what is watched
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pickle.find_class",
             "socket.connect", "os.kill", "os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.rmtree")
_seen: list[str] | None = None  #: what was done that must not be, while somebody looks


def _numba_loads() -> bool:
    """Whether numba reads a compiled function from its own cache, which is a pickle: the first use of a lane, at any
    time."""
    frame: Any = sys._getframe(2)
    while frame:
        if frame.f_globals.get("__name__") == "numba.core.caching":
            return True
        frame = frame.f_back
    return False


def _audit(event: str, arguments: Any) -> None:
    if _seen is None:
        return
    if event in FORBIDDEN and not _numba_loads():
        _seen.append(f"{event} {str(arguments)[:200]}")
    elif (event == "open" and isinstance(arguments[2], int)
          and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
          and not os.path.isdir(arguments[0])):  # there a file opens without a name, and goes with the process
        _seen.append(f"open to write {str(arguments[0])[:200]}")


_hooked: list[bool] = []


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """What is executed, written or removed meanwhile."""
    global _seen
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked.append(True)
    _seen = found = []
    try:
        yield found
    finally:
        _seen = None


@dataclass
class Took:
    """Bytes of memory that something took at its peak."""

    bytes: int = 0


@contextlib.contextmanager
def measured() -> Iterator[Took]:
    """Memory that the process takes meanwhile, as the system counts it; as Python does where that cannot be asked for.

    What leaves meanwhile must not hide what comes: garbage of before stays, and free memory is given back first. Pages
    of libraries count for nothing; as many as a machine short of memory takes away meanwhile may hide as much of the
    rest."""
    took, collecting = Took(), gc.isenabled()
    gc.disable()
    try:
        with _resident(took) if os.access("/proc/self/clear_refs", os.W_OK) else _traced(took):
            yield took
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def _resident(took: Took) -> Iterator[None]:
    def bytes_of() -> dict[str, int]:
        text = Path("/proc/self/status").read_text()
        return {name: int(kilobytes) << 10 for name, kilobytes in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}

    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = bytes_of()
    yield
    after = bytes_of()
    took.bytes = after["VmHWM"] - before["RssAnon"] - max(now["VmRSS"] - now["RssAnon"] for now in (before, after))


@contextlib.contextmanager
def _traced(took: Took) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        took.bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class Campaign:
    """Cases in a folder of their own; `outcomes` counts, by format, how they ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "case"
        (folder / "made").mkdir(parents=True)
        self.formats = every_format(folder / "made")
        self.outcomes: Counter[tuple[str, str]] = Counter()
        for name in self.formats:  # whole files are read, and what is compiled or loaded once is there
            self._run(name, self.formats[name].whole, True)

    def case(self, seed: int, number: int) -> None:
        """One file, mutated. Raises AssertionError that names the case."""
        rng = np.random.default_rng([seed, number])
        name = sorted(self.formats)[number % len(self.formats)]
        content = self.formats[name].mutate(rng, self.formats[name].whole)
        try:
            self.outcomes[name, self._run(name, content)] += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}, case {number} ({name}): {type(error).__name__}: {error}") from error

    def _run(self, name: str, content: bytes, whole: bool = False) -> str:
        chosen = self.formats[name]
        for path in sorted(self.folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        for file, inside in {chosen.name: content, **chosen.beside}.items():
            (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / file).write_bytes(inside)
        before = contents(self.folder)
        with contextlib.chdir(self.folder), deadline(120), measured() as took, watched() as done:
            if chosen.act:
                code, out, err = 0, "", ""
                try:
                    chosen.act(Path(chosen.name))
                except (ValueError, OSError) as error:
                    code, err = 2, f"minidl: {error}\n"
            else:
                code, out, err = quiet(chosen.argv)
        saves = code == 0 and name == "checkpoint"
        writes = [d for d in done if "__pycache__" not in d and not (name == "checkpoint" and (".lock" in d or saves))]
        assert not writes, writes
        assert saves or contents(self.folder) == before, "files changed"
        assert not (self.folder / "executed").exists()
        if whole:
            assert code == 0, f"{name}: {err}"
        else:
            assert took.bytes <= chosen.memory, f"{took.bytes:,} bytes of memory for a file of {len(content):,}"
        assert code in ((0, 1, 2) if "check" in chosen.argv[:1] else (0, 2)), code
        if code == 2:
            assert out == "", out
            *notes, line = err.splitlines()
            assert line.startswith("minidl: "), err
            assert len(line) < 1500, f"a line of {len(line)} characters"
            assert not line.startswith("minidl: Traceback")
            assert all("resized and repeated" in note for note in notes), err
        return {0: "read", 1: "not valid", 2: "refused"}[code]


def campaign(folder: Path, seed: int, cases: int) -> Campaign:
    """Cases 0 to `cases` of a seed."""
    running = Campaign(folder)
    for case in range(cases):
        running.case(seed, case)
    return running
