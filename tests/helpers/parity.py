"""One function of minidl and of torch: the same values and the same gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from helpers import random_array, torch_or_skip

import minidl as ml

NCHW, NHWC = (0, 3, 1, 2), (0, 2, 3, 1)  #: the axes of an image for torch, and back
#: image; window, stride, padding; with another number also `ceil_mode`
POOLS: dict[str, tuple[Any, ...]] = {
    "2x2": ((2, 4, 4, 2), 2, None, 0), "odd": ((1, 5, 7, 3), 2, None, 0), "overlapping": ((2, 5, 5, 2), 3, 2, 1),
    "uneven": ((1, 5, 6, 2), (3, 2), (1, 2), (1, 0)), "gaps": ((1, 7, 7, 1), 2, 3, 1),
    "whole": ((2, 3, 4, 2), (3, 4), 1, 0), "ceil": ((2, 5, 6, 2), 2, None, 0, True),
    "ceil, padded": ((1, 6, 7, 2), 3, 2, 1, True),
    "ceil, no window behind the image": ((1, 4, 5, 1), 2, 3, 1, True),
    "ceil, uneven": ((2, 7, 6, 3), (3, 2), (3, 4), (1, 0), True)}
Axes = tuple[int, ...] | None
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


def same(mine: Any, theirs: Any, arrays: Sequence[Any], dtype: str = "float64", to: Sequence[Axes] = (),
         back: Axes = None, tolerance: float | None = None) -> None:
    """Output and gradients, ours and torch's. `to[i]` permutes operand i for torch, `back` its output."""
    torch = torch_or_skip()
    arrays, axes = [a.astype(dtype) for a in arrays], list(to) or [None] * len(arrays)
    given = [ml.Parameter(a) for a in arrays]
    y = mine(*given)
    dy = random_array(y.shape, 7, y.dtype)
    (y * ml.array(dy)).sum().backward()
    other = [torch.tensor(np.ascontiguousarray(a.transpose(x)) if x else a, requires_grad=True)
             for a, x in zip(arrays, axes, strict=True)]
    ty = theirs(*other)
    assert str(ty.dtype) == f"torch.{y.dtype}"
    tdy = torch.tensor(dy)
    (ty * (tdy.permute(*np.argsort(back).tolist()) if back else tdy)).sum().backward()
    wanted = [ty.detach().numpy().transpose(back) if back else ty.detach().numpy(),
              *(t.grad.numpy().transpose(np.argsort(x)) if x else t.grad.numpy()
                for t, x in zip(other, axes, strict=True))]
    rtol = tolerance or TOLERANCE[dtype]
    for i, (f, w) in enumerate(zip([y.numpy(), *(p.grad.numpy() for p in given)], wanted, strict=True)):
        assert f.shape == w.shape
        np.testing.assert_allclose(f, w, rtol=rtol, atol=rtol * max(np.abs(w).max(initial=0), 1), err_msg=str(i))
