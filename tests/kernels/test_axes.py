"""Along which axes kernels may be cut: parts are equal to the whole, and a kernel that names no axis has a reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_examples import Example, arrays, examples

from minidl.core.graph import Launch, View
from minidl.core.tasks import strides_of
from minidl.devices.device import cpu
from minidl.kernels import KERNELS
from minidl.kernels.product_slope import SLOPES
from minidl.passes.split import axes_of, cut_in_parts

ONE_NUMBER, ALL_ELEMENTS = "its result is one sum over all elements", "each element needs a sum over all of them"
LENGTHS, NUMBERS = "it takes arrays of different lengths, by one rule for all", "it takes a few numbers"
GROUPS = "it learns when it runs how many rows an expert has"
SEVERAL = "it has launches that are whole"
CHANNELS = "its parts would be channels, and on the CPU its activation goes over memory without gaps"
WHOLE = {"cross_entropy": ONE_NUMBER, "mse": ONE_NUMBER, "square_sum": ONE_NUMBER, "dither": ALL_ELEMENTS,
         "muon": ALL_ELEMENTS, "group": SEVERAL,
         **dict.fromkeys(("route", "route_grad", "dispatch", "combine", "gate_grad", "grouped_linear",
                          "grouped_linear_input_grad", "grouped_linear_weight_grad"), GROUPS),
         **dict.fromkeys(("batch_norm_act", "batch_norm_act_weight_grad", "batch_norm_act_input_grad",
                          "batch_norm_grad"), CHANNELS),
         **dict.fromkeys(("sgd_many", "adam_many", "nadam_many", "rmsprop_many", "cast_many", "unscale"), LENGTHS),
         **dict.fromkeys(("tick", "adam_tick", "nadam_tick", "clip_factor", "any_set", "scale_update",
                          "count_load", "move_bias"), NUMBERS)}
FEW = [Example("linear", ((2, 5), (7, 5), (7,)), ((2, 7),), {"act": "relu"}),  # whose parts are columns
       *(Example("matmul_slope", ((2, 5), (5, 7), (2, 7)), ((2, 7),), {"act": act}) for act in SLOPES)]
CASES = [*(e for e in examples(6, 5) if KERNELS[e.kernel].axes), *FEW]


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
