"""Along which axes kernels may be cut: parts are equal to the whole, and a kernel that names no axis has a reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import random_array
from kernel_examples import Example, arrays, examples

from minidl.core.graph import Launch, View
from minidl.core.tasks import strides_of
from minidl.devices.device import cpu
from minidl.kernels import KERNELS
from minidl.passes.split import axes_of, cut_in_parts

ONE_NUMBER, ALL_ELEMENTS = "its result is one sum over all elements", "each element needs a sum over all of them"
LENGTHS, NUMBERS = "it takes arrays of different lengths, by one rule for all", "it takes a few numbers"
GROUPS = "it learns when it runs how many rows an expert has"
SEVERAL = "it has launches that are whole"
FIRST = "its scratch memory has the first rows of any weight"
CHANNELS = "its parts would be channels, and on the CPU its activation goes over memory without gaps"
WHOLE = {"cross_entropy": ONE_NUMBER, "mse": ONE_NUMBER, "square_sum": ONE_NUMBER, "dither": ALL_ELEMENTS,
         "muon": ALL_ELEMENTS, "group": SEVERAL, "linear_weight_update": FIRST,
         **dict.fromkeys(("route", "route_grad", "dispatch", "combine", "gate_grad", "grouped_linear",
                          "grouped_linear_input_grad", "grouped_linear_weight_grad"), GROUPS),
         **dict.fromkeys(("batch_norm_act", "batch_norm_act_weight_grad", "batch_norm_act_input_grad",
                          "batch_norm_grad"), CHANNELS),
         **dict.fromkeys(("sgd_many", "adam_many", "nadam_many", "rmsprop_many", "cast_many", "unscale"), LENGTHS),
         **dict.fromkeys(("tick", "adam_tick", "nadam_tick", "clip_factor", "any_set", "scale_update",
                          "count_load", "move_bias"), NUMBERS)}
S, IMAGE, FEW = (6, 5), (3, 4, 4, 8), {"eps": 1e-3}
CHANCES = np.abs(random_array(S)) / 2.1
#: kernels that have no example elsewhere
MORE = [
    *(e for name in ("relu6", "hardsigmoid", "hardswish", "silu", "mish", "softsign", "gelu", "gelu_tanh")
      for e in (Example(name, (S,), (S,)), Example(f"{name}_grad", (S, S), (S,)))),
    Example("leaky_relu", (S,), (S,), {"slope": 0.1}), Example("leaky_relu_grad", (S, S), (S,), {"slope": 0.1}),
    *(Example(name, reads, (S,), {"rectangle": wide}) for wide in (False, True)
      for name, reads in (("spike", (S,)), ("spike_grad", (S, S)))),
    *(Example(name, (S, S), (S,)) for name in ("l1", "bce_with_logits", "kl_div")),
    *(Example(f"{name}_grad", (S, S, S), (S,)) for name in ("l1", "bce_with_logits")),
    Example("bce", (CHANCES, CHANCES), (S,)),
    *(Example(name, (CHANCES, CHANCES, S), (S,)) for name in ("bce_grad", "bce_target_grad")),
    Example("smooth_l1", (S, S), (S,), {"beta": 0.5}), Example("smooth_l1_grad", (S, S, S), (S,), {"beta": 0.5}),
    Example("mse_grad", (S, S, ()), (S,), {"factor": 2 / 30}), Example("log_softmax", (S,), (S,)),
    Example("log_softmax_grad", (S, S), (S,)),
    Example("argsort", (random_array((4, 3, 5)),), (np.zeros((4, 3, 5), np.int64),), {"axis": 1}),
    Example("cumsum", ((4, 3, 5),), ((4, 3, 5),), {"axis": 2, "reverse": True}),
    Example("unslice", ((6, 2),), (S,), {"shape": S, "region": ((0, 6, 1), (1, 5, 2))}),
    Example("unslice", ((3, 5),), (S,), {"shape": S, "region": ((0, 6, 2), (0, 5, 1))}),
    Example("max_grad", (random_array((4, 3, 5), 3), random_array((4, 3, 5), 3).max(axis=(1, 2), keepdims=True),
                         (4, 1, 1)), ((4, 3, 5),), {"axes": (1, 2)}),
    Example("matmul_slope", ((6, 4), (4, 5), (6, 5)), ((6, 5),), {"act": "relu_grad"}),
    Example("batch_norm_eval", (IMAGE, (8,), (8,), (8,), (8,)), (IMAGE, (8,)), FEW, positive=True),
    Example("batch_norm_eval_input_grad", (IMAGE, (8,), (8,)), (IMAGE,)),
    Example("batch_norm_move", ((8,), (8,), (8,), (8,), np.array(3)), ((8,), (8,), np.array(0)), {"momentum": 0.1}),
]
CASES = [e for e in [*examples(6, 5), *MORE] if KERNELS[e.kernel].axes]


def run(launches: list[Launch], memory: list[np.ndarray]) -> None:
    device = cpu()
    for launch in launches:
        own = {v: np.full(v.size, np.nan if np.dtype(v.dtype).kind == "f" else 1, v.dtype)
               for v in launch.views if v.storage < 0}
        for call in device.bind(launch, lambda v, own=own: device.array(own.get(v, memory[max(v.storage, 0)]), v)):
            call()


def view(storage: int, shape: tuple[int, ...], dtype: Any) -> View:
    return View(storage, tuple(shape), strides_of(tuple(shape)), 0, str(np.dtype(dtype)))


def cut(example: Example, count: int) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """What a launch writes, whole and in so many parts, the last one first; and in how many parts it could be cut."""
    kernel, found, parts = KERNELS[example.kernel], [], ()
    for whole in (True, False):
        reads, writes = arrays(example, "float64")
        memory, n = [np.array(a).reshape(-1) for a in (*reads, *writes)], len(reads)
        views = [view(i, a.shape, a.dtype) for i, a in enumerate((*reads, *writes))]
        work = kernel.work(reads, writes, **example.constants) if kernel.work else ()
        launch = Launch(kernel.name, tuple(views[:n]), tuple(views[n:]), tuple(
            view(-1 - i, *spec) for i, spec in enumerate(work)), tuple(example.constants.items()),
            cpu().cuts(kernel, reads, example.constants))
        parts = () if whole else cut_in_parts((launch,), count)
        run([one for part in parts[::-1] for one in part.launches] or [launch], memory)
        found.append(memory[n:])
    assert all(one.cuts.along for part in parts for one in part.launches)
    return found[0], found[1], len(parts)


@pytest.mark.parametrize("example", CASES, ids=str)
def test_parts_write_what_the_whole_writes(example: Example):
    """In float64, to a few roundings: a product of fewer rows may add in another order."""
    for count in (2, 3):
        for a, b in zip(*cut(example, count)[:2], strict=True):
            np.testing.assert_allclose(a, b, 1e-14, 1e-14)


def test_each_kernel_with_an_axis_is_cut_in_one_of_these_cases():
    """`elsewhere`: in the steps of tests/passes/test_split.py."""
    elsewhere = {name for name in KERNELS if name.startswith((
        "attention", "flash_attention", "conv2d", "batch_norm", "layer_norm", "rms_norm", "embedding", "max_pool2d",
        "avg_pool2d", "lstm", "gru", "rnn"))}
    named = {name for name, k in KERNELS.items() if k.axes and k.reference.__module__.startswith("minidl.")}
    assert named - elsewhere <= {e.kernel for e in CASES if cut(e, 2)[2]}


def test_a_kernel_that_names_no_axis_cannot_be_cut():
    mine = {name: k for name, k in KERNELS.items() if k.reference.__module__.startswith("minidl.")}
    assert {name for name, k in mine.items() if not k.axes} == {*WHOLE}
    assert axes_of(Launch("relu", (), ())) == ([], [])
