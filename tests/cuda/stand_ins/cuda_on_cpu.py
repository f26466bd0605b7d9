"""CUDA launches run on the CPU: sources compiled by g++ against `cuda_stand_in.h`, products and convolutions by NumPy.

So every kernel's indices, barriers and arguments are tried without a GPU. `CudaOnCpu` is a device whose memory is
NumPy's and whose kernels are CUDA's; it says nothing about streams, cuBLAS, cuDNN or time.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidl.core.graph import Launch
from minidl.devices.cuda.device import Cuda
from minidl.devices.device import CPU, get
from minidl.kernels import KERNELS, Kernel, Thunk, Work, cuda
from minidl.kernels.conv import Geometry

HEADER = Path(__file__).with_name("cuda_stand_in.h")
FLAGS = ("-std=c++20", "-O1", "-g1", "-w", "-ffp-contract=off", "-U_FORTIFY_SOURCE")
LIBRARY = ("-fPIC", "-shared")
BEFORE = ctypes.CFUNCTYPE(None)
_OTHER = ThreadPoolExecutor(1)
FLAG = np.zeros(1, np.int32)  #: in the place of `cuda.FLAG`


def not_finite() -> bool:
    """Whether an update has used a gradient that is not finite since this was asked last."""
    if os.environ.get("MINIDL_TEST_GPU"):
        return bool(get("cuda").not_finite())
    found, FLAG[0] = bool(FLAG[0]), 0
    return found


@contextmanager
def sources(texts: dict[str, str]) -> Iterator[None]:
    """Further sources, by their name, while this lasts; they may include those that there are."""
    read = cuda.text

    def text(source: str) -> str:
        if source not in texts:
            return read(source)
        return re.sub(r'^#include "(\w+\.cuh)"$', lambda m: read(m[1]), texts[source], flags=re.MULTILINE)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "text", text)
        yield


def instances(source: str, kernel: str) -> list[str]:
    """What is compiled together: the kernel, and if it has one type alone, all others of its source for that type, each
    with all numbers of columns at once."""
    name, _, given = kernel.partition("<")
    found = cuda.kernels_of(source)
    ways = {(): [""], ("typename T",): ["<{}>"], ("typename T", "bool WHOLE"): ["<{}, false>", "<{}, true>"]}
    if found[name][0] not in ways:
        return [kernel]
    kind = given.rstrip(">").partition(",")[0] or "float"
    return [n + way.format(kind) for n, (t, _) in found.items() for way in ways.get(t, ())]


_SHARED = re.compile(
    r"(?<!extern )\b__shared__\s+((?:__align__\([^)]*\)\s+)?)"
    r"([\w\s:<>]+?)\s*(\w+\s*(?:\[[^;]*\])?(?:\s*,\s*\w+\s*(?:\[[^;]*\])?)*)\s*;")


def with_shared_memory(code: str) -> str:
    """`__shared__ T a[8], b;` as `SHARED(1, a, T[8]); SHARED(2, b, T);`: memory of the block that runs."""
    count = itertools.count(1)

    def declare(found: re.Match[str]) -> str:
        names = re.findall(r"(\w+)\s*((?:\[[^\]]*\]\s*)*)(?:,|$)", found[3])
        return " ".join(f"SHARED({next(count)}, {name}, {found[2]}{size});" for name, size in names)

    done = _SHARED.sub(declare, code)
    left = [line for line in done.splitlines() if "__shared__" in line and "extern" not in line]
    assert not left, f"one variable each, please: {left}"
    return done


def program(source: str, kernels: Sequence[str], real_threads: bool = False) -> str:
    """C++ in which `run(i, ...)` launches kernel i and `bytes_of(i, n)` is the size of its argument n."""
    def switch(call: str) -> str:
        return "".join(f"    case {i}: return stand_in::{call.format(name)};\n" for i, name in enumerate(kernels))

    return (f'{"#define REAL_THREADS" if real_threads else ""}\n#include "{HEADER.name}"\n'
            f'{with_shared_memory(cuda.text(source))}\n'
            f'extern "C" const char* run(int i, void** a, const unsigned* g, const unsigned* t, unsigned long '
            f'shared, unsigned seed, void (*before)()) {{\n'
            f'  switch (i) {{\n{switch("call(&{}, a, g, t, shared, seed, before)")}  }}\n'
            f'  return "no such kernel";\n}}\n'
            f'extern "C" size_t bytes_of(int i, int n) {{\n  switch (i) {{\n'
            f'{switch("bytes_of(&{}, n)")}  }}\n  return 0;\n}}\n')


def _once(key: Sequence[str], make: Callable[[Path], Any]) -> Path:
    """`make(path)` writes a file, once for each key; all processes share it, and wait for the one that makes it."""
    folder = Path(tempfile.gettempdir()) / f"minidl-cuda-on-cpu-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    made = folder / hashlib.sha256("\0".join([HEADER.read_text(), *key]).encode()).hexdigest()[:24]
    if not made.exists():
        with open(f"{made}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    make(Path(scratch) / "made")
                    os.replace(f"{scratch}/made", made)
    return made


def _compile(*arguments: str) -> None:
    done = subprocess.run(["g++", *FLAGS, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]


@cache
def _header(flags: tuple[str, ...]) -> Path:
    """A folder with the header, compiled in advance: half of what a kernel's compilation would take."""
    def make(folder: Path) -> None:
        folder.mkdir()
        shutil.copy(HEADER, folder)
        _compile(*flags, "-x", "c++-header", str(folder / HEADER.name), "-o", str(folder / f"{HEADER.name}.gch"))

    return _once(("header", *FLAGS, *flags), make)


@cache
def build(code: str, flags: tuple[str, ...] = LIBRARY) -> Path:
    """Compiles once for each content, also across processes."""
    if shutil.which("g++") is None:
        pytest.skip("CUDA kernels are not run on the CPU: g++ is not installed")

    def make(built: Path) -> None:
        path = built.with_name("program.cpp")
        path.write_text(code)
        _compile(*flags, "-I", str(_header(flags) if flags == LIBRARY else HEADER.parent), str(path), "-o", str(built))

    return _once((code, *FLAGS, *flags), make)


@cache
def _library(source: str, kernels: tuple[str, ...]) -> Any:
    library = ctypes.CDLL(str(build(program(source, kernels))))
    library.run.restype = ctypes.c_char_p
    library.run.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
                            ctypes.c_ulong, ctypes.c_uint, BEFORE]
    library.bytes_of.restype = ctypes.c_size_t
    return library


def run_grid(grid: cuda.Grid, packed: cuda.Packed | None = None, seed: int = 0) -> None:
    """Runs one launch to its end; `seed` decides the order of its threads."""
    packed = packed or cuda.Packed(grid)
    places = (ctypes.c_void_p * max(len(packed.values), 1)).from_address(packed.address)
    values = [ctypes.string_at(place, ctypes.sizeof(v)) for place, v in zip(places, packed.values, strict=False)]
    run_packed(grid.source, grid.kernel, grid.blocks, grid.threads, grid.shared, values, seed)


def run_packed(source: str, kernel: str, blocks: Sequence[int], threads: Sequence[int], shared: int,
               values: Sequence[bytes], seed: int, before: Callable[[], None] | None = None) -> None:
    """The same from the bytes of each argument, which must be as many as its parameter has. `before`: runs the launch
    before this one, which starts early: it is called when this one waits. A launch that does not wait is an error."""
    kernels = tuple(instances(source, kernel))
    library, number = _library(source, kernels), kernels.index(kernel)
    for n, value in enumerate(values):
        size = library.bytes_of(number, n)
        assert len(value) == size, (f"{kernel}: argument {n}, {cuda.signature(source, kernel)[n]}, has "
                                    f"{size} bytes, not {len(value)}")
    held = [ctypes.create_string_buffer(value, len(value)) for value in values]
    pointers = (ctypes.c_void_p * max(len(held), 1))(*map(ctypes.addressof, held))
    geometry = [np.array((*v, 1, 1)[:3], np.uint32) for v in (blocks, threads)]
    errors: list[BaseException] = []

    def other() -> None:
        try:  # in another thread: each has fibers of its own
            _OTHER.submit(before).result()
        except BaseException as error:
            errors.append(error)

    failure = library.run(number, ctypes.addressof(pointers), *(g.ctypes.data for g in geometry), shared, seed,
                          BEFORE(other) if before else BEFORE())
    if errors:
        raise errors[0]
    assert failure is None, f"{kernel}: {failure.decode()}"


def _wide(a: Any) -> Any:
    """16-bit floats are multiplied and added as float32."""
    return a.astype(np.float32) if a.dtype.itemsize == 2 else a


def run(call: cuda.Call, seed: int = 0) -> None:
    """What the driver, cuBLAS and cuDNN would do."""
    if isinstance(call, cuda.Grid):
        run_grid(call.flagged(FLAG), seed=seed)
    elif isinstance(call, cuda.Product):
        y = np.matmul(_wide(call.a), _wide(call.b))
        y = y if call.bias is None else y + _wide(call.bias)
        y = y + _wide(call.out) if call.accumulate else y
        if call.seen is not None:
            y = KERNELS[call.act].reference(np, _wide(call.seen), y)
        call.out[...] = np.maximum(y, 0) if call.act == "relu" else y
        if call.sums is not None:
            call.sums[...] = call.a.sum(axis=-1, dtype=np.float64)
    elif isinstance(call, cuda.Attention):
        constants = {"scale": call.scale, "causal": call.causal}
        if call.what == "forward":
            call.y[...], call.lse[...] = KERNELS["flash_attention"].reference(np, call.q, call.k, call.v, **constants)
        else:
            reads = (call.q, call.k, call.v, call.y, call.lse, call.dy)
            call.dq[...], call.dk[...], call.dv[...] = KERNELS["flash_attention_grad"].reference(np,
                                                                                                 *reads, **constants)
    elif isinstance(call, cuda.Zeros):
        assert call.out.flags.c_contiguous
        call.out[...] = 0
    elif isinstance(call, cuda.Copy):
        assert call.out.flags.c_contiguous
        assert call.source.flags.c_contiguous
        assert call.out.nbytes == call.source.nbytes
        call.out.reshape(-1).view(np.uint8)[...] = call.source.reshape(-1).view(np.uint8)
    else:
        geometry = Geometry(call.stride, call.padding, call.dilation, call.groups)
        x, w, y = map(_wide, (call.x, call.w, call.y))
        if call.what == "forward":
            call.y[...] = KERNELS["conv2d"].reference(np, x, w, geometry=geometry)
        elif call.what == "input_grad":
            call.x[...] = KERNELS["conv2d_input_grad"].reference(np, y, w, size=x.shape[1:3], geometry=geometry)
        else:
            call.w[...] = KERNELS["conv2d_weight_grad"].reference(np, x, y, taps=w.shape[1:3],
                                                                  bias=False, geometry=geometry)


def run_kernel(name: str, reads: Sequence[Any], writes: Sequence[Any], seed: int = 0,
               constants: dict[str, Any] | None = None, **more: Any) -> list[cuda.Call]:
    """Runs the CUDA form of a kernel on NumPy arrays and returns its calls. `seed` is that of the order of threads;
    `constants` are the kernel's, or `more` are."""
    kernel, constants = KERNELS[name], {**(constants or {}), **more}
    specs = kernel.cuda_work(reads, writes, **constants) if kernel.cuda_work else ()
    work = [np.full(shape, np.nan if np.dtype(t).kind == "f" else 77, t) for shape, t in specs]  # nobody has written it
    if os.environ.get("MINIDL_TEST_GPU"):
        from cuda_on_gpu import run_kernel_on

        return list(run_kernel_on(get("cuda"), name, reads, writes, work, constants))
    calls = kernel.cuda_calls(reads, writes, work, constants)
    for i, call in enumerate(calls):
        run(call, seed + i)
    return calls


class CudaOnCpu(CPU):
    """Host memory, CUDA kernels."""

    name = "cuda on cpu"
    most_scores = Cuda.most_scores

    def work(self, kernel: Kernel) -> Work | None:
        return kernel.cuda_work

    def bind(self, launch: Launch, array: Any, stream: Any = None) -> list[Thunk]:
        reads, writes, work = ([array(v) for v in views] for views in (launch.reads, launch.writes, launch.work))
        thunks: list[Thunk] = []
        for call in KERNELS[launch.kernel].cuda_calls(reads, writes, work, dict(launch.constants)):
            grid = call.flagged(FLAG) if isinstance(call, cuda.Grid) else None
            thunks.append(partial(run_grid, grid, cuda.Packed(grid)) if grid else partial(run, call))
        return thunks
