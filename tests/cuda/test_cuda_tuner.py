"""Autotuning: the fastest of the first candidates, kept by key in memory and in a file, the same for every executor."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import cuda_blas
import cuda_runtime
import numpy as np
import pytest
from gpu_steps import Run, equal, trained
from helpers import IMPORTABLE, until

from minidl import schedulers
from minidl.core.graph import View
from minidl.devices import DeviceError
from minidl.devices.cuda import clock, tuner
from minidl.devices.cuda.tuner import Tuner
from minidl.kernels import cuda
from minidl.runtime.executors import GraphExecutor, StreamExecutor


class Refused(Exception):
    pass


class Driver:
    """Of a device on which nothing runs."""

    def __init__(self, **about: Any) -> None:
        self.about = {"name": "a GPU", "capability": 90, "memory_bytes": 1 << 36, "driver": 13000, **about}
        self.lock = threading.RLock()

    def alone(self) -> Any:
        return self.lock

    def describe(self) -> dict[str, Any]:
        return self.about

    def stream(self, priority: int) -> Any:
        return SimpleNamespace(number=0)

    def synchronize(self, stream: Any) -> None: ...


@pytest.fixture
def times(monkeypatch):
    """`times[name]`: microseconds of a candidate. Bound calls say who they are."""
    told = {"a": 10.0, "b": 9.0, "c": 8.0, "d": 11.0}
    monkeypatch.setattr(tuner, "capture", lambda driver, stream, call: None)
    monkeypatch.setattr(clock, "side_by_side", lambda driver, stream, calls: [told[call()] for call in calls])
    return told


def candidates(*names: str, asked: list[str] | None = None) -> Any:
    def bind(name: str) -> Any:
        if asked is not None:
            asked.append(name)

        def call() -> str:
            if name.startswith("refused"):
                raise Refused(name)
            return name[0]

        return call

    return lambda: ((name, lambda name=name: bind(name)) for name in names)


def made(library: str = "a library 1", **about: Any) -> Tuner:
    return Tuner(Driver(**about), library, Refused)


# ------------------------------------------------------------------------------------------------------------- choosing
def test_the_fastest_of_the_first_is_taken(cache, times):
    tuned = made()
    assert tuned.choose("three", candidates("a", "b", "c")) == "c"
    assert tuned.choose("one", candidates("a")) == "a"
    asked: list[str] = []
    eight = [f"a{i}" for i in range(7)] + ["b"]
    assert tuned.choose("many", candidates(*eight, "c", asked=asked)) == "b", "the ninth is not looked at"
    assert asked == eight


def test_noise_decides_nothing(cache, times):
    times["b"] = 9.8
    assert made().choose("k", candidates("a", "b")) == "a", "2 % faster than what the library names first"
    times["b"] = 9.6
    assert made().choose("l", candidates("a", "b")) == "b"


def test_what_refuses_is_passed_over(cache, times):
    assert made().choose("k", candidates("refused", "b", "a")) == "b"
    with pytest.raises(RuntimeError, match=r"'k2'.* cannot be run: refused 1"):
        made().choose("k2", candidates("refused 1", "refused 2"))
    with pytest.raises(RuntimeError, match="cannot be run: the library has no candidate"):
        made().choose("k3", candidates())
    assert made().choose("k2", candidates("a")) == "a", "nothing was kept of it"


def test_other_errors_are_told(cache, times):
    times.pop("d")
    with pytest.raises(KeyError):
        made().choose("k", candidates("a", "d"))
    assert made().choose("k", candidates("a", "b")) == "b"


# ----------------------------------------------------------------------------------------------------------------- file
def test_a_choice_is_made_once_for_what_it_depends_on(cache, times):
    asked: list[str] = []
    first = made()
    for tuned in (first, first, made()):
        assert tuned.choose(("conv", (3, 4), "float32"), candidates("a", "b", asked=asked)) == "b"
    assert asked == ["a", "b"]
    others = [({}, ("conv", (3, 5), "float32")), ({"library": "a library 2"}, ("conv", (3, 4), "float32")),
              *(({key: value}, ("conv", (3, 4), "float32"))
                for key, value in (("name", "another"), ("driver", 13010), ("memory_bytes", 5), ("capability", 100)))]
    for about, key in others:
        asked.clear()
        made(**about).choose(key, candidates("a", "b", asked=asked))
        assert asked == ["a", "b"], (about, key)


def test_the_file_says_what_was_timed(cache, times):
    made().choose("k", candidates("a", "refused", "c"))
    ((key, choice, named, microseconds),) = sqlite3.connect(cache).execute("select * from choices")
    assert key == '["a library 1", "a GPU", 90, 68719476736, 13000, "\'k\'"]'
    assert (choice, named, microseconds) == ("c", '["a", "c"]', "[10.0, 8.0]")


def test_what_cannot_be_had_any_more_is_forgotten(cache, times):
    tuned = made()
    assert tuned.choose("k", candidates("a", "b")) == "b"
    assert tuned.choose("k", candidates("a", "c"), lambda choice: choice != "b") == "c"
    assert made().choose("k", candidates("a", "b")) == "c"


def test_of_several_at_once_one_times_and_all_take_what_it_chose(cache, times, monkeypatch):
    """Threads as processes: each has the file open for itself."""
    timed, found, asked, look = [], [], [], Tuner._file

    def slow(driver: Any, stream: Any, calls: Any) -> list[float]:
        timed.append(threading.get_ident())
        until(lambda: len(asked) == 6, "six that ask for the file")
        return [float((i + len(timed)) % len(calls)) for i in range(len(calls))]  # another one each time

    monkeypatch.setattr(clock, "side_by_side", slow)
    monkeypatch.setattr(Tuner, "_file", lambda *args: asked.append(1) or look(*args))
    threads = [threading.Thread(target=lambda: found.append(made().choose("k", candidates("a", "b", "c"))))
               for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(timed) == 1
    assert len(found) == 6
    assert len(set(found)) == 1


def test_a_thread_that_captures_and_one_that_only_chooses_take_turns(cache, times, monkeypatch, capsys):
    """Both need the file and, to time, the device for themselves: neither may hold one and wait for the other."""
    tuned, begun, inside = made(), threading.Event(), threading.Event()
    monkeypatch.setattr(tuner, "WAIT", 0.5)
    timed = clock.side_by_side

    def alone(driver: Any, stream: Any, calls: Any) -> list[float]:
        with driver.alone():
            return timed(driver, stream, calls)

    def slowly() -> Any:
        begun.set()
        inside.wait(0.2)
        yield from candidates("a", "b")()

    def capturing() -> str:
        assert begun.wait(10)
        with tuned.driver.alone():
            inside.set()
            return tuned.choose("captured", candidates("a", "c"))

    monkeypatch.setattr(clock, "side_by_side", alone)
    with ThreadPoolExecutor(2) as pool:
        found = pool.submit(tuned.choose, "chosen", slowly), pool.submit(capturing)
        assert [each.result(30) for each in found] == ["b", "c"]
    assert "cannot be kept" not in capsys.readouterr().err


@pytest.mark.wide
def test_a_process_that_is_killed_while_it_times_leaves_nothing(cache, times):
    code = ("import sys, time, test_cuda_tuner as t\nfrom minidl.devices.cuda import tuner, clock\n"
            "tuner.capture = lambda *a: None\n"
            "def slow(driver, stream, calls):\n    print('here', flush=True)\n    time.sleep(60)\n"
            "clock.side_by_side = slow\nt.made().choose('k', t.candidates('a', 'b'))")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          env={**os.environ, "PYTHONPATH": IMPORTABLE}) as process:
        assert "here\n" in iter(process.stdout.readline, "")
        process.send_signal(signal.SIGKILL)
    assert made().choose("k", candidates("a", "c")) == "c"


def test_a_folder_that_cannot_be_written_is_told_once(monkeypatch, tmp_path, times, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINIDL_CACHE", str(tmp_path / "file"))
    tuned = made()
    assert tuned.choose("k", candidates("a", "b")) == "b"
    assert tuned.choose("l", candidates("a", "c")) == "c"
    assert tuned.choose("k", candidates("a")) == "b", "it is kept in memory"
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"minidl: choices of kernels cannot be kept, so another run may differ in the last bits"
                               f": {tmp_path}/file/choices.sqlite: ")
    assert lines[1:] == ["minidl: a library 1: each kernel is timed once on a GPU, when it is first needed"]


def test_a_file_that_is_none_of_ours_is_told(cache, times):
    cache.parent.mkdir()
    cache.write_text("something else entirely, long enough to be looked at" * 20)
    with pytest.raises(DeviceError,
                       match=f"{cache} is not a file of kernel choices .*; delete it, and a new one is made"):
        made().choose("k", candidates("a"))


def test_with_the_switch_the_first_that_runs_is_taken(cache, times, monkeypatch):
    """Nothing is timed, and no file is written."""
    monkeypatch.setenv("MINIDL_TUNE", "first")
    monkeypatch.setattr(clock, "side_by_side", lambda *_: pytest.fail("a candidate is timed"))
    assert made().choose("k", candidates("a", "b")) == "a"
    assert not cache.exists()


def test_the_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv("MINIDL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuner.folder() == tmp_path / "minidl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuner.folder() == tmp_path / ".cache" / "minidl"


# --------------------------------------------------------------------------------------------------------------- timing
def small_product(device: Any, **more: Any) -> cuda.Product:
    memory = device.allocate(4096)
    a, b, out = (device.array(memory, View(256 * i, (4, 4), (4, 1), 0, "float32")) for i in range(3))
    out.memory = memory
    return cuda.Product(a, b, out, **more)


def views(device: Any) -> list[Any]:
    memory = device.allocate(1 << 16)
    found = [device.array(memory, View(offset, shape, strides, 0, dtype)) for offset, shape, strides, dtype in (
        (0, (3, 4), (4, 1), "float32"), (1, (2, 5, 3), (40, 8, 2), "float32"), (6, (4, 3), (1, 4), "float64"),
        (3, (7,), (1,), "float16"), (0, (0, 3), (3, 1), "float32"), (0, (1 << 13,), (1,), "float32"))]
    for array in found:
        array.memory = memory
    return found


def test_arrays_are_like_those_that_they_stand_for(cache, monkeypatch):
    monkeypatch.setattr(tuner, "BLOCK", 4096)
    device = cuda_runtime.device()
    tuned, given = Tuner(device.driver, "a library"), views(device)
    found = tuned.elsewhere(given)
    device.synchronize()
    for there, array in zip(found, given, strict=True):
        assert (there.shape, there.strides, there.dtype) == (array.shape, array.strides, array.dtype)
        assert there.ctypes.data % 256 == array.ctypes.data % 256
        assert not np.shares_memory(there.view(np.ndarray), array.view(np.ndarray))
        values = there.view(np.ndarray).astype(float)
        assert np.isfinite(values).all()
        assert values.size == 0 or values.std() > 0.3, "not zeros"


def test_timing_changes_nobodys_numbers(cache):
    device = cuda_runtime.device()
    product = small_product(device, accumulate=True)
    device.write(product.out, np.arange(16.0).reshape(4, 4))
    device._thunk(product, device.main)
    np.testing.assert_array_equal(device.read(product.out), np.arange(16.0).reshape(4, 4))


def test_an_idle_chip_is_warmed_before_timing(monkeypatch):
    """And nothing else runs beside what is timed."""
    device = cuda_runtime.device()
    driver, stream, other = device.driver, device.driver.stream(), device.driver.stream()
    monkeypatch.setattr(clock, "FILLED", 256)
    memory = device.allocate(64)
    fills: list[int] = []
    zeros = driver.zeros
    monkeypatch.setattr(driver, "zeros", lambda array, on: fills.append(on.number) or zeros(array, on))

    def timed() -> int:
        fills.clear()
        zeros(memory, other)()
        clock.warm(driver, stream)
        assert not driver.machine.queues[other.ptr].ops
        return len(fills)

    monkeypatch.setattr(clock, "WARM", 1e-4)
    clock._timed.pop(driver, None)
    assert timed() == 1
    assert timed() == 0, "it is still warm"
    monkeypatch.setattr(clock, "IDLE", 0.0)
    assert timed() == 1


def test_long_calls_are_repeated_less(monkeypatch):
    lengths: list[int] = []

    def replayed(driver: Any, stream: Any, *fills: Any) -> list[float]:
        issued: list[float] = []
        calls.append(issued)
        for fill in fills:
            fill()
        lengths.append(len(issued) // 2)
        return [sum(issued[: len(issued) // 2])] * 2

    calls: list[Any] = []
    monkeypatch.setattr(clock, "replayed", replayed)
    monkeypatch.setattr(clock, "REPEATS", 20)
    for each, repeats in ((1.0, [1, 20]), (150.0, [1, 13]), (5000.0, [1])):
        lengths.clear()
        assert clock.side_by_side(None, None, [lambda each=each: calls[-1].append(each)] * 2) == [each, each]
        assert lengths == repeats


# ------------------------------------------------------------------------------------------------------------ executors
@pytest.mark.slow
def test_every_executor_takes_the_same_kernels(cache):
    """On one device, and on another one that finds them in the file; with others the last bits differ."""
    first = cuda_runtime.device(1)
    small = {"model": "lenet", "steps": 2}
    wanted = trained(first, **small)
    assert equal(trained(first, GraphExecutor, **small), wanted)
    asked = first._products().lt.blas.asked
    assert equal(trained(first, StreamExecutor, schedulers.in_order, **small), wanted)
    assert first._products().lt.blas.asked == asked, "nothing is chosen again"
    assert equal(trained(cuda_runtime.device(2), StreamExecutor, **small), wanted)
    known = sqlite3.connect(cache)
    rows = known.execute("select key, choice, candidates from choices").fetchall()
    assert {len(json.loads(row[2])) for row in rows} == {cuda_blas.NAMED + 1, 3}  # and our kernel for small products
    for key, choice, named in rows:
        others = [other for other in json.loads(named) if other != choice]
        known.execute("update choices set choice = ? where key = ?", (others[-1], key))
    known.commit()
    assert not equal(trained(cuda_runtime.device(1), **small), wanted)


def test_a_captured_step_chooses_nothing(cache, monkeypatch):
    device = cuda_runtime.device(1)
    run = Run(device, "lenet")
    step = run.executor(GraphExecutor)
    monkeypatch.setattr(Tuner, "choose", lambda *arguments: pytest.fail("a step chooses"))
    run.train(step, 2)


def test_an_algorithm_of_another_product_is_chosen_again(cache):
    """The file may hold what this version of the library does not take."""
    device = cuda_runtime.device()
    product = small_product(device)
    device._thunk(product, device.main)
    known = sqlite3.connect(cache)
    ((good,),) = known.execute("select choice from choices").fetchall()
    known.execute("update choices set choice = ?", (bytes(64).hex(),))
    known.commit()
    known.close()
    other = cuda_runtime.device()
    again = small_product(other)
    other._thunk(again, other.main)()
    ((choice,),) = sqlite3.connect(cache).execute("select choice from choices").fetchall()
    assert choice != bytes(64).hex()
    assert len(choice) == len(good)
