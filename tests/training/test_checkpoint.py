"""Checkpoints: a resumed run has the bits of one that went on; a bad file or full disk is one line, nothing changes."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from helpers import bits, drawn, small_files
from hypothesis import given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl import checkpoint, data, nn, optim
from minidl.training.checkpoint import CheckpointError, claim


class Net(nn.Module):
    """Linear layers, layer norm, batch norm with running statistics, dropout."""

    def __init__(self, width: int = 8) -> None:
        self.first = nn.Linear(64, width)
        self.running = nn.BatchNorm1d(width)
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, 10)

    def forward(self, x: Any) -> Any:
        return self.last(nn.dropout(self.norm(self.running(self.first(x.flatten(1)))).gelu(), 0.3))


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01, max_norm=1.0),
    "adam": lambda p: optim.Adam(p, 0.01),
    "adamw": lambda p: optim.AdamW(p, 0.01, max_norm=0.5),
    "muon": lambda p: optim.Muon([q for q in p if len(q.shape) == 2], 0.01, others=[q for q in p if len(q.shape) != 2]),
}


class Run:
    """One run from its seed: `go(n)` makes n steps, recorded or eager, by a learning-rate schedule."""

    def __init__(self, optimizer: str = "adamw", recorded: bool = True, seed: int = 3, width: int = 8) -> None:
        ml.seed(seed)
        self.model = Net(width)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.loader = data.load("digits", batch_size=300, seed=seed)
        self.rate = optim.warmup(optim.cosine(0.1, 9), 3)
        self.done = 0

        def step(x: Any, y: Any) -> Any:
            loss = nn.cross_entropy(self.model(x), y, 0.1)
            loss.backward()
            self.optimizer.step()
            return loss

        example = next(self.loader)
        self.loader.restore({"position": 0})
        self.step = ml.SequentialExecutor(ml.record(step, *example)) if recorded else lambda x, y: step(ml.array(x),
                                                                                                        ml.array(y))

    def go(self, steps: int) -> list[bytes]:
        losses = []
        for _ in range(steps):
            self.optimizer.lr = self.rate(self.done)
            losses.append(bits(self.step(*next(self.loader))))
            self.done += 1
        return losses

    def save(self, path: Path, **more: Any) -> Path:
        return checkpoint.save(path, self.model, self.optimizer, step=self.done, loader=self.loader, **more)

    def load(self, path: Path) -> checkpoint.Checkpoint:
        found = checkpoint.load(path, self.model, self.optimizer, loader=self.loader)
        self.done = found.step
        return found

    def state(self) -> bytes:
        tensors = [*self.model.named_tensors(), *self.optimizer.named_tensors()]
        counter = bytes(ml.autograd.random.dropout_counter().data[:8])
        return bits(*(t for _, t in tensors)) + counter + json.dumps(self.loader.state()).encode()


@pytest.mark.few(2)
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resume_gives_the_bits_of_an_uninterrupted_run(optimizer: str, recorded: bool, tmp_path: Path) -> None:
    whole = Run(optimizer, recorded)
    losses = whole.go(12)  # into the third epoch
    end = whole.state()

    first = Run(optimizer, recorded)
    assert first.go(5) == losses[:5]
    file = first.save(tmp_path, schedule="rank,lane,task\n0,main,0F0\n")
    assert file == tmp_path / checkpoint.NAME
    second = Run(optimizer, not recorded)  # what comes after may be run in the other way
    second.go(2)
    found = second.load(tmp_path)
    assert (found.step, found.seed, found.schedule) == (5, 3, "rank,lane,task\n0,main,0F0\n")
    assert found == checkpoint.peek(file)
    assert second.go(7) == losses[5:]
    assert second.state() == end


def test_numbers_of_numpy_are_kept_as_they_are(tmp_path: Path) -> None:
    """A mean of float32 numbers is no float of Python."""
    ml.seed(0)
    model = nn.Linear(2, 2)
    for dtype in ("float16", "float32", "float64", "int64"):
        value = np.array([1.75]).astype(dtype)[0]
        file = checkpoint.save(tmp_path / "a.safetensors", model, step=np.int64(3), test={"loss": value})
        assert checkpoint.peek(file) == checkpoint.Checkpoint(3, 0, None, None, None, None, {"loss": float(value)})
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path / "b.safetensors", model, step=2.5)  # type: ignore[arg-type]
    assert not (tmp_path / "b.safetensors").exists()


@pytest.mark.parametrize("texts", [{"about": {"epoch": 3}}, {"about": {"config": {"lr": 0.1}}}, {"schedule": ["0F0"]},
                                   {"scheduler": 3}])
def test_what_is_no_text_is_refused_and_leaves_the_old_file(texts: dict[str, Any], tmp_path: Path) -> None:
    """No file of safetensors could be read with it."""
    file = checkpoint.save(tmp_path / "a.safetensors", nn.Linear(2, 2), about={"epoch": "2"})
    with pytest.raises(CheckpointError, match="cannot save '.*', a (int|dict|list); it must be a text"):
        checkpoint.save(file, nn.Linear(2, 2), **texts)
    assert checkpoint.peek(file).about == {"epoch": "2"}


def test_a_model_alone_takes_a_checkpoint_of_any_seed(tmp_path: Path) -> None:
    run = Run()
    run.go(1)
    run.save(tmp_path)
    weights = run.model.state_dict()
    ml.seed(9)
    model = Net()
    counter = bytes(ml.autograd.random.dropout_counter().data[:8])
    assert checkpoint.load(tmp_path, model).step == 1
    assert all((model.state_dict()[name] == value).all() for name, value in weights.items())
    assert bytes(ml.autograd.random.dropout_counter().data[:8]) == counter


def refused(run: Run, path: Path, *mentions: str) -> str:
    """The one line that a load is refused with; nothing has changed."""
    before = run.state()
    with pytest.raises(CheckpointError) as caught:
        run.load(path)
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 500
    assert str(path) in line
    for mention in mentions:
        assert mention in line, line
    assert run.state() == before
    return line


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    Run("adamw").save(tmp_path)
    refused(Run("adam"), tmp_path, "optimizer is 'AdamW' in the file, 'Adam' in this run")
    refused(Run("adamw", seed=4), tmp_path, "seed is 3 in the file, 4 in this run")
    refused(Run("adamw", width=7), tmp_path,
            "model.first.weight is float32 (8, 64) in the file, float32 (7, 64) in this run")
    other = Run("adamw")
    other.loader = data.load("digits", batch_size=100, seed=3)
    refused(other, tmp_path, "data batch_size is 300 in the file, 100 in this run")
    other = Run("adamw")
    del other.model.norm.bias
    refused(other, tmp_path, "it has 'model.norm.bias'")
    other = Run("adamw")
    other.model.more = nn.Linear(1, 1)
    refused(other, tmp_path, "it lacks 'model.more.bias'")
    checkpoint.save(tmp_path / "x.safetensors", (bare := Run("adamw")).model, bare.optimizer)
    refused(bare, tmp_path / "x.safetensors", "does not say its place in the data")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> bytes:
    run = Run("sgd", recorded=False)
    run.go(1)
    return run.save(tmp_path_factory.mktemp("saved")).read_bytes()


def rewritten(content: bytes, change: Any) -> bytes:
    """The file with another header."""
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + size :]


def about(**changes: Any) -> Any:
    def change(header: Any) -> None:
        own = json.loads(header["__metadata__"]["minidl"])
        header["__metadata__"]["minidl"] = json.dumps({**own, **changes})

    return change


def place(state: Any) -> Any:
    """Another place in the data."""

    def change(header: Any) -> None:
        about(loader={**json.loads(header["__metadata__"]["minidl"])["loader"], "state": state})(header)

    return change


HOSTILE: dict[str, Any] = {
    "empty": lambda c: b"",
    "short": lambda c: c[:5],
    "truncated": lambda c: c[:-9],
    "header only": lambda c: c[: 8 + struct.unpack("<Q", c[:8])[0]],
    "too long": lambda c: c + b"more",
    "huge header": lambda c: struct.pack("<Q", 2**62) + c[8:],
    "pickle": lambda c: b"cos\nsystem\n(S'touch /tmp/minidl_was_here'\ntR.",
    "zip": lambda c: b"PK\x03\x04" + c,
    "no metadata": lambda c: rewritten(c, lambda h: h.pop("__metadata__")),
    "foreign metadata": lambda c: rewritten(c, lambda h: h.update(__metadata__={"format": "pt"})),
    "metadata no json": lambda c: rewritten(c, lambda h: h["__metadata__"].update(minidl="{")),
    "metadata a list": lambda c: rewritten(c, lambda h: h["__metadata__"].update(minidl="[]")),
    "deep metadata": lambda c: rewritten(c, lambda h: h["__metadata__"].update(minidl="[" * 10**6)),
    "long number": lambda c: rewritten(c, lambda h: h["__metadata__"].update(minidl="9" * 10**5)),
    "another format": lambda c: rewritten(c, about(format=99)),
    "an older format": lambda c: rewritten(c, about(format=2)),
    "no step": lambda c: rewritten(c, about(step=None)),
    "negative step": lambda c: rewritten(c, about(step=-1)),
    "step true": lambda c: rewritten(c, about(step=True)),
    "loader text": lambda c: rewritten(c, about(loader="x")),
    "loader empty": lambda c: rewritten(c, about(loader={})),
    "loader place": lambda c: rewritten(c, place({"position": -1})),
    "loader place text": lambda c: rewritten(c, place("x")),
    "tensor out of the file": lambda c: rewritten(c, lambda h: h["model.last.bias"].update(data_offsets=[0, 10**12])),
    "tensors overlap": lambda c: rewritten(c, lambda h: h["model.last.bias"].update(
        data_offsets=h["model.norm.bias"]["data_offsets"])),
    "tensor of another type": lambda c: rewritten(c, lambda h: h["model.last.bias"].update(dtype="BF16", shape=[20])),
    "tensor of no type": lambda c: rewritten(c, lambda h: h["model.last.bias"].update(dtype="PY")),
    "tensor of another shape": lambda c: rewritten(c, lambda h: h["model.last.bias"].update(shape=[5, 2])),
    "tensor of huge shape": lambda c: rewritten(c, lambda h: h["model.last.bias"].update(shape=[2**40, 2**40])),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_bad_file_is_one_line_and_changes_nothing(how: str, saved: bytes, tmp_path: Path) -> None:
    file = tmp_path / "bad.safetensors"
    file.write_bytes(HOSTILE[how](saved))
    refused(Run("sgd", recorded=False), file)
    assert not Path("/tmp/minidl_was_here").exists()


def test_a_link_to_nowhere_is_no_place_to_save(tmp_path: Path) -> None:
    """As one to a disk that is not there; it was called a file."""
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    with pytest.raises(CheckpointError, match=r"runs: it is a link to nowhere, and a folder is needed$"), \
            claim(tmp_path / "runs"):
        pass
    assert not (tmp_path / "disk").exists()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    run = Run("sgd", recorded=False)
    refused(run, tmp_path / "nothing", "there is no checkpoint")
    os.mkfifo(tmp_path / "pipe.safetensors")
    refused(run, tmp_path / "pipe.safetensors", "not a regular file")
    (tmp_path / "folder.safetensors").mkdir()
    refused(run, tmp_path / "folder.safetensors", "not a regular file")
    with pytest.raises(CheckpointError, match="cannot save"):
        run.save(tmp_path / "folder.safetensors")


@settings(max_examples=drawn(150), deadline=None)
@given(draw=st.data())
def test_a_file_with_any_byte_changed_is_refused_or_fits(saved: bytes, draw: Any, tmp_path_factory: Any) -> None:
    """Whatever is flipped: one clear error and no change, or a load of just those tensors."""
    content = bytearray(saved)
    header = 8 + struct.unpack("<Q", saved[:8])[0]
    for _ in range(draw.draw(st.integers(1, 3))):
        content[draw.draw(st.integers(0, header - 1))] = draw.draw(st.integers(0, 255))
    if draw.draw(st.booleans()):
        del content[draw.draw(st.integers(0, len(content))) :]
    file = tmp_path_factory.mktemp("fuzz") / "f.safetensors"
    file.write_bytes(content)
    run = FUZZED.setdefault("run", Run("sgd", recorded=False))
    before = run.state()
    error = None
    try:
        run.load(file)
    except CheckpointError as caught:
        error = str(caught)
    assert error is None or ("\n" not in error and run.state() == before)


FUZZED: dict[str, Run] = {}


@contextmanager
def full_at(call: str) -> Iterator[None]:
    """A disk that is full at this call of the system."""
    if call == "write":
        with small_files(1000):
            yield
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(call, Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        yield


@pytest.mark.parametrize("call", ["write", "os.fsync", "os.replace", "minidl.system.files.tempfile.mkstemp"])
def test_a_full_disk_leaves_the_old_file(call: str, tmp_path: Path) -> None:
    run = Run("sgd", recorded=False)
    file = run.save(tmp_path)
    old = file.read_bytes()
    run.go(1)
    why = "File too large" if call == "write" else "No space left on device"
    with full_at(call), pytest.raises(CheckpointError, match=f"^cannot save .*: {why}; an earlier file is unchanged$"):
        run.save(tmp_path)
    assert os.listdir(tmp_path) == [checkpoint.NAME]
    assert file.read_bytes() == old
    run.save(tmp_path)
    assert file.read_bytes() != old


def test_saving_between_backward_and_update_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model(ml.array(np.ones((1, 2), np.float32))).sum().backward()
    with pytest.raises(CheckpointError, match="weight has a gradient that no update has used"):
        checkpoint.save(tmp_path, model)
    assert not os.listdir(tmp_path)
