"""One kernel alone: its form on a device checked against its reference in float64, and timed.

    share of the roofline = max(bytes / bandwidth, flops / rate) / time

Both are measured on the same device just before: the bandwidth by relu on as many bytes, which are then in the same
caches; the rate by a large product. Bytes are those that a kernel reads and writes, once each; flops are stated by its
family. The launch cost is the time of the same calls on almost nothing; it is part of `us`, and shown apart. On CUDA a
kernel of `kernels/naive.py` is checked and timed beside the fast form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from ..core.graph import Launch, View
from ..core.tasks import strides_of
from ..kernels import KERNELS
from ..kernels.conv import Geometry
from ..kernels.naive import NAIVE

LIMIT = 1e-4  #: the largest relative error, |found - wanted| / |wanted| over each output, in float32
SECONDS = 0.2  #: of timed calls
RUNS = 5  #: the least of them
SIDE = 1024  #: of the product that measures the device
Drawn = tuple[Sequence[Any], dict[str, Any]]


@dataclass(frozen=True)
class Timing:
    """A kernel on a device. `error`: the largest relative one; `right`: whether it and `naive_error` are below LIMIT;
    `us`: the median time of a launch; `gflops`: None if its family states no flops; `naive_..`: of the naive
    CUDA kernel, None without one."""

    kernel: str
    device: str
    shapes: str
    error: float
    right: bool
    us: float
    launch_us: float
    gbs: float
    gflops: float | None
    share: float
    naive_us: float | None = None
    naive_error: float | None = None


class Rolled:
    """A kernel's calls on new arrays of a device; `naive`: the naive CUDA kernel in its place."""

    def __init__(self, device: Any, kernel: str, reads: Sequence[Any], constants: Mapping[str, Any],
                 naive: bool = False) -> None:
        self.device, definition = device, KERNELS[kernel]
        exact = [a.astype(np.float64) if a.dtype == np.float32 else a for a in reads]
        with np.errstate(all="ignore"):
            found = definition.reference(np, *exact, **constants)
            narrow = definition.reference(np, *reads, **constants)
        self.wanted, kinds = ([np.asarray(a) for a in (each if isinstance(each, tuple) else (each,))]
                              for each in (found, narrow))
        self._kept: list[Any] = []
        inputs = [self._array(a.shape, a.dtype, a) for a in reads]
        self.writes = [self._array(a.shape, a.dtype, np.zeros(a.shape, a.dtype)) for a in kinds]
        scratch = device.work(definition)
        work = [self._array(shape, dtype) for shape, dtype in (scratch(inputs, self.writes, **constants)
                                                               if scratch else ())]
        self.bytes = sum(int(a.nbytes) for a in (*reads, *kinds))
        self.flops = definition.flops(reads, kinds) if definition.flops else None
        launch = Launch(kernel, tuple(inputs), tuple(self.writes), tuple(work), tuple(constants.items()))
        self.calls = (device.thunks(NAIVE[kernel](*inputs, *self.writes, **constants)) if naive
                      else device.bind(launch, lambda array: array))

    def _array(self, shape: Any, dtype: Any, value: Any = None) -> Any:
        shape, dtype = tuple(shape), np.dtype(dtype)
        memory = self.device.lasting(max(1, math.prod(shape) * dtype.itemsize))
        self._kept.append(memory)
        array = self.device.array(memory, View(0, shape, strides_of(shape), 0, str(dtype)))
        if value is not None:
            self.device.write(array, value)
        return array

    def run(self) -> None:
        for call in self.calls:
            call()

    def error(self) -> float:
        """The largest error of the outputs after one launch; infinite if one is not finite where it should be."""
        self.run()
        self.device.synchronize()
        errors = [0.0]
        for array, wanted in zip(self.writes, self.wanted, strict=True):
            apart = np.asarray(self.device.read(array), np.float64) - wanted
            size = float(np.linalg.norm(wanted.ravel().astype(np.float64)))
            errors.append(float(np.linalg.norm(apart.ravel())) / (size or 1.0))
        return max(e if math.isfinite(e) else math.inf for e in errors)

    def time(self) -> float:
        """The median time of a launch in microseconds."""
        if self.device.captures:
            self.device.once(self.calls)  # so that a captured launch loads nothing
            return float(self.device.task_times([[self.calls]])[0])
        return _median(self.run)


def _median(run: Callable[[], object]) -> float:
    times: list[float] = []
    run()
    end = perf_counter() + SECONDS
    while len(times) < RUNS or perf_counter() < end:
        begin = perf_counter()
        run()
        times.append(perf_counter() - begin)
    return float(np.median(times)) * 1e6


def bandwidth(device: Any, nbytes: int) -> float:
    """Bytes per microsecond of relu, in float32, on so many bytes that it reads and writes."""
    moved = Rolled(device, "relu", [np.random.default_rng(0).standard_normal(max(1, nbytes // 8), np.float32)], {})
    return moved.bytes / moved.time()


def rate(device: Any) -> float:
    """Flops per microsecond of a large product in float32."""
    rng = np.random.default_rng(0)
    side = [rng.standard_normal((SIDE, SIDE), np.float32) for _ in range(2)]
    return 2.0 * SIDE**3 / Rolled(device, "matmul", side, {}).time()


def timing(device: Any, kernel: str, rate: float, rows: int | None = None) -> Timing:
    """The kernel's timing on a device, whose `rate` is known; `rows`: the size of the example. Raises KernelError."""
    rng = np.random.default_rng(1)
    reads, constants = EXAMPLES[kernel](rng, rows or ROWS)
    rolled, small = (Rolled(device, kernel, *each) for each in ((reads, constants), EXAMPLES[kernel](rng, 2)))
    error, took, launch = rolled.error(), rolled.time(), small.time()
    floor = max(rolled.bytes / bandwidth(device, rolled.bytes), (rolled.flops or 0.0) / rate)
    shapes = ", ".join("x".join(map(str, a.shape)) or "1" for a in reads)
    naive = Rolled(device, kernel, reads, constants, naive=True) if device.captures and kernel in NAIVE else None
    slow, wrong = (None, None) if naive is None else (naive.time(), naive.error())
    return Timing(kernel, device.name, shapes, error, max(error, wrong or 0.0) < LIMIT, took, min(launch, took),
                  rolled.bytes / took / 1e3, None if rolled.flops is None else rolled.flops / took / 1e3, floor / took,
                  slow, wrong)


# ------------------------------------------------------------------------------------------------------------- examples
ROWS, WIDTH, EXPERTS = 2048, 512, 8  #: of an example; images have 14 x 14 pixels in ROWS / 64 samples


#: the shapes of arrays for so many rows
SHAPES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "all": lambda rows: (rows, WIDTH), "row": lambda rows: (WIDTH,), "square": lambda rows: (WIDTH, WIDTH),
    "squares": lambda rows: (EXPERTS, WIDTH, WIDTH),
    "images": lambda rows: (max(1, rows // 64), 14, 14, 64), "taps": lambda rows: (64, 3, 3, 64),
    "heads": lambda rows: (max(1, rows // 512), 4, min(rows, 128), 64)}


def _floats(*shapes: str, positive: int | None = None, **constants: Any) -> Callable[[np.random.Generator, int], Drawn]:
    """An example with normal float32 arrays of these shapes; the one of number `positive` is positive."""
    def draw(rng: np.random.Generator, rows: int) -> Drawn:
        reads = [rng.standard_normal(SHAPES[shape](rows), np.float32) for shape in shapes]
        return [np.abs(a) if i == positive else a for i, a in enumerate(reads)], constants
    return draw


def _labels(extra: bool) -> Callable[[np.random.Generator, int], Drawn]:
    def draw(rng: np.random.Generator, rows: int) -> Drawn:
        reads = [rng.standard_normal((rows, WIDTH), np.float32), rng.integers(0, WIDTH, rows)]
        return [*reads, *([np.float32(1.0).reshape(())] if extra else [])], {"smoothing": 0.1}
    return draw


def _tracked(rng: np.random.Generator, rows: int) -> Drawn:
    channels = [rng.random(WIDTH, np.float32) for _ in range(4)]
    return [rng.standard_normal((rows, WIDTH), np.float32), *channels, np.int64(3).reshape(())], {"eps": 1e-5,
                                                                                                  "momentum": 0.1}


def _grouped(*shapes: str, **constants: Any) -> Callable[[np.random.Generator, int], Drawn]:
    """Rows of EXPERTS experts, drawn at random; then arrays as of `_floats`."""
    def draw(rng: np.random.Generator, rows: int) -> Drawn:
        counts = np.bincount(rng.integers(0, EXPERTS, rows), minlength=EXPERTS).reshape(1, EXPERTS)
        return [counts, *_floats(*shapes)(rng, rows)[0]], constants
    return draw


SAME = Geometry((1, 1), (1, 1), (1, 1), 1)
#: kernel -> the arrays that it reads, and its constants, for so many rows
EXAMPLES: dict[str, Callable[[np.random.Generator, int], Drawn]] = {
    **{name: _floats("all", "all") for name in ("add", "mul", "relu_grad", "gelu_grad")},
    **{name: _floats("all") for name in ("copy", "exp", "relu", "tanh", "gelu", "softmax")},
    "sum": _floats("all", axes=(1,), factor=1.0),
    "softmax_grad": _floats("all", "all"),
    "matmul": _floats("all", "square"),
    "linear": _floats("all", "square", "row"),
    "linear_weight_grad": _floats("all", "all", bias=True),
    "grouped_linear": _grouped("all", "squares"),
    "grouped_linear_weight_grad": _grouped("all", "all", bias=False),
    "layer_norm": _floats("all", "row", "row", eps=1e-5),
    "rms_norm": _floats("all", "row", eps=1e-5),
    "batch_norm": _tracked,
    "batch_norm_weight_grad": _floats("all", "row", "row", "all", positive=2),
    "cross_entropy": _labels(False),
    "cross_entropy_grad": _labels(True),
    "conv2d": _floats("images", "taps", geometry=SAME),
    "conv2d_input_grad": _floats("images", "taps", size=(14, 14), geometry=SAME),
    "conv2d_weight_grad": _floats("images", "images", taps=(3, 3), bias=False, geometry=SAME),
    "max_pool2d": _floats("images", window=(2, 2), stride=(2, 2), padding=(0, 0)),
    "attention": _floats("heads", "heads", "heads", scale=0.125, causal=True),
}
