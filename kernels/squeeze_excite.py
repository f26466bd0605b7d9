"""Squeeze and excite: every channel of a sample is multiplied by a gate, which two small products compute from the
means of all its channels.

    sum(x) / pixels -> mean
    conv2d(mean, w1, b1) -> r; relu(r) -> hidden          squeeze_excite(x, w1, b1, w2, b2) -> y, mean, hidden, pre
    conv2d(hidden, w2, b2) -> pre; hardsigmoid(pre) -> gate
    mul(x, gate) -> y

    mul(dy, gate) -> direct; sum(mul(dy, x)) -> dgate
    hardsigmoid_grad(pre, dgate) -> dpre
    conv2d_input_grad(dpre, w2) -> dh                     squeeze_excite_input_grad(dy, x, w1, w2, hidden, pre)
    relu_grad(hidden, dh) -> dhidden                          -> dx, dpre, dhidden
    conv2d_input_grad(dhidden, w1) -> dmean
    add(direct, spread(dmean) / pixels) -> dx

r, gate, direct, dgate, dh and dmean no longer exist. The convolutions' weight gradients stay: one from mean and
dhidden, one from hidden and dpre. x (n, h, w, c), w1 (s, 1, 1, c), b1 (s,), w2 (c, 1, 1, s), b2 (c,); all contiguous.
On CUDA they may have 16 bits; sums are float32 then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .conv import Geometry, conv2d, conv2d_input_grad, forward_work, input_grad_work
from .cuda import Call, Grid, Struct, c_type
from .registry import KERNELS, kernel, ufunc

PLAIN = Geometry((1, 1), (0, 0), (1, 1), 1)  #: of both products
BACK: dict[str, Any] = {"size": (1, 1), "geometry": PLAIN}  #: of both gradients
WARPS = 16  #: of a block on CUDA
TILES = 16  #: of channels at most, since every block adds up what all of them have left
#: elements, up to which one block goes over a sample and its weights in less time than a second launch takes
ALONE = 48 * 1024
BLOCKS = 264  #: that are left at least where a block takes several samples, two for each of 132 multiprocessors
SHARED = 48 * 1024  #: bytes of shared memory
EXCITE = np.dtype([("pixels", np.int64),
                   *((name, np.int32) for name in ("samples", "channels", "squeezed", "group", "width", "stages"))],
                  align=True)  #: `Excite` of squeeze_excite.cu


# ----------------------------------------------------------------------------------------------- how CUDA goes about it
class Tiling(NamedTuple):
    """Samples and channels of a block, how many blocks share a sample, and bytes of shared memory."""

    group: int
    width: int
    tiles: int
    shared: int


def _sizes(x: Any, w1: Any) -> tuple[int, int, int, int]:
    """Samples, pixels, channels, squeezed channels."""
    n, h, w, c = x.shape
    return n, h * w, c, w1.shape[0]


def _plan(x: Any, w1: Any, size: int) -> Tiling:
    """The tiling for sums of `size` bytes per element. It depends only on shapes."""
    samples, pixels, channels, squeezed = _sizes(x, w1)
    strips = max(1, -(-channels // 32))
    alone = channels <= 1024 and 2 * channels * (pixels + squeezed) <= ALONE
    width = 32 * (strips if alone else -(-strips // TILES))
    tiles = -(-channels // width)
    bytes_of_one = size * (width + squeezed + max(32 * WARPS, width, 32 * -(-squeezed // 32)))
    group = next((g for g in (4, 2) if -(-samples // g) * tiles >= BLOCKS and g * bytes_of_one <= SHARED), 1)
    return Tiling(group, width, tiles, group * bytes_of_one)


def fits(x: Any, w1: Any) -> bool:
    """Whether the arrays are not empty and a block's shared memory suffices, for any type."""
    return 0 not in (*x.shape, *w1.shape) and _plan(x, w1, 8).shared <= SHARED


def _launches(name: str, x: Any, w1: Any, reads: Any, parts: Any, writes: Any) -> list[Call]:
    if not x.size:
        return []
    samples, pixels, channels, squeezed = _sizes(x, w1)
    plan = _plan(x, w1, parts.dtype.itemsize)
    calls: list[Call] = []
    for stages in (3,) if plan.tiles == 1 else (1, 2):
        numbers = np.array((pixels, samples, channels, squeezed, plan.group, plan.width, stages), EXCITE)
        calls.append(Grid("squeeze_excite.cu", f"{name}<{c_type(x)}>", (-(-samples // plan.group), plan.tiles),
                          (32, WARPS), (*reads, Struct("Excite", numbers.tobytes()), parts, *writes), plan.shared))
    return calls


def _parts(x: Any, w1: Any) -> list[Any]:
    """The scratch array in which the blocks of a sample leave their sums for the second launch."""
    size, dtype = (8, "float64") if str(x.dtype) == "float64" else (4, "float32")
    return [((x.shape[0], _plan(x, w1, size).tiles, w1.shape[0]), dtype)]


# -------------------------------------------------------------------------------------------------------------- kernels
def _flops(x: Any, w1: Any, each: int) -> float:
    """`each` for every element of x, and the flops of two products."""
    return float(each * x.size + 4 * x.shape[0] * w1.size)


def _work(reads: Any, writes: Any) -> list[Any]:
    """Scratch on the CPU: the gate, and the scratch of both products."""
    _, w1, _, w2, _ = reads
    _, mean, hidden, pre = writes
    return [(mean.shape, mean.dtype), *forward_work(mean, w1, hidden, PLAIN),
            *forward_work(hidden, w2, pre, PLAIN)]


def _input_grad_work(reads: Any, writes: Any) -> list[Any]:
    """Scratch on the CPU: dy x, the gate, dgate, dh, and the scratch of both products."""
    _, x, w1, w2, _, _ = reads
    _, dpre, dhidden = writes
    return [*((a.shape, a.dtype) for a in (x, dpre, dpre, dhidden)),
            *input_grad_work(dpre, w2, dhidden, PLAIN), *input_grad_work(dhidden, w1, dpre, PLAIN)]


@kernel("squeeze_excite", axes="n*,*,*,*,*->n*,n*,n*,n*", work=_work,
        flops=lambda reads, writes: _flops(reads[0], reads[1], 2))
def squeeze_excite(xp: Any, x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    """-> y, and the mean (n, 1, 1, c), hidden (n, 1, 1, s) and pre (n, 1, 1, c) above."""
    mean = KERNELS["sum"].reference(xp, x, axes=(1, 2), factor=_share(x))
    hidden = conv2d.reference(xp, mean, w1, b1, geometry=PLAIN, act="relu")
    pre = conv2d.reference(xp, hidden, w2, b2, geometry=PLAIN)
    return x * KERNELS["hardsigmoid"].reference(xp, pre), mean, hidden, pre


def _share(x: Any) -> float:
    """The weight of one pixel in a mean."""
    return 1.0 / (x.shape[1] * x.shape[2])


@squeeze_excite.cpu
def _(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, y: Any, mean: Any, hidden: Any, pre: Any, gate: Any,
      *work: Any) -> Any:
    own = len(forward_work(mean, w1, hidden, PLAIN))
    return [*KERNELS["sum"].bind([x], [mean], [], {"axes": (1, 2), "factor": _share(x)}),
            *conv2d.bind([mean, w1, b1], [hidden], work[:own], {"geometry": PLAIN, "act": "relu"}),
            *conv2d.bind([hidden, w2, b2], [pre], work[own:], {"geometry": PLAIN}),
            *KERNELS["hardsigmoid"].bind([pre], [gate], [], {}), ufunc(np.multiply, x, gate, y)]


@squeeze_excite.cuda(lambda reads, writes: _parts(reads[0], reads[1]))
def _(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, *rest: Any) -> Any:
    *writes, parts = rest
    return _launches("squeeze_excite", x, w1, [x, w1, b1, w2, b2], parts, writes)


@kernel("squeeze_excite_input_grad", axes="n*,n*,*,*,n*,n*->n*,n*,n*", work=_input_grad_work,
        flops=lambda reads, writes: _flops(reads[1], reads[2], 4))
def squeeze_excite_input_grad(xp: Any, dy: Any, x: Any, w1: Any, w2: Any, hidden: Any, pre: Any) -> Any:
    """-> dx, dpre (n, 1, 1, c), dhidden (n, 1, 1, s)."""
    dpre = KERNELS["hardsigmoid_grad"].reference(xp, pre, (dy * x).sum(axis=(1, 2), keepdims=True))
    dhidden = KERNELS["relu_grad"].reference(xp, hidden,
                                             conv2d_input_grad.reference(xp, dpre, w2, size=(1, 1), geometry=PLAIN))
    dmean = conv2d_input_grad.reference(xp, dhidden, w1, size=(1, 1), geometry=PLAIN)
    return dy * KERNELS["hardsigmoid"].reference(xp, pre) + dmean * x.dtype.type(_share(x)), dpre, dhidden


@squeeze_excite_input_grad.cpu
def _(dy: Any, x: Any, w1: Any, w2: Any, hidden: Any, pre: Any, dx: Any, dpre: Any, dhidden: Any, full: Any, gate: Any,
      row: Any, dh: Any, *work: Any) -> Any:
    own = len(input_grad_work(dpre, w2, dhidden, PLAIN))
    return [ufunc(np.multiply, dy, x, full), *KERNELS["sum"].bind([full], [row], [], {"axes": (1, 2)}),
            *KERNELS["hardsigmoid_grad"].bind([pre, row], [dpre], [], {}),
            *conv2d_input_grad.bind([dpre, w2], [dh], work[:own], BACK),
            *KERNELS["relu_grad"].bind([hidden, dh], [dhidden], [], {}),
            *conv2d_input_grad.bind([dhidden, w1], [row], work[own:], BACK),
            *KERNELS["hardsigmoid"].bind([pre], [gate], [], {}),
            ufunc(np.multiply, dy, gate, full), *KERNELS["spread"].bind([row, x], [dx], [], {"factor": _share(x)}),
            ufunc(np.add, full, dx, dx)]


@squeeze_excite_input_grad.cuda(lambda reads, writes: _parts(reads[1], reads[2]))
def _(dy: Any, x: Any, w1: Any, w2: Any, hidden: Any, pre: Any, *rest: Any) -> Any:
    *writes, parts = rest
    return _launches("squeeze_excite_input_grad", x, w1, [dy, x, w1, w2, hidden, pre], parts, writes)
