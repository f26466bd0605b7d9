"""On the CPU batch norm with an activation is bit-identical to the kernels that it replaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from covering import pairs
from forms import blank, on_cpu, reference

SHAPES = [(4, 3, 5), (2, 8, 8, 16), (30, 130), (2, 3, 3, 1), (700, 6)]
MOVES = {"eps": 1e-5, "momentum": 0.1}


def called(name: str, *reads: Any, **constants: Any) -> Any:
    writes = on_cpu(name, reads, blank(reference(name, reads, **constants)), **constants)
    return writes if len(writes) > 1 else writes[0]


def apart(x: Any) -> Any:
    """The same values, with gaps between pixels."""
    wide = np.full((*x.shape[:-1], x.shape[-1] + 3), np.nan, x.dtype)
    wide[..., :-3] = x
    return wide[..., :-3]


@pytest.mark.parametrize(*pairs(shape=SHAPES, act=["none", "relu", "relu6", "hardswish"], gaps=[False, True],
                                dtype=[np.float32, np.float64]))
def test_one_pass_is_bit_identical_to_several(act: str, shape: tuple[int, ...], gaps: bool, dtype: Any):
    random, own = np.random.default_rng(0), apart if gaps else np.asarray
    x, z, dy = (6 * random.standard_normal(shape).astype(dtype) for _ in range(3))
    w, b, var = (random.standard_normal(shape[-1]).astype(dtype) ** 2 + dtype(0.5) for _ in range(3))
    reads = own(x), w, b, np.zeros_like(w), var, np.array(3)
    s, mean, rstd, *moved = called("batch_norm", *reads, **MOVES)
    for added in ((), (own(z),)):
        kept = bool(added)
        before = s + z if kept else s
        y = before if act == "none" else called(act, before)
        for found, wanted in zip(called("batch_norm_act", *reads, *added, act=act, **MOVES), (y, mean, rstd, *moved),
                                 strict=True):
            assert np.array_equal(found, wanted)
        if kept and act in ("none", "hardswish"):
            continue
        ds = dy if act == "none" else called(f"{act}_grad", before if act == "hardswish" else y, dy)
        sums = called("batch_norm_weight_grad", own(x), mean, rstd, ds)
        dx = called("batch_norm_input_grad", own(x), mean, rstd, w, *sums, ds)
        seen, out = (y,) if kept else (), (ds,) if kept else ()
        if act != "none":
            parts = called("batch_norm_act_weight_grad", own(x), mean, rstd, w, b, dy, *seen, act=act)
            assert all(map(np.array_equal, parts, (*sums, *out)))
        if act != "none" and not kept:
            assert np.array_equal(called("batch_norm_act_input_grad", own(x), mean, rstd, w, b, *sums, dy, act=act), dx)
        for more in ((), (z,)):
            found = called("batch_norm_grad", own(x), mean, rstd, w, b, dy, *seen, *more, act=act, kept=kept,
                           add=bool(more))
            assert all(map(np.array_equal, found, (*sums, *out, dx + z if more else dx)))
