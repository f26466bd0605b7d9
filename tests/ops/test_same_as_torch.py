"""Functions and methods that torch has too: one function for both libraries, in float32 and float64, eager and
recorded; and finite differences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import pytest
from helpers import bits, random_array, torch_or_skip
from parity import NCHW, NHWC, POOLS, same

import minidl as ml
import minidl.nn.functional as F
from minidl.testing.checks import gradcheck

#: input, channels last; weight (o, kh, kw, c / groups); stride, padding, dilation, groups
CONVOLUTIONS: dict[str, tuple[Any, ...]] = {
    "3x3": ((2, 4, 5, 2), (3, 3, 3, 2), 1, 0, 1, 1),
    "padded": ((1, 4, 3, 2), (2, 3, 3, 2), 1, 1, 1, 1),
    "more padding than image": ((1, 2, 2, 1), (2, 3, 3, 1), 2, 3, 1, 1),
    "stride": ((2, 5, 6, 2), (2, 3, 2, 2), 2, 1, 1, 1),
    "uneven": ((1, 6, 5, 2), (2, 2, 3, 2), (1, 2), (0, 2), (2, 1), 1),
    "dilated": ((1, 6, 6, 1), (2, 3, 2, 1), 1, 2, 2, 1),
    "pointwise": ((2, 3, 2, 3), (4, 1, 1, 3), 1, 0, 1, 1),
    "pointwise, stride": ((2, 4, 3, 3), (2, 1, 1, 3), 2, 0, 1, 1),
    "groups": ((2, 4, 4, 4), (6, 3, 2, 2), 1, 1, 1, 2),
    "groups, pointwise": ((2, 3, 2, 4), (2, 1, 1, 2), 1, 0, 1, 2),
    "depthwise": ((2, 4, 3, 3), (3, 3, 3, 1), 1, 1, 1, 3),
    "depthwise 2x2, stride, dilated": ((1, 6, 5, 2), (2, 2, 2, 1), 2, 1, 2, 2),
    "depthwise, uneven": ((1, 4, 6, 2), (2, 1, 3, 1), (1, 2), (0, 1), 1, 2),
    "channel multiplier": ((1, 4, 4, 2), (4, 3, 3, 1), 1, 1, 1, 2),
    "many channels": ((1, 3, 3, 17), (2, 2, 2, 17), 1, 1, 1, 1),
}
#: of several samples, with few pixels for each tap
FEW_PIXELS: dict[str, tuple[Any, ...]] = {
    "few, 2x2": ((5, 2, 2, 16), (18, 3, 3, 16), 1, 1, 1, 1),
    "few, stride": ((4, 5, 4, 20), (8, 3, 2, 20), 2, 1, 1, 1),
    "few, pointwise, stride": ((6, 3, 4, 33), (17, 1, 1, 33), 2, 0, 1, 1),
    "few, no padding": ((4, 3, 3, 16), (3, 3, 3, 16), 1, 0, 1, 1),
    "few, much padding, dilated": ((4, 3, 2, 16), (9, 3, 3, 16), (1, 2), 2, 2, 1),
    "few, many pixels of a kind": ((9, 8, 9, 3), (16, 5, 5, 3), 1, 2, 1, 1),
}


def values(*shape: int, seed: int = 1) -> Any:
    return random_array(shape, seed)


def whole(m: Any, a: Any) -> Any:
    """A tensor of whole numbers or of bool, ours or torch's."""
    return ml.array(np.array(a)) if m in (ml, F) else torch_or_skip().tensor(a)


def like(x: Any, a: Any) -> Any:
    """Numbers as a constant of x's library and type."""
    return ml.array(a.astype(x.dtype)) if isinstance(x, ml.Tensor) else x.new_tensor(a)


X, Y, AT, FEW = values(3, 4), values(4, 3), [0, 2, 2, 0, 3], [[0, 2], [1, 1], [0, 0]]
ONCE = [[2, 0], [1, 3], [0, 2]]  # no place twice, in which torch's `scatter` would be undefined
CHANCES, WEIGHTS = np.abs(values(3, 4, seed=2)) / 2.01, np.array([0.2, 3.0, 0.7, 1.0])
NCL = (0, 2, 1)
ZEROS = np.array([[0.0, 2.0, 3.0, 1.5], [0.0, 0.0, 4.0, 1.5], [1.0, 2.0, 3.0, -1.5]])

#: a function of either library, operands
SAME: dict[str, tuple[Any, list[Any]]] = {
    "sin": (lambda m, x: m.sin(x), [X]), "cos": (lambda m, x: x.cos(), [X]),
    "rsqrt": (lambda m, x: (x * x + 1.0).rsqrt(), [X]), "reciprocal": (lambda m, x: m.reciprocal(x * x + 1.0), [X]),
    "cumsum 0": (lambda m, x: x.cumsum(0), [X]), "cumsum -1": (lambda m, x: m.cumsum(x, dim=-1), [values(2, 3, 4)]),
    "sort": (lambda m, x: x.sort(0)[0] * 2, [X]), "sort down": (lambda m, x: m.sort(x, descending=True).values, [X]),
    "topk": (lambda m, x: x.topk(2, dim=1).values, [X]),
    "topk smallest": (lambda m, x: m.topk(x, 3, 0, largest=False)[0], [values(5, 2)]),
    "logsumexp": (lambda m, x: m.logsumexp(x, dim=1), [X * 200]),
    "logsumexp two": (lambda m, x: x.logsumexp((0, 2), keepdim=True), [values(2, 3, 4)]),
    "norm": (lambda m, x: x.norm(), [X]), "norm 1": (lambda m, x: x.norm(1, dim=1), [X]),
    "norm inf": (lambda m, x: m.norm(x, float("inf"), dim=0, keepdim=True), [X * np.arange(1, 13).reshape(3, 4)]),
    "flip": (lambda m, x: m.flip(x, [0, 1]), [X]), "flip one": (lambda m, x: x.flip(-1), [values(2, 3, 4)]),
    "roll": (lambda m, x: m.roll(x, 1, 0) + x.roll((2, -1), (1, 0)) + x.roll(5), [X]),
    "tile": (lambda m, x: m.tile(x, (2, 1, 3)), [X]), "tile one": (lambda m, x: x.tile(2), [X]),
    "repeat_interleave": (lambda m, x: x.repeat_interleave(3, dim=1).sum(0) + m.repeat_interleave(x, 3)[:12], [X]),
    "tril": (lambda m, x: m.tril(x) + x.tril(1) * x.tril(-1), [values(2, 3, 4)]),
    "triu": (lambda m, x: x.triu(-1) * m.triu(x), [X]),
    "unbind": (lambda m, x: m.unbind(x, 1)[2] * x.unbind()[1][0], [X]),
    "movedim": (lambda m, x: m.movedim(x, 0, -1) * 1.0, [values(2, 3, 4)]),
    "swapaxes": (lambda m, x: m.swapaxes(x, 0, 2) * x.movedim(2, 0).swapaxes(1, 2), [values(2, 3, 4)]),
    "t": (lambda m, x: m.mm(x, x.t()), [X]), "outer": (lambda m, x, y: m.outer(x, y), [values(3), values(4, seed=2)]),
    "bmm": (lambda m, x, y: m.bmm(x, y), [values(2, 3, 4), values(2, 4, 2, seed=2)]),
    "arithmetic": (lambda m, x, y: m.add(x, y) * m.sub(x, 2) + m.div(m.mul(x, y), 3.0) + m.neg(x), [X, X * 0.3]),
    "views": (lambda m, x, y: x.view_as(y) * x[:1].expand_as(x).reshape(4, 3).sum() * y, [X, values(4, 3)]),
    "einsum outer": (lambda m, x, y: m.einsum("i,j->ij", x, y), [values(3), values(4)]),
    "einsum batch": (lambda m, x, y: m.einsum("bhid,bhjd->bhij", x, y), [values(2, 2, 3, 4), values(2, 2, 5, 4)]),
    "einsum sums": (lambda m, x, y: m.einsum("abc, cd -> d", x, y), [values(2, 3, 4), values(4, 2)]),
    "einsum three": (lambda m, x, y, z: m.einsum("ab,bc,ca->b", x, y, z), [values(2, 3), values(3, 4), values(4, 2)]),
    "einsum one": (lambda m, x: m.einsum("abc->ca", x), [values(2, 3, 4)]),
    "einsum implied": (lambda m, x, y: m.einsum("ba,bc", x, y), [values(3, 2), values(3, 4)]),
    "einsum number": (lambda m, x, y: m.einsum("a,a->", x, y), [values(3), values(3, seed=2)]),
    "index_add": (lambda m, x, s: m.index_add(x, 0, whole(m, AT), s), [Y, values(5, 3)]),
    "index_add, alpha": (lambda m, x, s: x.index_add(dim=-1, index=whole(m, AT[:3]), source=s, alpha=-2.5),
                         [values(2, 2, 4), values(2, 2, 3)]),
    "index_add, none": (lambda m, x, s: x.index_add(1, whole(m, np.zeros(0, int)), s), [Y, values(4, 0)]),
    "index_add, no width": (lambda m, x, s: x.index_add(0, whole(m, [1]), s) * 2, [values(4, 0), values(1, 0)]),
    "scatter_add": (lambda m, x, s: x.scatter_add(0, whole(m, FEW), s), [Y, values(3, 2, seed=2)]),
    "scatter_add 1": (lambda m, x, s: m.scatter_add(x, -1, whole(m, FEW), s), [Y, values(3, 2, seed=2)]),
    "scatter_add 3": (lambda m, x, s: m.scatter_add(x, 2, whole(m, [FEW]), s), [values(2, 3, 3), values(1, 3, 2)]),
    "scatter_add, none": (lambda m, x, s: x.scatter_add(0, whole(m, np.zeros((0, 3), int)), s), [Y, values(0, 3)]),
    "scatter": (lambda m, x, s: x.scatter(0, whole(m, ONCE), s), [Y, values(3, 2, seed=2)]),
    "scatter 1": (lambda m, x, s: m.scatter(x, dim=1, index=whole(m, ONCE[:2]), src=s), [values(3, 4), values(2, 2)]),
    "scatter, a number": (lambda m, x: m.scatter(x, 1, whole(m, FEW), 1.5) * x.scatter(0, whole(m, FEW), value=2), [Y]),
    "scatter, none": (lambda m, x, s: x.scatter(0, whole(m, np.zeros((0, 3), int)), s) + s.sum(), [Y, values(0, 3)]),
    "gather, shorter": (lambda m, x: x.gather(0, whole(m, FEW)), [Y]),
    "prod": (lambda m, x: m.prod(x), [Y]), "prod 0": (lambda m, x: x.prod(0), [values(7, 2)]),
    "prod -1": (lambda m, x: m.prod(x, dim=-1, keepdim=True), [values(2, 3, 5)]),
    "prod of nothing": (lambda m, x: m.prod(x, 1) + x.sum(), [values(2, 0, 3)]),
    "prod of zeros": (lambda m, x: x.prod(1), [ZEROS]), "prod of columns of zeros": (lambda m, x: x.prod(0), [ZEROS]),
    "cdist": (lambda m, x, y: m.cdist(x, y), [Y, values(5, 3, seed=2)]),
    "cdist 1": (lambda m, x, y: m.cdist(x, y, 1.0), [values(2, 4, 3), values(2, 5, 3, seed=2)]),
    "cdist inf": (lambda m, x, y: m.cdist(x, y, p=float("inf")), [Y, values(5, 3, seed=3)]),
    "cdist, broadcast": (lambda m, x, y: m.cdist(x, y), [values(2, 1, 4, 3), values(3, 5, 3, seed=2)]),
    "diagonal": (lambda m, x: m.diagonal(x), [Y]), "diagonal 1": (lambda m, x: x.diagonal(1), [Y]),
    "diagonal of planes": (lambda m, x: x.diagonal(-1, 2, 0) * x.diagonal(offset=1, dim1=-1, dim2=1).sum(),
                           [values(3, 4, 2)]),
    "diagonal past the end": (lambda m, x: x.diagonal(7).sum() + x.sum(), [Y]),
    "masked_select": (lambda m, x: m.masked_select(x, whole(m, Y > 0)), [Y]),
    "masked_select, broadcast": (lambda m, x: x.masked_select(whole(m, [[True], [False]])), [values(3)]),
    "masked_select of nothing": (lambda m, x: x.masked_select(whole(m, Y > 9)).sum() + x.sum(), [Y]),
    "masks of nothing": (lambda m, x: x[whole(m, np.zeros(0, bool))] + x[whole(m, np.zeros((0, 4), bool))].sum(),
                         [values(0, 4)]),
    "rows of nothing": (lambda m, x: x[whole(m, AT)] + x.flip(0).repeat_interleave(5, dim=0)[:5], [values(4, 0)]),
    "order of nothing": (lambda m, x: x.sort(0).values + x.sort(1).values + x.max(dim=1, keepdim=True).values
                         + x.topk(3, 1).values, [values(0, 3)]),
    "pieces of nothing": (lambda m, x: m.cat([*x.chunk(3), *x.split(2)], 1), [values(0, 2)]),
    "steps": (lambda m, x: x.sign() * x + m.round(x) + x.floor() * m.ceil(x) + m.trunc(x) * x, [Y * 1.1]),
    "whole numbers": (lambda m, x: x.double() * m.where(whole(m, [True, False, True]), m.cat(
        [whole(m, AT[:1]), whole(m, AT[3:])]).clamp(min=1), whole(m, 5)).double().mean(), [Y]),
    "one number": (lambda m, x: x[..., None] * x[None] + x[...].amax(), [values()]),
    "expand": (lambda m, x: x[:1].expand(5, -1, 2, -1) * x.chunk(5)[-1].sum(), [values(2, 2, 3)]),
    "split": (lambda m, x: x.split(2, dim=2)[1] * x.split([1, 1])[1], [values(2, 1, 3)]),
    "order": (lambda m, x: x.permute(2, 0, 1) + x.transpose(-1, 0).transpose(1, 2) + x[0].T.unsqueeze(1),
              [values(2, 2, 2)]),
    "stack and cat": (lambda m, x: m.stack([x, x * 2], dim=-1).sum(-1) + m.cat([x, x], dim=1)[:, 1:5] * 3, [X]),
    **{f"matmul {a} {b}": (lambda m, x, y: m.matmul(x, y), [values(*a), values(*b, seed=2)]) for a, b in (
        ((3, 1), (1, 2)), ((2, 3, 4), (2, 4, 2)), ((2, 3, 4), (4, 2)), ((3, 4), (2, 4, 2)), ((2, 1, 3, 2), (4, 2, 3)),
        ((1, 3, 2), (5, 2, 2)), ((3,), (3,)), ((3, 4), (4,)), ((2, 3, 4), (4,)), ((3,), (3, 2)), ((3,), (2, 3, 2)))},
    **{f"{name} {a} {b}": (lambda m, x, y, name=name: getattr(m, name)(x, y), [values(*a), values(*b, seed=2) + 3])
       for name in ("add", "sub", "mul", "div", "maximum", "minimum")
       for a, b in (((3, 4), (1, 4)), ((2, 1, 3), (4, 1)), ((), (3, 2)))},
    **{f"{name} {dim}": (lambda m, x, name=name, dim=dim: getattr(x, name)(dim=dim, keepdim=True), [values(2, 3, 4)])
       for name in ("sum", "mean", "amax") for dim in (0, (0, 2))},
    "global_avg_pool": (lambda m, x: ml.ops.global_avg_pool(x) if m is ml else x.mean((1, 2)), [values(2, 3, 2, 3)]),
    **{f"{name} of a dim": (lambda m, x, name=name: getattr(x, name)(dim=0).values * x.gather(
        2, getattr(x, name)(dim=-1, keepdim=True).indices), [values(2, 3, 2)]) for name in ("max", "min")},
    **{f"power {e}": (lambda m, x, e=e: x.abs() ** e, [X]) for e in (2, 3.0, -1, 0.5)}}
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "normalize": (lambda f, x: f.normalize(x), [X]),
    "cosine_similarity": (lambda f, x, y: f.cosine_similarity(x, y), [X, values(3, 4, seed=2)]),
    "binary_cross_entropy": (lambda f, x: f.binary_cross_entropy(x.sigmoid(), like(x, CHANCES)), [X]),
    "huber_loss": (lambda f, x, y: f.huber_loss(x, y, delta=0.5), [values(9), values(9, seed=2) * 0.7]),
    "smooth_l1_loss 0.5": (lambda f, x, y: f.smooth_l1_loss(x, y, beta=0.5), [values(9), values(9, seed=2) * 0.7]),
    "rms_norm": (lambda f, x: f.rms_norm(x, (4,)), [X]),
    "rms_norm, weight": (lambda f, x, w: f.rms_norm(x, (9,), w), [values(2, 3, 9), values(9, seed=2)]),
    "rms_norm, two axes": (lambda f, x, w: f.rms_norm(x, (3, 2), w, 1e-3), [values(4, 3, 2), values(3, 2, seed=2)]),
    "linear": (lambda f, *x: f.linear(*x), [values(5, 4), values(3, 4), values(3)]),
    "linear of a vector": (lambda f, *x: f.linear(*x), [values(4), values(3, 4), values(3)]),
    "linear of nothing": (lambda f, *x: f.linear(*x), [values(2, 3, 0), values(4, 0), values(4)]),
    "linear 3d": (lambda f, *x: f.linear(*x), [values(2, 5, 4), values(3, 4)]),
    "shared": (lambda f, x, w, b: ((f.linear(y := f.linear(x, w, b).tanh(), w, b).tanh() + y * y) @ w * b * b
                                   - f.linear(x, w) * y), [X, values(4, 4, seed=2), values(4, seed=3)]),
    "selu": (lambda f, x: f.selu(x), [X]), "celu": (lambda f, x: f.celu(x, 0.5), [X]),
    "softsign": (lambda f, x: f.softsign(x), [X]), "glu": (lambda f, x: f.glu(x), [X]),
    "glu 0": (lambda f, x: f.glu(x, 0), [values(4, 3)]), "glu of nothing": (lambda f, x: f.glu(x), [values(3, 0)]),
    "prelu": (lambda f, x, w: f.prelu(x, w), [X, values(1, seed=2)]),
    "prelu, channels": (lambda f, x, w: f.prelu(x, w), [X, values(4, seed=2)]),
    "pad": (lambda f, x: f.pad(x, (1, 2)) * f.pad(x, (2, 1), value=0.5), [X]),
    "pad two": (lambda f, x: f.pad(x, (1, 0, 0, 2)), [X]), "pad cuts": (lambda f, x: f.pad(x, (-1, 2)), [X]),
    "pad six": (lambda f, x: f.pad(x, (0, 0, 1, 2, 2, 1)), [values(2, 3, 4, 2)]),
    "pad reflect": (lambda f, x: f.pad(x, (2, 1), "reflect"), [values(2, 3, 4)]),
    "pad replicate": (lambda f, x: f.pad(x, (1, 3), "replicate"), [values(2, 3, 4)]),
    "pad circular": (lambda f, x: f.pad(x, (4, 1), mode="circular"), [values(2, 3, 4)])}
for name in ("l1_loss", "mse_loss", "smooth_l1_loss"):
    for r in ("mean", "none"):
        FUNCTIONS[f"{name} {r}"] = (lambda f, x, y, name=name, r=r: getattr(f, name)(x, y, reduction=r),
                                    [X, X[::-1] * 0.7])
for name, r in (("binary_cross_entropy_with_logits", "mean"), ("kl_div", "mean"), ("kl_div", "batchmean")):
    FUNCTIONS[f"{name} {r}"] = (lambda f, x, name=name, r=r: getattr(f, name)(x, like(x, CHANCES), reduction=r), [X])
for r, given in product(("mean", "sum", "none"), ({"weight": WEIGHTS}, {"pos_weight": WEIGHTS * 9}, {
        "weight": WEIGHTS, "pos_weight": WEIGHTS * 9})):
    FUNCTIONS[f"binary_cross_entropy_with_logits {r} {[*given]}"] = (
        lambda f, x, r=r, given=given: f.binary_cross_entropy_with_logits(
            x, like(x, CHANCES), reduction=r, **{k: like(x, v) for k, v in given.items()}), [X * 3])
for r, smoothing, ignored, weighted in product(("mean", "sum", "none"), (None, 0.0, 0.1), (-100, 2), (False, True)):
    FUNCTIONS[f"labels {r} {smoothing} {ignored} {weighted}"] = (  # without a smoothing: nll_loss
        lambda f, x, r=r, s=smoothing, ignored=ignored, weighted=weighted: getattr(
            f, "nll_loss" if s is None else "cross_entropy")(
                x, whole(f, [0, ignored, 1, 2, 0]), like(x, WEIGHTS[:3]) if weighted else None, reduction=r,
                ignore_index=ignored, **({} if s is None else {"label_smoothing": s})), [values(5, 3)])
for r, weighted in product(("mean", "sum", "none"), (False, True)):
    FUNCTIONS[f"classes that are ruled out {r} {weighted}"] = (
        lambda f, x, r=r, weighted=weighted: f.cross_entropy(
            x, whole(f, [1, 2, 0, -100]), like(x, WEIGHTS[:3]) if weighted else None, reduction=r),
        [np.where([[0, 0, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]], -np.inf, values(4, 3))])
LABELS = np.arange(12).reshape(2, 3, 2) % 4
#: images, series and classes that are last here: the same, with the axes of the operands for torch, and back
LAST: dict[str, tuple[Any, list[Any], list[Any], Any]] = {
    **{f"pixels {name} {r}": (lambda f, x, name=name, r=r: getattr(f, name)(x, whole(f, LABELS), reduction=r),
                              [values(2, 3, 2, 4)], [NCHW], None)
       for name in ("cross_entropy", "nll_loss") for r in ("mean", "sum", "none")},
    **{f"conv2d {case}": (lambda f, x, w, b, geometry=geometry: f.conv2d(x, w, b, *geometry),
                          [values(*x), values(*w, seed=2), values(w[0], seed=3)], [NCHW, NCHW, None], NHWC)
       for case, (x, w, *geometry) in (CONVOLUTIONS | FEW_PIXELS).items()},
    **{f"{name} {case} {ties}": (
        lambda f, x, name=name, window=window: getattr(f, name)(x, *window[:3], ceil_mode=len(window) > 3),
        [np.maximum(values(*x).round(), 0) if ties else values(*x)], [NCHW], NHWC)
       for name in ("max_pool2d", "avg_pool2d") for ties in ("", "ties") for case, (x, *window) in POOLS.items()},
    **{f"conv_transpose2d {options} {bias}": (
        lambda f, x, w, *b, options=options: f.conv_transpose2d(x, w, *b, **options),
        [values(*x), values(*w, seed=2), values(w[3] * options.get("groups", 1), seed=3)][: 2 + bias],
        [NCHW, NCHW, None][: 2 + bias], NHWC) for bias in (False, True) for x, w, options in (
            ((2, 3, 4, 2), (2, 3, 3, 3), {}), ((1, 3, 2, 2), (2, 2, 3, 3), {"stride": 2}),
            ((1, 3, 3, 2), (2, 3, 3, 2), {"stride": (2, 1), "padding": (1, 0)}),
            ((1, 3, 3, 2), (2, 3, 3, 2), {"stride": 2, "padding": 1, "output_padding": 1}),
            ((1, 3, 3, 4), (4, 2, 2, 3), {"groups": 2, "stride": 2}),
            ((1, 3, 3, 2), (2, 2, 2, 1), {"dilation": 2, "stride": 2, "output_padding": (1, 0)}))},
    **{f"conv1d {options}": (lambda f, x, w, b, options=options: f.conv1d(x, w, b, **options), [
        values(2, 7, 4), values(2, 3, 4 // options.get("groups", 1), seed=2), values(2, seed=3)], [NCL, NCL, None], NCL)
       for options in ({}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 2}, {"groups": 2})},
    **{f"adaptive_avg_pool2d {size}": (lambda f, x, size=size: f.adaptive_avg_pool2d(x, size), [values(2, 6, 5, 2)],
                                       [NCHW], NHWC) for size in (1, 2, 3, (2, 5), (6, 1), (7, 4))},
    **{f"{name} of no images {size}": (lambda f, x, name=name, size=size: getattr(f, name)(x, size),
                                       [values(0, 6, 5, 2)], [NCHW], NHWC)
       for name in ("adaptive_avg_pool2d", "interpolate") for size in ((1, 1), (3, 5), (7, 4), (12, 10))},
    **{f"interpolate {mode} {options}": (lambda f, x, mode=mode, options=options: f.interpolate(x, **mode, **options),
                                         [values(2, 3, 4, 2)], [NCHW], NHWC)
       for mode in ({}, {"mode": "bilinear"}, {"mode": "bilinear", "align_corners": True})
       for options in ({"scale_factor": 2}, {"scale_factor": (1, 3)}, {"size": (5, 7)}, {"size": (2, 2)})},
    **{f"group_norm {groups} {shape}": (
        lambda f, x, w, b, groups=groups: f.group_norm(x, groups, w, b),
        [values(*shape), values(4, seed=2), values(4, seed=3)],
        [(0, len(shape) - 1, *range(1, len(shape) - 1)), None, None], (0, *range(2, len(shape)), 1))
       for groups in (1, 2, 4) for shape in ((2, 4), (2, 5, 4), (3, 2, 3, 4), (1, 1, 1, 4))
       if np.prod(shape[1:]) != groups}}  # one value in a group has no variance
ALL = {**{name: (ml, "torch", f, arrays, (), None) for name, (f, arrays) in SAME.items()},
       **{name: (F, "functional", f, arrays, (), None) for name, (f, arrays) in FUNCTIONS.items()},
       **{name: (F, "functional", *row) for name, row in LAST.items()}}


@contextmanager
def named(name: str) -> Iterator[None]:
    """An error inside says which function it is of."""
    try:
        yield
    except Exception as error:
        error.add_note(name)
        raise


def is_smooth(name: str) -> bool:
    """The others have no derivative at their operands, or are the same function again."""
    return (name.removeprefix("conv2d ") not in FEW_PIXELS
            and not any(word in name for word in ("zeros", "ruled out", "ties")))


SMOOTH = [*filter(is_smooth, ALL)]
OF_EACH = list({name.split()[0].strip(","): name for name in reversed(SMOOTH)}.values())  #: one call of each function


@pytest.mark.parametrize("names", [OF_EACH, pytest.param(SMOOTH, marks=pytest.mark.slow)], ids=len)
def test_finite_differences(names: list[str]) -> None:
    for name in names:
        mine, _, f, arrays, *_ = ALL[name]
        with named(name):
            gradcheck(lambda *tensors, f=f, mine=mine: f(mine, *tensors), *arrays,
                      **{"rtol": 1e-5, "atol": 1e-7} if "norm" in name else {})


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:reduction. 'mean'")  # torch's advice to prefer batchmean
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_and_gradients_are_torchs(dtype: str) -> None:
    torch = torch_or_skip()
    for name, (mine, room, f, arrays, to, back) in ALL.items():
        theirs = torch if room == "torch" else torch.nn.functional
        with named(name):
            same(lambda *x, f=f, m=mine: f(m, *x), lambda *x, f=f, m=theirs: f(m, *x), arrays, dtype, to, back)


def test_recorded_ones_have_the_bits_of_eager_ones() -> None:
    for name, (mine, _, f, arrays, *_) in ALL.items():
        def step(*given: Any, f: Any = f, mine: Any = mine) -> Any:
            leaves = [t.requires_grad_() for t in given]
            y = f(mine, *leaves)
            (y * y).sum().backward()
            return y, *(t.grad for t in leaves)

        run = ml.SequentialExecutor(ml.record(step, *arrays))
        assert bits(*run(*arrays)) == bits(*step(*map(ml.array, arrays))), name
