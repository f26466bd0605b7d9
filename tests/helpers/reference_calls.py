"""Operands for the reference of every kernel: those of the examples of `test_kernels`, and what small trainings
launch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from helpers import random_array
from kernel_examples import arrays, examples

import minidl as ml
from minidl import models, nn, ops, optim
from minidl.autograd.tape import Tape, no_grad, use
from minidl.devices.device import CPU
from minidl.fusion import RULES, fused
from minidl.kernels import KERNELS
from minidl.runtime.executors import SequentialExecutor

Call = tuple[tuple[Any, ...], dict[str, Any]]  #: what is read, constants


class Noting(CPU):
    """A CPU that runs references, so nothing is compiled, and notes what every launch reads: of each kernel the first
    launches of other shapes or constants."""

    MOST = 12

    def __init__(self) -> None:
        self.calls: dict[str, dict[str, Call]] = {}

    def bind(self, launch: Any, array: Any, stream: Any = None) -> list[Any]:
        constants, shapes = dict(launch.constants), [(v.shape, v.dtype) for v in launch.reads]

        def note() -> None:
            known = self.calls.setdefault(launch.kernel, {})
            reads = tuple(np.array(array(v)) for v in launch.reads)
            if len(known) < self.MOST:
                known.setdefault(f"{shapes} {constants}", (reads, constants))
            found = KERNELS[launch.kernel].reference(np, *reads, **constants)
            for view, value in zip(launch.writes, found if isinstance(found, tuple) else (found,), strict=True):
                np.copyto(array(view), value, casting="same_kind")

        return [note]


@cache
def calls() -> dict[str, list[Call]]:
    """By kernel, in float32."""
    found: dict[str, list[Call]] = {name: []
                                    for name, k in KERNELS.items() if k.reference.__module__.startswith("minidl.")}
    for example in examples():
        found[example.kernel].append((tuple(arrays(example, "float32")[0]), example.constants))
    for name, reads, constants in _others():
        found[name].append((reads, constants))
    device = Noting()
    with use(Tape(device)):
        ml.seed(0)
        _layers()
        _sequences()
        _experts()
        _networks(device)
    for name, noted in device.calls.items():
        found[name] += noted.values()
    return found


def given(*shape: int, seed: int = 0) -> Any:
    return ml.Parameter(random_array(shape, seed, "float32"))


def _layers() -> None:
    """Of images."""
    x = given(2, 5, 6, 4, seed=1)
    for w, stride, padding, dilation, groups in (((3, 3, 3, 4), 1, 1, 1, 1), ((2, 2, 3, 4), (1, 2), (0, 2), (2, 1), 1),
                                                 ((6, 3, 2, 2), 2, 1, 1, 2), ((4, 3, 3, 1), 1, 1, 1, 4),
                                                 ((3, 1, 1, 4), 1, 0, 1, 1)):
        for bias in (False, True):
            ops.conv2d(x, given(*w, seed=2), given(w[0], seed=3) if bias else None, stride, padding, dilation,
                       groups).sum().backward()
    for pool, (stride, padding) in itertools.product((ops.max_pool2d, ops.avg_pool2d),
                                                     ((2, 0), (1, 1), ((2, 1), (1, 0)))):
        (pool(x, 3, stride, padding) * pool(x, 3, stride, padding)).sum().backward()
    norm = nn.BatchNorm2d(4)
    for act in (ops.relu6, ops.hardsigmoid, ops.hardswish):
        act(norm(x)).sum().backward()
    norm.eval()
    (norm(x) * x).sum().backward()
    for act in (ops.absolute, ops.tanh, ops.sigmoid, ops.gelu, lambda t: ops.gelu(t, "tanh")):
        act(x).sum().backward()
    for act in (ops.silu, ops.mish, ops.softsign, ops.leaky_relu, ops.rms_norm, ops.spike,
                lambda t: ops.spike(t, "rectangle"), lambda t: ops.rms_norm(t, given(4, seed=2))):
        act(x).sum().backward()
    for loss in (ops.l1_loss, ops.smooth_l1_loss, ops.binary_cross_entropy_with_logits, ops.kl_div):
        loss(x, ops.sigmoid(x * 0.5).detach()).backward()  # not of x, where the gradient of bce is only rounding
    nn.functional.binary_cross_entropy(ops.sigmoid(x), ops.sigmoid(x * 0.5)).backward()


def _sequences() -> None:
    x, mask = given(3, 5, 6), ml.array(np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 0]]))
    for reverse, bias in itertools.product((False, True), (0, 1)):
        for kind, gates in (("rnn", 1), ("gru", 3), ("lstm", 4)):
            w, b = given(gates * 2, 2, seed=1), [given(gates * 2, seed=2)][:bias]
            h, gx = given(5, 2, seed=3), given(3, 5, gates * 2, seed=4)
            for options in ({"relu": True}, {"relu": False}) if kind == "rnn" else ({},):
                y = getattr(ops, kind)(gx, h, *[h][: kind == "lstm"], w, *b, reverse=reverse, **options)[0]
                (y * y).sum().backward()
    w, b = given(6, seed=5), given(6, seed=6)
    q = ops.transpose(ops.reshape(ops.layer_norm(x, w, b) + ops.layer_norm(x) + ops.layer_norm(x, w), (3, 5, 2, 3)),
                      (0, 2, 1, 3))
    y = ops.attention(q, q, q, mask) + ops.attention(q, q, q, causal=True) + ops.attention(q, q, q, mask, causal=True)
    y = y + ops.attention(q, q, q, mask, dropout=0.3) + ops.attention(q, q, q, causal=True, dropout=0.3)
    y = y + ops.attention(q, q, q, causal=True, offset=2) + ops.attention(q, q, q, causal=True, offset=2, dropout=0.3)
    y = ops.log_softmax(ops.gelu(ops.concat([y, y * 2.0], 3)))[..., ::2]
    table = given(7, 3, seed=7)
    loss = ops.mse(y, ops.embedding(table, ml.array(np.array([[6, 6, 0, 6, 1]] * 2)[None].repeat(3, 0))))
    rows = ops.reshape(y, (30, 3))
    (loss + ops.cross_entropy(rows, ml.array(np.arange(30) % 3), 0.1)).backward()
    for make in (optim.SGD, optim.Adam, optim.AdamW):
        opt = make([x, w, b, table], 0.1, weight_decay=0.1, max_norm=0.1)
        opt.step()
        for p in opt.parameters:
            p.used = False


def _experts() -> None:
    """Also some that nobody chooses, and rows of two sources."""
    for experts, top_k, capacity, shared in ((4, 2, None, 1), (4, 2, 3, 0), (1, 1, None, 0), (5, 5, 1, 0)):
        layer = nn.MoE(3, 6, experts, top_k, capacity, shared, bias_rate=0.1, balance=0.1)
        y = layer(given(7, 3, seed=experts))
        (y * y).sum().backward()
    x, counts = given(9, 3), ml.array(np.array([[2, 0, 1], [0, 0, 4]]))
    for bias in (None, given(3, 2, seed=2)):
        for gelu in (False, True):
            ops.grouped_linear(x, counts, given(3, 2, 3, seed=1), bias, gelu=gelu).sum().backward()


def _networks(device: Any) -> None:
    """Steps of networks, their launches put together."""
    for name, optimizer in (("mobilenet_v3_large", optim.SGD), ("densenet121", optim.Adam), ("resnet20", optim.SGD),
                            ("mlp", optim.RMSprop), ("mlp", optim.NAdamW)):
        model = models.create(name, preset="tiny")
        opt, rng = optimizer(model.parameters(), 0.01,
                             **({"momentum": 0.9} if optimizer is optim.SGD else {})), np.random.default_rng(0)
        x, y = rng.standard_normal((2, *model.input_shape)).astype("float32"), rng.integers(0, model.classes, 2)

        def step(x: Any, y: Any, model: Any = model, opt: Any = opt) -> Any:
            loss = nn.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss

        for rules in (RULES, [rule for rule in RULES if rule not in ("batch_norm_grad", "weight_updates")]):
            SequentialExecutor(fused(ml.record(step, x, y), device, rules), device)(x, y)
        with no_grad():
            model.eval()(ml.array(x))


def _others() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """What no training here launches: it takes mixed precision, pipelines in two directions, the clipping of an odd
    number of gradients, or a residual branch that ends in a product."""
    statistics = [np.abs(random_array((5,), i, "float32")) for i in range(4)]
    yield "batch_norm_move", (*statistics, np.array(3)), {"momentum": 0.1}
    g, h = (random_array(shape, 1, "float32") for shape in ((3, 4), (5,)))
    yield "cast_many", (g, h), {"dtype": "float16"}
    yield "matmul_add", tuple(random_array(shape, 2, "float32") for shape in ((3, 4), (4, 5), (3, 5))), {}
    for bad in (False, True):
        yield "unscale", (g, np.where(h > 1, np.inf, h).astype("float32") if bad else h,
                          np.array([1024.0], "float32")), {}
        yield ("scale_update", (np.array([8.0], "float32"), np.array([3], "int32"), np.array([bad], "int32")),
               {"growth": 2.0, "backoff": 0.5, "interval": 4})
        yield "adam_tick", (np.array([[2.0, 0.81, 0.98]]), np.array([bad], "int32")), {"beta1": 0.9, "beta2": 0.99}
        yield "any_set", (np.array([0], "int32"), np.array([bad], "int32")), {}
    yield "clip_factor", tuple(np.array([v]) for v in (1.0, 2.5, 0.25)), {"limit": 1.0}
    q, k, v, dy = (random_array(shape, i, "float32")
                   for i, shape in enumerate(((2, 2, 5, 4), (2, 2, 5, 4), (2, 2, 5, 3), (2, 2, 5, 3))))
    for causal in (False, True):
        constants = {"scale": 0.5, "causal": causal}
        yield "flash_attention", (q, k, v), constants
        y, lse = KERNELS["flash_attention"].reference(np, q, k, v, **constants)
        yield "flash_attention_grad", (q, k, v, y, lse, dy), constants
