"""Launches run once more, by a program of its own, under AddressSanitizer or ThreadSanitizer.

`record` keeps what a launch was given and what it left. `replay` writes such launches to a file and runs them in a C++
program whose arrays lie in allocations of exactly their size and whose CUDA threads are threads of the operating
system. Used as a pytest plugin (`-p cuda_sanitizers`, with MINIDL_LAUNCHES=FILE), it records launches of every kernel
that the tests run.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import os
import pickle
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cuda_on_cpu
import numpy as np
import pytest
from cuda_on_cpu import build, program
from numpy.lib.array_utils import byte_bounds

from minidl.kernels.cuda import Grid, Packed, Struct
from minidl.kernels.registry import Kernel

#: what g++ is told for each
SANITIZERS = {"address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
              "thread": ("-fsanitize=thread",)}
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1", "TSAN_OPTIONS": "halt_on_error=1"}
THREADS, BYTES = 2100, 1_000_000  #: of launches that are worth replaying: each thread is a real one
KEPT = 3  #: launches of each kernel, as many again of one block alone


@dataclass
class Recorded:
    """A launch as data: `memory` is what each allocation held before and after, and its address modulo 16; `arguments`
    are their bytes, and where these hold an address: (place, allocation, offset into it)."""

    source: str
    kernel: str
    geometry: tuple[int, ...]
    memory: list[tuple[bytes, bytes, int]]
    arguments: list[tuple[bytes, list[tuple[int, int, int]]]]


def _extents(arrays: Sequence[Any]) -> list[tuple[int, int]]:
    """First and last address of the allocations: arrays that overlap share one."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(byte_bounds(a) for a in arrays if a.size):
        if merged and low < merged[-1][1]:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return merged


def _words(grid: Grid) -> list[int]:
    """What may be an address in the structs that are passed by value."""
    return [w for a in grid.arguments if isinstance(a, Struct)
            for (w,) in struct.iter_unpack("<Q", a.content[: len(a.content) // 8 * 8])]


def pointed_at(grid: Grid, known: Sequence[Any]) -> list[Any]:
    """The arrays of a launch: its arguments, and those of `known` that its structs point at."""
    words = _words(grid)
    return ([a for a in grid.arguments if isinstance(a, np.ndarray)]
            + [a for a in known if any(low <= w < high for low, high in _extents([a]) for w in words)])


def record(grid: Grid, run: Callable[[], Any], known: Sequence[Any] = ()) -> Recorded:
    """Runs a launch and keeps it. `known`: arrays that structs may point at."""
    extents = _extents(pointed_at(grid, known))

    def located(content: bytes) -> list[tuple[int, int, int]]:
        return [(place, i, address - low) for place in range(0, len(content) - 7, 8)
                for address in struct.unpack_from("<Q", content, place) for i, (low, high) in enumerate(extents)
                if low <= address < high]

    before = [ctypes.string_at(low, high - low) for low, high in extents]
    run()
    memory = [(b, ctypes.string_at(low, high - low), low % 16) for b, (low, high) in zip(before, extents, strict=True)]
    arguments: list[tuple[bytes, list[tuple[int, int, int]]]] = []
    for given, value in zip(grid.arguments, Packed(grid).values, strict=True):
        content = given.content if isinstance(given, Struct) else bytes(value)
        arguments.append((content, located(content) if isinstance(given, Struct | np.ndarray) else []))
    return Recorded(grid.source, grid.kernel,
                    (*(*grid.blocks, 1, 1)[:3], *(*grid.threads, 1, 1)[:3], grid.shared), memory, arguments)


# --------------------------------------------------------------------------------------------------------------- replay
MAIN = r"""
static long long number(FILE* f) { long long n; if (fread(&n, 8, 1, f) != 1) exit(3); return n; }
static std::vector<unsigned char> piece(FILE* f, long long n) {
    std::vector<unsigned char> p(n);
    if (n && fread(p.data(), n, 1, f) != 1) exit(3);
    return p;
}
int main(int, char** argv) {
    FILE* f = fopen(argv[1], "rb");
    for (long long launch = 0, launches = number(f); launch < launches; launch++) {
        int kernel = number(f);
        unsigned g[3], t[3];
        for (unsigned& n : g) n = number(f);
        for (unsigned& n : t) n = number(f);
        size_t shared = number(f);
        fprintf(stderr, "launch %lld, %s\n", launch, names[kernel]);
        std::vector<unsigned char*> allocated, starts;
        std::vector<std::vector<unsigned char>> expected;
        for (long long i = number(f); i > 0; i--) {
            long long lead = number(f), bytes = number(f);
            allocated.push_back((unsigned char*)malloc(lead + bytes));
            starts.push_back(allocated.back() + lead);
            memcpy(starts.back(), piece(f, bytes).data(), bytes);
            expected.push_back(piece(f, bytes));
        }
        std::vector<std::vector<unsigned char>> values;
        long long count = number(f);
        for (long long i = 0; i < count; i++) {
            long long bytes = number(f);
            values.push_back(piece(f, bytes));
            if ((size_t)bytes != bytes_of(kernel, i)) {
                fprintf(stderr, "argument %lld has %lld bytes\n", i, bytes);
                return 2;
            }
            for (long long places = number(f); places > 0; places--) {
                long long place = number(f), allocation = number(f);
                unsigned char* address = starts[allocation] + number(f);
                memcpy(values.back().data() + place, &address, 8);
            }
        }
        std::vector<void*> pointers;
        for (auto& v : values) pointers.push_back(v.data());
        if (run(kernel, pointers.data(), g, t, shared, (unsigned)launch, nullptr)) return 2;
        for (size_t i = 0; i < starts.size(); i++)
            for (size_t b = 0; b < expected[i].size(); b++)
                if (starts[i][b] != expected[i][b]) {
                    fprintf(stderr, "byte %zu of allocation %zu differs from what fibers leave\n", b, i);
                    return 2;
                }
        for (auto* p : allocated) free(p);
    }
    fprintf(stderr, "all is well\n");
}
"""


def _written(launches: Sequence[Recorded], kernels: list[str]) -> bytes:
    """The file that MAIN reads."""
    out: list[bytes] = []

    def numbers(*values: int) -> None:
        out.append(struct.pack(f"<{len(values)}q", *values))

    numbers(len(launches))
    for r in launches:
        numbers(kernels.index(r.kernel), *r.geometry, len(r.memory))
        for before, after, lead in r.memory:
            numbers(lead, len(before))
            out.extend((before, after))
        numbers(len(r.arguments))
        for content, addresses in r.arguments:
            numbers(len(content))
            out.append(content)
            numbers(len(addresses), *itertools.chain.from_iterable(addresses))
    return b"".join(out)


def replay(launches: Sequence[Recorded], sanitizer: str, seconds: float = 300.0, kernels: Sequence[str] = ()) -> None:
    """Runs launches of one source; `kernels` are compiled with those launched. Raises AssertionError with the
    sanitizer's report where it has one, where a launch leaves other bytes than it did when it was recorded, and where
    it does not end."""
    (source,) = {r.source for r in launches}
    kernels = sorted({*kernels, *(r.kernel for r in launches)})
    names = ", ".join(f'"{k}"' for k in kernels)
    code = f"{program(source, kernels, real_threads=True)}\nstatic const char* names[] = {{{names}}};\n{MAIN}"
    binary = build(code, SANITIZERS[sanitizer])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "launches"
        path.write_bytes(_written(launches, kernels))
        try:
            done = subprocess.run([binary, path], capture_output=True, text=True, errors="replace", timeout=seconds,
                                  env={**os.environ, **OPTIONS})
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"{source}: no end, threads may wait for others at a barrier; "
                                 f"{(late.stderr or b'')[-300:]!r}") from late
    report = done.stderr.rpartition("launch ")[2]
    well = done.returncode == 0 and report.endswith("all is well\n")
    assert well, f"{source}, {sanitizer} sanitizer: launch {report[:6000]}"


# ------------------------------------------------------------------------------------------------------------ recording
Kind = tuple[str, str, bool, bool]


def _kind(grid: Grid) -> Kind:
    name, _, template = grid.kernel.partition("<")
    return grid.source, name, math.prod(grid.blocks) > 1, "true" in template


def _draw(grid: Grid) -> bytes:
    """A number that depends on what the launch is alone, so that those kept are some of every sort."""
    arguments = [(a.shape, a.strides, str(a.dtype)) if isinstance(a, np.ndarray) else a for a in grid.arguments]
    return hashlib.sha256(repr((grid.kernel, grid.blocks, grid.threads, grid.shared, arguments)).encode()).digest()


class Recorder:
    """Keeps some of the launches that pass, small enough and different from one another: by source, kernel without its
    types, whether there are several blocks, and whether neighbours are one access (WHOLE)."""

    def __init__(self) -> None:
        self.kept: dict[Kind, dict[bytes, Recorded]] = {}
        self.bound: list[Any] = []  # arrays of the kernel that was bound last

    def cuda_calls(self, plain: Callable[..., Any], kernel: Any, reads: Any, writes: Any, work: Any,
                   constants: Any) -> Any:
        self.bound = [*reads, *writes, *work]
        return plain(kernel, reads, writes, work, constants)

    def run_grid(self, plain: Callable[..., None], grid: Grid, packed: Packed | None = None, seed: int = 0) -> None:
        kept, draw, arrays = self.kept.setdefault(_kind(grid), {}), _draw(grid), pointed_at(grid, self.bound)
        extents = _extents(arrays)
        small = (math.prod(grid.blocks) * math.prod(grid.threads) <= THREADS
                 and sum(high - low for low, high in extents) <= BYTES)
        # addresses, bound long ago
        lost = any(2**40 < w < 2**47 and not any(low <= w < high for low, high in extents) for w in _words(grid))
        if small and not lost and draw not in kept and (len(kept) < KEPT or draw < max(kept)):
            kept[draw] = record(grid, lambda: plain(grid, packed, seed), arrays)
            if len(kept) > KEPT:
                del kept[max(kept)]
        else:
            plain(grid, packed, seed)


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin: from here on every launch goes through a recorder."""
    if "MINIDL_LAUNCHES" in os.environ:
        recorder, bind = Recorder(), Kernel.cuda_calls
        cuda_on_cpu.run_grid = partial(recorder.run_grid, cuda_on_cpu.run_grid)
        Kernel.cuda_calls = lambda kernel, *arrays: recorder.cuda_calls(bind, kernel, *arrays)
        config.stash[_RECORDER] = recorder


def pytest_unconfigure(config: pytest.Config) -> None:
    if _RECORDER in config.stash:
        kept = config.stash[_RECORDER].kept
        Path(os.environ["MINIDL_LAUNCHES"]).write_bytes(pickle.dumps({kind: list(launches.values())
                                                                      for kind, launches in kept.items()}))


_RECORDER = pytest.StashKey[Recorder]()
