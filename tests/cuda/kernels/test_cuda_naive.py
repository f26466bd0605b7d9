"""The naive CUDA kernels, run on the CPU, against the references in float64; and timed beside the fast forms."""

from __future__ import annotations

import json
from dataclasses import replace

import cuda_runtime
import numpy as np
import pytest
from cuda_agree import written
from cuda_on_cpu import run
from forms import blank, exact

from minidl.cli import kernels as command
from minidl.cli import main
from minidl.kernels import KERNELS, cuda
from minidl.kernels.conv import Geometry
from minidl.kernels.naive import NAIVE
from minidl.measuring import kernel_times


def floats(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def check(name, reads, constants):
    """Each thread writes its own elements: the order of threads changes nothing."""
    def naive(name, reads, writes, seed, constants):
        for call in NAIVE[name](*reads, *writes, **constants):
            cuda.check(call)
            run(call, seed)

    reads = [np.asarray(a) for a in reads]
    expected = exact(name, reads, **constants)
    for one, wanted in zip(written(name, reads, blank(expected, "float32"), naive, **constants)[0], expected,
                           strict=True):
        error = np.linalg.norm(one.astype(np.float64) - wanted)
        assert error <= 2e-6 * max(1e-30, np.linalg.norm(wanted.astype(np.float64)))


@pytest.mark.parametrize("name", NAIVE)
def test_the_naive_kernel_is_the_reference(name, monkeypatch):
    monkeypatch.setattr(kernel_times, "WIDTH", 20)
    check(name, *kernel_times.EXAMPLES[name](np.random.default_rng(1), 33))


@pytest.mark.parametrize("geometry", [Geometry((2, 1), (1, 0), (1, 2), 2), Geometry((1, 2), (2, 2), (2, 1), 6)])
def test_convolutions_of_any_geometry(geometry):
    x, w = floats((2, 9, 8, 6), (12, 3, 2, 6 // geometry.groups))
    (dy,) = floats((2, *geometry.output((9, 8), (3, 2)), 12))
    check("conv2d", [x, w], {"geometry": geometry})
    check("conv2d_input_grad", [dy, w], {"size": (9, 8), "geometry": geometry})
    check("conv2d_weight_grad", [x, dy], {"taps": (3, 2), "bias": False, "geometry": geometry})


def test_edges():
    """Padding, ignored labels, keys that a query does not see, sums over other axes, values that are not numbers."""
    (x,) = floats((2, 5, 6, 3))
    x[0, 2, 2, 1] = np.nan
    pooled = [np.zeros((2, 3, 3, 3), np.float32), np.zeros((2, 3, 3, 3), np.int32)]
    constants = {"window": (3, 3), "stride": (2, 2), "padding": (1, 1)}
    for call in NAIVE["max_pool2d"](x, *pooled, **constants):
        run(call)
    for found, wanted in zip(pooled, KERNELS["max_pool2d"].reference(np, x, **constants), strict=True):
        np.testing.assert_array_equal(found[:, :wanted.shape[1], :wanted.shape[2]], wanted)
    logits, labels = floats((6, 5))[0], np.array([1, -100, 4, 0, -100, 2])
    check("cross_entropy", [logits, labels], {"smoothing": 0.0, "ignore": -100})
    check("cross_entropy_grad", [logits, labels, np.float32(0.5).reshape(())], {"smoothing": 0.2, "ignore": -100})
    for causal, offset in ((False, 0), (True, -2), (True, 3)):
        check("attention", floats((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)),
              {"scale": 0.5, "causal": causal, "offset": offset})
    for axes in ((0,), (0, 1), (1, 2)):
        check("sum", floats((4, 5, 6)), {"axes": axes, "factor": 0.25})


def test_naive_and_fast_are_shown_beside_each_other(monkeypatch, capsys):
    """On a CUDA device that is not there, so times mean nothing."""
    for name, value in (("ROWS", 64), ("SIDE", 32), ("WIDTH", 16)):
        monkeypatch.setattr(kernel_times, name, value)
    device = cuda_runtime.device()
    monkeypatch.setattr(command.devices, "get", lambda name: device)
    assert main(["kernels", "layer_norm", "--device", "cuda", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["kernels"]
    assert found["kernel"] == "layer_norm"
    assert found["naive_us"] > 0
    assert found["naive_error"] < 1e-6
    assert main(["kernels", "layer_norm", "--device", "cuda"]) == 0
    heads, row = capsys.readouterr().out.splitlines()[:2]
    assert heads.split()[-5:] == ["naive", "us", "naive", "error", "gain"]
    assert row.endswith("x")
    right = NAIVE["layer_norm"]
    monkeypatch.setitem(NAIVE, "layer_norm", lambda *arrays, eps: [
        replace(call, arguments=(*call.arguments[:7], 0.5, *call.arguments[8:])) for call in right(*arrays, eps=eps)])
    assert main(["kernels", "layer_norm", "--device", "cuda"]) == 1
    assert "WRONG" in capsys.readouterr().out
