"""Every kernel on one GPU: its error, whether its bits repeat, its time, and how near that is to the hardware's limits.

    python bench/kernel_table.py [--device cuda] [--only TEXT] [--out FILE.json]

One small example of each kernel with a CUDA form, and realistic sizes of the main ones. The error of an output is
|out - ref| / |ref|, where ref is the kernel's reference in float64; the largest counts, and NaN never passes. Outputs
are poisoned before each of three runs, whose bits must agree. The time is the device's, in a replayed graph; large
cases use several copies of their arrays in turn, so that the cache does not hold them. The limits are measured first: a
large copy (bytes read and written) and a large product in each precision. floor = max(bytes / bandwidth, flops / rate),
and the share is floor / time; a dash means that the floor is under 2 us, since the launch is the limit there.

The record is written every few rows. Ends with 0 if all rows passed; 1 if one failed, or if an error broke the GPU for
the process; 2 without a GPU.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(ROOT), str(ROOT / "tests" / "helpers")]

from common import machine, save, write

from minidl import device as devices
from minidl.core.graph import Launch, View
from minidl.devices.cuda import clock
from minidl.kernels import KERNELS, cuda
from minidl.kernels.conv import Geometry

#: the largest relative error by precision: in float32 the roundings of 100,000 terms as a random walk; in the others a
#: rounding of each input or output
LIMITS = {"float32": 2e-5, "tf32": 1e-3, "float16": 1e-3, "bfloat16": 4e-3}
MODES = ("float32", "tf32", "bfloat16")
RUNS = 3
EVERY = 10  #: rows between two writes of the record
BINDS = 2.0  #: microseconds; under this floor the launch is the limit
COPIED = 512 << 20  #: bytes of the copy that measures the bandwidth
SIDES = {"float32": 4096, "tf32": 8192, "bfloat16": 8192}  #: of the square products that measure the rates


@dataclass(frozen=True)
class Case:
    """One row for each precision in `modes`. `reads` makes the arrays, floats as float32; `low`: which of them have 16
    bits in bfloat16 (None: all floats). `kinds`: the types of the outputs in bfloat16; without it, floats have the type
    of the first array."""

    kernel: str
    size: str
    reads: Callable[[], Sequence[Any]]
    constants: Mapping[str, Any] = field(default_factory=dict)
    modes: tuple[str, ...] = ("float32",)
    low: tuple[int, ...] | None = None
    kinds: tuple[str, ...] = ()

    @property
    def small(self) -> bool:
        return self.size == "small"


# ---------------------------------------------------------------------------------------------------------------- cases
def small() -> Iterator[Case]:
    """The largest of each kernel's examples whose reference is finite."""
    from reference_calls import calls

    found = calls()
    for name in sorted(name for name, kernel in KERNELS.items() if kernel._cuda is not None):
        ordered = sorted(found.get(name, ()), key=lambda call: -sum(np.asarray(a).size for a in call[0]))
        for reads, constants in ordered:
            if all(np.isfinite(out).all() for out in reference(name, reads, constants)):
                yield Case(name, "small", partial(tuple, reads), constants)
                break


def numbers(*shape: int, seed: int = 0, positive: bool = False) -> Any:
    """Normal float32 numbers; beyond a million they repeat."""
    found = np.random.default_rng(seed).standard_normal(min(math.prod(shape), 1_000_003), np.float32)
    return np.resize(np.abs(found) if positive else found, shape)


def arrays(*shapes: tuple[int, ...]) -> Callable[[], Sequence[Any]]:
    return lambda: [numbers(*shape, seed=i) for i, shape in enumerate(shapes)]


def large() -> Iterator[Case]:
    """Realistic sizes."""
    for words, x, w, pad, groups in (("3x3", (32, 28, 28, 128), (128, 3, 3, 128), 1, 1),
                                     ("1x1", (32, 28, 28, 512), (128, 1, 1, 512), 0, 1),
                                     ("depthwise 3x3", (32, 56, 56, 144), (144, 3, 3, 1), 1, 144)):
        y, geometry = (*x[:3], w[0]), Geometry((1, 1), (pad, pad), (1, 1), groups)
        size = f"{words} {'x'.join(map(str, x))} to {w[0]}"
        modes = MODES if groups == 1 else ("float32", "bfloat16")  # depthwise has no product for the tensor cores
        yield Case("conv2d", size, arrays(x, w), {"geometry": geometry}, modes)
        yield Case("conv2d_input_grad", size, arrays(y, w), {"size": x[1:3], "geometry": geometry}, modes)
        yield Case("conv2d_weight_grad", size, arrays(x, y), {"taps": w[1:3], "bias": False, "geometry": geometry},
                   modes)
    for n, k, m in ((4096, 4096, 4096), (8192, 768, 3072)):
        yield Case("matmul", f"{n}x{k} by {k}x{m}", arrays((n, k), (k, m)), {}, MODES)
    yield Case("linear", "8192x768 to 3072, bias", arrays((8192, 768), (3072, 768), (3072,)), {}, MODES)
    yield Case("linear_weight_grad", "8192x768, 8192x3072", arrays((8192, 768), (8192, 3072)), {"bias": False}, MODES)
    heads = (8, 12, 512, 64)
    yield Case("attention", "8x12x512x64, causal", arrays(heads, heads, heads), {"scale": 0.125, "causal": True},
               ("float32", "tf32"))
    yield Case("flash_attention", "8x12x512x64, causal", arrays(heads, heads, heads),
               {"scale": 0.125, "causal": True}, ("bfloat16",), kinds=("bfloat16", "float32"))
    both = ("float32", "bfloat16")

    def normed(rows: tuple[int, ...], width: int) -> Sequence[Any]:
        return [numbers(*rows, width), numbers(width, seed=1), numbers(width, seed=2)]

    yield Case("batch_norm", "32x56x56x256", lambda: [*normed((32, 56, 56), 256), numbers(256, seed=3), numbers(
        256, seed=4, positive=True), np.array(3)], {"eps": 1e-5, "momentum": 0.1}, both, (0,),
        ("bfloat16", *("float32",) * 4, "int64"))
    yield Case("layer_norm", "16384x1024", lambda: normed((16384,), 1024), {"eps": 1e-5}, both, (0,),
               ("bfloat16", "float32", "float32"))
    yield Case("softmax", "16384x1024", arrays((16384, 1024)))
    yield Case("cross_entropy", "4096x10000", lambda: [numbers(4096, 10000), np.arange(4096) * 7 % 10000],
               {"smoothing": 0.1})
    many = (1 << 24,)
    for name, count in (("add", 2), ("relu", 1), ("gelu", 1), ("relu_grad", 2)):
        yield Case(name, "2^24", arrays(*[many] * count), {}, both)
    yield Case("sgd", "2^24, momentum", lambda: [numbers(*many), numbers(*many, seed=1), np.array([0.1], "float32"),
                                                 numbers(*many, seed=2)],
               {"momentum": 0.9, "weight_decay": 1e-4, "nesterov": False})
    yield Case("adam", "2^24", lambda: [numbers(*many), numbers(*many, seed=1), numbers(*many, seed=2), numbers(
        *many, seed=3, positive=True), np.array([0.001], "float32"), np.array([2.0, 0.81, 0.998])],
        {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "decoupled": True})


# -------------------------------------------------------------------------------------------------------------- running
def reference(kernel: str, reads: Sequence[Any], constants: Mapping[str, Any]) -> tuple[Any, ...]:
    with np.errstate(all="ignore"):
        found = KERNELS[kernel].reference(np, *reads, **constants)
    return tuple(np.asarray(a) for a in (found if isinstance(found, tuple) else (found,)))


def is_float(array: Any) -> bool:
    return array.dtype.kind == "f" or str(array.dtype) == "bfloat16"


def wide(array: Any) -> Any:
    """Floats as float64."""
    array = np.asarray(array)
    return array.astype(np.float64) if is_float(array) else array


def given(case: Case, mode: str) -> list[Any]:
    """What the kernel reads in this precision."""
    reads = [np.asarray(a) for a in case.reads()]
    if mode != "bfloat16":
        return reads
    import ml_dtypes

    chosen = range(len(reads)) if case.low is None else case.low
    return [a.astype(ml_dtypes.bfloat16) if i in chosen and is_float(a) else a for i, a in enumerate(reads)]


class Bound:
    """A kernel's calls on arrays of the device; `wanted` are the outputs, in the types that it must write."""

    def __init__(self, device: Any, kernel: str, reads: Sequence[Any], wanted: Sequence[tuple[Any, Any]],
                 constants: Mapping[str, Any]) -> None:
        self.device, self._kept, definition = device, [], KERNELS[kernel]
        self.reads = [self._array(a.shape, a.dtype, a) for a in reads]
        self.writes = [self._array(*spec) for spec in wanted]
        poisoned = len(self.reads)
        specs = device.work(definition)
        work = [self._array(*spec) for spec in (specs(self.reads, self.writes, **constants) if specs else ())]
        self._poisoned = self._kept[poisoned:]
        self.launch = Launch(kernel, tuple(self.reads), tuple(self.writes), tuple(work), tuple(constants.items()))
        self.calls: list[Any] = []

    def _array(self, shape: Any, dtype: Any, value: Any = None) -> Any:
        shape, dtype = tuple(shape), np.dtype(dtype)
        memory = self.device.allocate(max(math.prod(shape) * dtype.itemsize, 1))
        self._kept.append(memory)
        if value is not None and value.size:
            host = np.array(value, order="C").reshape(-1).view(np.uint8)
            self.device.driver.copy(host, memory, self.device.main)()
            self.device.synchronize()
        steps = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return self.device.array(memory, View(0, shape, steps, 0, str(dtype)))

    def compile(self) -> None:
        """Compiles our own kernels among the calls, where they are not compiled yet."""
        for call in KERNELS[self.launch.kernel].cuda_calls(self.reads, self.writes, self.launch.work,
                                                          dict(self.launch.constants)):
            if isinstance(call, cuda.Grid) and not any(a is cuda.FLAG for a in call.arguments):
                self.device.driver.launch(call, self.device.main)

    def bind(self) -> Sequence[Any]:
        self.calls = self.device.bind(self.launch, lambda array: array)
        return self.calls

    def poison(self) -> None:
        """Fills outputs and scratch with 0xFF, which is NaN in every type of float."""
        for memory in self._poisoned:
            self.device.driver.copy(np.full(len(memory), 0xFF, np.uint8), memory, self.device.main)()
        self.device.synchronize()

    def run(self) -> list[Any]:
        """The outputs."""
        self.poison()
        clock.run(self.calls)
        return [self.device.read(a) for a in self.writes]


def relative(found: Any, exact: Any) -> float:
    """|found - exact| / |exact|; NaN where an element is."""
    distance, length = (float(np.linalg.norm(np.ravel(a))) for a in (wide(found).astype(float) - exact, exact + 0.0))
    return distance / length if length else distance


def measured(device: Any, case: Case, mode: str, ceilings: Mapping[str, float], exactly: dict[bool, Any],
             bound: Bound | None = None) -> dict[str, Any]:
    """One row without its names. `exactly`: the case's outputs in float64 for inputs of 16 bits and of 32, kept for the
    next precision."""
    reads, low = given(case, mode), mode == "bfloat16"
    exact = exactly[low] if low in exactly else reference(case.kernel, [wide(a) for a in reads], case.constants)
    exactly[low] = exact
    bound = bound or Bound(device, case.kernel, reads, kinds(case, mode, reads, exact), case.constants)
    bound.bind()
    runs = [bound.run() for _ in range(RUNS)]
    same = all(a.tobytes() == b.tobytes() for other in runs[1:] for a, b in zip(runs[0], other, strict=True))
    errors = [relative(f, e) for f, e in zip(runs[0], exact, strict=True)]
    limits = [max(LIMITS[mode], LIMITS.get(str(f.dtype), 0.0)) for f in runs[0]]
    fits = all(e <= limit for e, limit in zip(errors, limits, strict=True))
    nbytes, flops = sum(a.nbytes for a in (*bound.reads, *bound.writes)), 0.0
    if KERNELS[case.kernel].flops:
        flops = float(KERNELS[case.kernel].flops(bound.reads, bound.writes))
    copies = 1 if case.small else max(1, min(clock.REPEATS, math.ceil(2 * device.cache_bytes / max(nbytes, 1))))
    others = [Bound(device, case.kernel, reads, [(a.shape, a.dtype) for a in bound.writes], case.constants)
              for _ in range(copies - 1)]
    sets = [bound.calls, *(other.bind() for other in others)]
    clock.run([call for calls in sets for call in calls])
    (us,) = clock.each(device.driver, device.main, [sets])
    floor = max(nbytes / ceilings["bytes_per_us"], flops / ceilings[f"{mode}_flops_per_us"])
    return {"relative_error": max(errors) if all(map(math.isfinite, errors)) else None, "limit": max(limits),
            "bits_repeat": same, "us": round(us, 3), "bytes": nbytes, "flops": flops, "floor_us": round(floor, 3),
            "share": round(floor / us, 3) if us and floor >= BINDS else None, "passed": fits and same}


def kinds(case: Case, mode: str, reads: Sequence[Any], exact: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Shape and type of each output."""
    if case.small:
        return [(a.shape, a.dtype) for a in reference(case.kernel, reads, case.constants)]
    if mode == "bfloat16" and case.kinds:
        return [(e.shape, kind) for e, kind in zip(exact, case.kinds, strict=True)]
    return [(e.shape, reads[0].dtype if is_float(e) else e.dtype) for e in exact]


def measured_ceilings(device: Any) -> dict[str, float]:
    """Bytes and flops in a microsecond."""
    clock.warm(device.driver, device.main)
    one, other = device.allocate(COPIED), device.allocate(COPIED)
    copy = device.driver.copy(one, other, device.main)
    copy()
    (us,) = clock.each(device.driver, device.main, [[[copy]]])
    found = {"bytes_per_us": 2 * COPIED / max(us, 1e-3)}
    del one, other, copy
    for mode in MODES:
        n = SIDES[mode]
        case = Case("matmul", "ceiling", arrays((n, n), (n, n)))
        reads = given(case, mode)
        with mock.patch.object(device, "tf32", mode == "tf32"):
            bound = Bound(device, "matmul", reads, [((n, n), reads[0].dtype)], {})
            clock.run(bound.bind())
            (us,) = clock.each(device.driver, device.main, [[bound.calls]])
        found[f"{mode}_flops_per_us"] = 2.0 * n**3 / max(us, 1e-3)
    return found


def compiled(device: Any, cases: Sequence[Case]) -> dict[str, Bound]:
    """The small examples on the device, by kernel; their kernels are compiled side by side. An error comes again when
    the row is measured."""
    found = {}
    for case in cases:
        with suppress(Exception):
            reads = given(case, "float32")
            found[case.kernel] = Bound(device, case.kernel, reads, kinds(case, "float32", reads, ()), case.constants)

    def one(bound: Bound) -> None:
        with suppress(Exception):
            bound.compile()

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, found.values()))
    return found


def measure(device: Any, only: str, keep: Callable[[dict[str, Any]], object] = lambda record: None) -> dict[str, Any]:
    """The record, which `keep` gets every few rows. `only`: the rows whose names contain this text. After an error that
    breaks the GPU for the process, the record has the rows so far and is not complete."""
    begin = time.monotonic()
    record: dict[str, Any] = {"machine": machine(), "gpu": device.driver.describe(), "complete": False,
                              "passed": False, "ceilings": {}, "rows": []}
    few, many = ([case for case in found if any(only in name(case, mode) for mode in case.modes)]
                 for found in (small(), large()))
    record["ceilings"] = ceilings = measured_ceilings(device)
    ready = compiled(device, few)
    for case in (*few, *many):
        exactly: dict[bool, Any] = {}
        for mode in case.modes:
            if only not in name(case, mode):
                continue
            row = {"kernel": case.kernel, "size": case.size, "precision": mode}
            broken = False
            # the small examples are about numbers: no kernels are chosen by time there
            tune = mock.patch.dict(os.environ, {"MINIDL_TUNE": "first"} if case.small else {})
            try:
                with tune, mock.patch.object(device, "tf32", mode == "tf32"):
                    bound = ready.pop(case.kernel, None) if case.small else None
                    row |= measured(device, case, mode, ceilings, exactly, bound)
            except Exception as error:  # libraries have their own types
                row |= {"error": f"{type(error).__name__}: {error}"[:400], "passed": False}
                broken = not usable(device)
            record["rows"].append(row)
            if broken or len(record["rows"]) % EVERY == 0:
                keep(record)
            if broken:
                return record
    record |= {"complete": True, "passed": bool(record["rows"]) and all(row["passed"] for row in record["rows"]),
               "seconds": round(time.monotonic() - begin, 1)}
    keep(record)
    return record


def name(case: Case, mode: str) -> str:
    return f"{case.kernel}, {case.size}, {mode}"


def usable(device: Any) -> bool:
    """Whether the GPU still answers."""
    try:
        device.synchronize()
    except Exception:  # CuPy has its own types
        return False
    return True


# ----------------------------------------------------------------------------------------------------------------- text
def table(record: Mapping[str, Any]) -> str:
    ceilings = record["ceilings"]
    rates = ", ".join(f"{mode} {ceilings[f'{mode}_flops_per_us'] / 1e6:.1f} TFLOP/s" for mode in MODES)
    lines = [f"copy {ceilings['bytes_per_us'] / 1e3:.0f} GB/s, products: {rates}", "",
             f"{'kernel':28} {'size':34} {'precision':9} {'error':>8} {'bits':>6} {'us':>9} {'MB':>8} {'GFLOP':>8} "
             f"{'share':>6}"]
    for row in record["rows"]:
        start = f"{row['kernel']:28} {row['size']:34} {row['precision']:9}"
        if "error" in row:
            lines.append(f"{start} FAILED: {row['error'].splitlines()[0]}")
            continue
        error = "NaN" if row["relative_error"] is None else f"{row['relative_error']:.1e}"
        share = "-" if row["share"] is None else f"{row['share']:.0%}"
        lines.append(f"{start} {error:>8} {'repeat' if row['bits_repeat'] else 'DIFFER':>6} {row['us']:9.2f} "
                     f"{row['bytes'] / 1e6:8.2f} {row['flops'] / 1e9:8.2f} {share:>6}"
                     f"{'' if row['passed'] else '  FAILED'}")
    passed = sum(row["passed"] for row in record["rows"])
    lines.append(f"{passed} of {len(record['rows'])} rows passed{'' if record['complete'] else '; not complete'}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose names contain this text")
    parser.add_argument("--out", metavar="FILE.json", help="the record; default: bench/results/kernel_table.json")
    options = parser.parse_args(arguments)
    try:
        device = devices.get(options.device)
    except devices.DeviceError as error:
        print(f"kernel_table: {error}", file=sys.stderr)
        return 2
    record = measure(device, options.only, lambda record: write("kernel_table", record, options.out))
    print(table(record))
    save("kernel_table", record, options.out)
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
