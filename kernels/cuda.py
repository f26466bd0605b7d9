"""Launches on CUDA as data: a grid of one of our kernels, a product, a convolution, attention, zeros, a copy.

A kernel's CUDA form (`@relu.cuda()`) returns these calls for its arrays and runs nothing. So the driver can run them,
the tests can run them on the CPU, and all can be checked without a GPU. Sources are the `.cu` files in this folder.
Knows no device: an array is anything with a pointer, shape, strides (bytes) and dtype.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

SOURCES = Path(__file__).parent
THREADS = 256  #: threads of a block, by default
WAVES = 16  #: the most blocks of a launch, in units of 132 (the multiprocessors of an H200); kernels loop over the rest

#: NumPy's type -> C's name of it
C_TYPES = {"float32": "float", "float64": "double", "float16": "__half", "bfloat16": "__nv_bfloat16", "bool": "bool",
           "int8": "signed char", "uint8": "unsigned char", "int32": "int", "uint32": "unsigned int",
           "int64": "long long", "uint64": "unsigned long long"}
HALVES = ("__half", "__nv_bfloat16")  #: types whose `Sum` in common.cuh is float; the others are their own
_SCALARS: dict[str, Any] = {"float": ctypes.c_float, "double": ctypes.c_double, "int": ctypes.c_int,
                            "unsigned int": ctypes.c_uint, "long long": ctypes.c_longlong,
                            "unsigned long long": ctypes.c_ulonglong, "bool": ctypes.c_bool}


class LaunchError(ValueError):
    """A launch does not fit its kernel. The message names the kernel and the argument."""


@dataclass(frozen=True)
class Struct:
    """A C struct that is passed by value: its name and its bytes."""

    name: str
    content: bytes


class Flag:
    """The class of FLAG: as an argument of a launch, FLAG stands for an int32 (1,) of the device that runs it.

    Updates set it to 1, atomically, if they use a gradient that is not finite; no kernel reads it. So it is not a
    buffer of the graph, and orders nothing.
    """

    def __repr__(self) -> str:
        return "FLAG"


FLAG = Flag()


@dataclass(frozen=True)
class Grid:
    """One launch of one of our kernels. `kernel` with its template arguments: `relu<float>`; `arguments` in the order
    of its parameters: arrays for pointers, Python numbers, `Struct`s, FLAG. `shared`: bytes of dynamic shared
    memory."""

    source: str
    kernel: str
    blocks: tuple[int, ...]
    threads: tuple[int, ...]
    arguments: tuple[Any, ...]
    shared: int = 0

    def flagged(self, flag: Any) -> Grid:
        """The launch with this int32 array (1,) in place of FLAG, ready to be packed."""
        if not any(a is FLAG for a in self.arguments):
            return self
        return replace(self, arguments=tuple(flag if a is FLAG else a for a in self.arguments))


@dataclass(frozen=True)
class Product:
    """out = a @ b for matrices, or for equally many matrices along leading axes. Strides may transpose a and b.

    `bias` (n,): added to every row of out in the same call. `accumulate`: the result is added to out. `act`: "relu" or
    nothing, applied last; or "relu_grad" or "gelu_tanh_grad", for the result times the slope of the activation at
    `seen`, an array like out. `sums` (m,): also the sums of a's rows, of a single matrix; `work`: scratch for them, if
    a launch of their own needs it.
    """

    a: Any
    b: Any
    out: Any
    bias: Any = None
    accumulate: bool = False
    act: str = ""
    sums: Any = None
    work: Any = None
    seen: Any = None


@dataclass(frozen=True)
class Convolution:
    """`what`: forward (x, w -> y), input_grad (dy, w -> dx) or weight_grad (x, dy -> dw); arrays as in `conv`."""

    what: str
    x: Any
    w: Any
    y: Any
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


@dataclass(frozen=True)
class Attention:
    """`what`: forward (q, k, v -> y, lse) or grad (all but the last three -> dq, dk, dv); arrays as in
    `flash_attention`."""

    what: str
    q: Any
    k: Any
    v: Any
    y: Any
    lse: Any
    scale: float
    causal: bool
    dy: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None


@dataclass(frozen=True)
class Zeros:
    """Sets all bytes of a contiguous array to 0."""

    out: Any


@dataclass(frozen=True)
class Copy:
    """Copies the bytes of one contiguous array to another."""

    source: Any
    out: Any


Call = Grid | Product | Convolution | Attention | Zeros | Copy


def c_type(array: Any) -> str:
    """The C type of an array's elements."""
    return C_TYPES[str(array.dtype)]


def sum_type(array: Any) -> Any:
    """`Sum<T>` of common.cuh: the type in which elements are added up."""
    return np.dtype("float32") if array.dtype.itemsize == 2 else array.dtype


def each(source: str, kernel: str, count: int, *arguments: Any, threads: int = THREADS) -> list[Grid]:
    """A launch with a thread for each of `count` elements, up to a limit: kernels loop over the rest. No launch for
    0."""
    blocks = min(-(-count // threads), 132 * WAVES)
    return [Grid(source, kernel, (blocks,), (threads,), arguments)] if count else []


def each_row(source: str, kernel: str, rows: int, width: int, *arguments: Any) -> list[Grid]:
    """A launch with a warp for each of `rows` rows, or a block if they are wider than 1024. The kernel's last argument
    is the number of threads per row, see `first_row` in common.cuh. No launch for 0 rows."""
    threads, lanes = (THREADS, 32) if width <= 1024 else (512, 512)
    blocks = min(-(-rows * lanes // threads), 132 * WAVES)
    return [Grid(source, kernel, (blocks,), (threads,), (*arguments, lanes))] if rows else []


#: `Strides` of common.cuh
STRIDES = np.dtype([("axes", np.int32), ("vector", np.int32), ("count", np.int64), ("length", np.int64, 6),
                    ("step", np.int64, (4, 6))], align=True)


def steps(array: Any, shape: Sequence[int]) -> list[int]:
    """The steps, in elements, along each axis of `shape`, to which the array is broadcast."""
    own = [0 if n == 1 else s // array.dtype.itemsize for n, s in zip(array.shape, array.strides, strict=True)]
    return [0] * (len(shape) - len(own)) + own


def strides(lengths: Sequence[int], *rows: Sequence[int], vector: int = 1) -> Struct:
    """A `Strides` of these lengths, with a row of steps for each array. Axes that are contiguous with each other are
    merged; raises LaunchError if more than six are left."""
    axes = _collapsed(lengths, rows) or [(1, *(0 for _ in rows))]
    if len(axes) > 6:
        raise LaunchError(f"lengths {tuple(lengths)} with steps {rows}: kernels support at most six axes")
    value = np.zeros((), STRIDES)
    value["axes"], value["vector"], value["count"] = len(axes), vector, math.prod(lengths)
    for a, (n, *step) in enumerate(axes):
        value["length"][a], value["step"][: len(rows), a] = n, step
    return Struct("Strides", value.tobytes())


def _collapsed(lengths: Sequence[int], rows: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Axes as (length, step of each array); axes that are contiguous with each other are merged."""
    axes: list[tuple[int, ...]] = []
    for n, *step in zip(lengths, *rows, strict=True):
        if n == 1:
            continue
        if axes and all(outer == n * inner for outer, inner in zip(axes[-1][1:], step, strict=True)):
            axes[-1] = (axes[-1][0] * n, *step)
        else:
            axes.append((n, *step))
    return axes


def elements(source: str, kernel: str, inputs: Sequence[Any], out: Any, *numbers: Any) -> list[Grid]:
    """A launch of a kernel (inputs, out, Strides, numbers) that computes each element of `out` from the inputs, which
    are broadcast to it. Array 0 of the Strides is `out`. No launch if `out` is empty."""
    arrays = (out, *inputs)
    rows = [steps(a, out.shape) for a in arrays]
    order = sorted(range(out.ndim), key=lambda a: [-abs(row[a]) for row in rows])  # neighbours of `out` come last
    lengths, rows = [out.shape[a] for a in order], [[row[a] for a in order] for row in rows]
    vector = 4 if _by_four(arrays, _collapsed(lengths, rows)) else 1
    return each(source, kernel, out.size // vector, *inputs, out, strides(lengths, *rows, vector=vector), *numbers)


def dense(source: str, kernel: str, *arrays: Any) -> list[Grid]:
    """A launch of a kernel (arrays, count) element by element over contiguous arrays of one size, four elements at a
    time. No launch for empty arrays. Raises LaunchError for a strided one."""
    if not contiguous(*arrays):
        raise LaunchError(f"{kernel} needs contiguous arrays, not strides {', '.join(str(a.strides) for a in arrays)}")
    count = arrays[-1].size
    return each(source, kernel, -(-count // 4), *arrays, count)


def _by_four(arrays: Sequence[Any], axes: Sequence[tuple[int, ...]]) -> bool:
    """Whether four neighbours on the last axis are one aligned access to memory (of at most 16 bytes), or one value."""
    if not axes or axes[-1][0] % 4 or axes[-1][1] != 1:
        return False
    for k, array in enumerate(arrays, 1):
        aligned = (pointer(array) % min(4 * array.dtype.itemsize, 16) == 0
                   and all(axis[k] % 4 == 0 for axis in axes[:-1]))
        if axes[-1][k] and not (axes[-1][k] == 1 and aligned):
            return False
    return True


def contiguous(*arrays: Any) -> bool:
    return all(a.flags.c_contiguous for a in arrays)


def pointer(array: Any) -> int:
    """The address of the first element."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def alignment(array: Any, most: int) -> int:
    """The largest power of two, at most `most`, that divides the array's address."""
    address = pointer(array)
    return min(most, address & -address) or most


# ---------------------------------------------------------------------------------------------------------- signatures
_KERNEL = re.compile(
    r"(?:template\s*<([^>]*)>\s*)?(?:extern\s+\"C\"\s+)?__global__\s+(?:void\s+(?:__launch_bounds__\([^)]*\)\s+)?"
    r"|__launch_bounds__\([^)]*\)\s+void\s+)(\w+)\s*\(([^)]*)\)\s*\{")


@cache
def text(source: str) -> str:
    """The text of a source, with our own files that it includes. Every kernel begins with `begin_kernel()` of
    common.cuh."""
    lines = _KERNEL.sub(lambda m: f"{m[0]}begin_kernel(); ", (SOURCES / source).read_text(encoding="utf-8"))
    return re.sub(r'^#include "(\w+\.cuh)"$', lambda m: text(m[1]), lines, flags=re.MULTILINE)


@cache
def kernels_of(source: str) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Kernel of a source -> its template parameters (`typename T`) and its parameters' types."""
    plain = re.sub(r"//[^\n]*|/\*.*?\*/", "", text(source), flags=re.DOTALL)
    return {name: (tuple(p.strip() for p in (template or "").split(",") if p.strip()),
                   tuple(_type_of(p) for p in parameters.split(",") if p.strip()))
            for template, name, parameters in _KERNEL.findall(plain)}


def _type_of(parameter: str) -> str:
    """`const T* __restrict__ x` as `T*`."""
    bare = re.sub(r"\b(const|__restrict__)\b", " ", parameter)
    kind, _ = re.fullmatch(r"\s*(.*?[\s*])(\w+)\s*", bare, re.DOTALL).groups()  # type: ignore[union-attr]
    return re.sub(r"\s+", " ", kind).replace(" *", "*").strip()


@cache
def signature(source: str, kernel: str) -> tuple[str, ...]:
    """The parameters' types of `relu<float>`. Raises LaunchError for a kernel that the source does not have."""
    name, _, given = kernel.partition("<")
    found = kernels_of(source).get(name)
    if found is None:
        raise LaunchError(f"{source} has no kernel {name}")
    names = [p.split()[-1] for p in found[0]]
    values = [v.strip() for v in given.rstrip(">").split(",") if v.strip()]
    if len(names) != len(values):
        raise LaunchError(f"{source}: {kernel} has {len(values)} template arguments; {name} takes {len(names)}")
    meant = dict(zip(names, values, strict=True))
    types = (re.sub(r"\w+", lambda m: meant.get(m[0], m[0]), t) for t in found[1])
    return tuple(re.sub(r"Sum<(.*?)>", lambda m: "float" if m[1] in HALVES else m[1], t) for t in types)


def check(grid: Grid) -> None:
    """Raises LaunchError if the geometry is impossible or the arguments do not fit the kernel."""
    if not (1 <= len(grid.blocks) <= 3 and 1 <= len(grid.threads) <= 3):
        raise LaunchError(f"{grid.kernel}: blocks {grid.blocks} and threads {grid.threads} have one to three axes")
    blocks, threads = (*grid.blocks, 1, 1)[:3], (*grid.threads, 1, 1)[:3]
    limits = (2**31 - 1, 65535, 65535)
    if any(not 1 <= b <= limit for b, limit in zip(blocks, limits, strict=True)):
        raise LaunchError(f"{grid.kernel}: {blocks} blocks; each axis has 1 to {limits}")
    if min(threads) < 1 or math.prod(threads) > 1024 or threads[2] > 64:
        raise LaunchError(f"{grid.kernel}: {threads} threads a block; there can be 1 to 1024, 64 of "
                          f"them along the third axis")
    if not 0 <= grid.shared <= 48 * 1024:
        raise LaunchError(f"{grid.kernel}: {grid.shared} bytes of shared memory; the limit is 49152")
    types = signature(grid.source, grid.kernel)
    if len(types) != len(grid.arguments):
        raise LaunchError(f"{grid.kernel} takes {len(types)} arguments, not {len(grid.arguments)}")
    for i, (kind, value) in enumerate(zip(types, grid.arguments, strict=True)):
        if not _fits(kind, value):
            given = (f"an array of {value.dtype}" if hasattr(value, "strides")
                     and hasattr(value, "dtype") else repr(value))
            raise LaunchError(f"{grid.kernel}: argument {i} is {kind}, not {given}")


# ------------------------------------------------------------------------------------------------ several grids as one
MEMBERS = 36  #: of a launch at most: its arguments have 4 KiB


def grouped(calls: Sequence[Call]) -> list[Call]:
    """Calls that need nothing of each other, with those grids as one launch whose kernel `NAME` has a form `NAME_group`
    for several (group.cuh). It does the same work, to the same bits."""
    found: list[Call] = []
    alike: dict[Any, list[Grid]] = {}
    for call in calls:
        if isinstance(call, Grid) and f"{call.kernel.partition('<')[0]}_group" in kernels_of(call.source):
            alike.setdefault((call.source, call.kernel), []).append(call)
        else:
            found.append(call)
    return [*found, *(_as_one(own[i : i + MEMBERS]) for own in alike.values() for i in range(0, len(own), MEMBERS))]


def _as_one(grids: Sequence[Grid]) -> Grid:
    """One launch for at least one grid of a kernel."""
    source, name = grids[0].source, grids[0].kernel
    if len(grids) == 1:
        return grids[0]
    kernel = re.sub(r"^\w+", r"\g<0>_group", name)
    blocks, ends = np.zeros((MEMBERS, 6), np.int32), np.cumsum([math.prod(grid.blocks) for grid in grids])
    kinds = signature(source, name)
    members = [b"".join(map(_bytes, kinds, grid.arguments)) for grid in grids]
    for row, grid, end in zip(blocks, grids, ends, strict=False):
        check(grid)
        row[:] = end, *(*grid.blocks, 1, 1)[:3], *(*grid.threads, 1)[:2]
    content = (np.array([len(grids), 0], np.int32).tobytes() + blocks.tobytes()
               + b"".join(members) + bytes(len(members[0]) * (MEMBERS - len(grids))))
    threads = -(-max(math.prod(grid.threads) for grid in grids) // 32) * 32
    return Grid(source, kernel, (int(ends[-1]),), (threads,), (Struct(signature(source, kernel)[0], content),))


def _bytes(kind: str, value: Any) -> bytes:
    """An argument as it lies in a struct of its kernel's arguments, which are in an order without gaps."""
    return (value.content if isinstance(value, Struct) else
            bytes(ctypes.c_void_p(pointer(value)) if kind.endswith("*") else _SCALARS[kind](value)))


def _fits(kind: str, value: Any) -> bool:
    if kind.endswith("*"):
        return hasattr(value, "strides") and hasattr(value, "shape") and C_TYPES.get(str(value.dtype)) == kind[:-1]
    if isinstance(value, Struct):
        return value.name == kind
    if kind in ("float", "double"):
        return isinstance(value, float | int) and not isinstance(value, bool)
    if kind == "bool":
        return isinstance(value, bool)
    if kind not in _SCALARS or not isinstance(value, int) or isinstance(value, bool):
        return False
    return bool(_SCALARS[kind](value).value == value)


class Packed:
    """A launch's arguments in the driver's form. `address`: of an array of pointers to the values."""

    def __init__(self, grid: Grid) -> None:
        check(grid)
        self.values: list[Any] = []
        for kind, value in zip(signature(grid.source, grid.kernel), grid.arguments, strict=True):
            if isinstance(value, Struct):
                self.values.append(ctypes.create_string_buffer(value.content, len(value.content)))
            else:
                self.values.append(ctypes.c_void_p(pointer(value)) if kind.endswith("*") else _SCALARS[kind](value))
        self.pointers = (ctypes.c_void_p * max(len(self.values), 1))(*(ctypes.addressof(v) for v in self.values))
        self.address = ctypes.addressof(self.pointers)
