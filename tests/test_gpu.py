"""On a GPU: the executors' tests again, accuracy against float64, memory over many steps, the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from cuda_on_gpu import run_kernel_on
from test_cuda_runtime import (  # noqa: F401  the same tests, with this file's device
    Run,
    equal,
    oracle,
    test_a_trace_has_a_record_for_each_task,
    test_capturing_changes_no_parameter,
    test_costs_are_measured_in_graphs,
    test_eager_steps_and_checkpoints,
    test_inputs_of_many_steps_in_flight_do_not_mix,
    test_schedules_give_the_bits_of_the_sequential_run,
    test_the_device_computes_what_the_cpu_does,
    test_weight_gradients_cross_the_border_on_streams_and_in_graphs,
    test_what_is_written_is_read,
)
from test_mixed_precision import (  # noqa: F401
    test_a_job_learns_the_digits,
    test_a_product_takes_rounded_inputs_and_gives_float32_gradients,
    test_a_run_goes_on_from_a_checkpoint,
    test_casts_stay_where_they_are_needed,
    test_every_executor_has_the_same_bits,
    test_fusion_in_mixed_precision,
    test_gradients_of_a_smooth_network,
    test_gradients_of_networks,
    test_gradients_of_sequences,
    test_norms_keep_their_statistics_in_float32,
    test_overflow_skips_the_step_and_shrinks_the_scale,
)

import minidl as ml
from minidl import schedulers
from minidl.executors import GraphExecutor, SequentialExecutor, StreamExecutor
from minidl.kernels import KERNELS
from minidl.kernels.conv import Geometry
from minidl.tape import Tape, use

pytestmark = pytest.mark.gpu


@pytest.fixture
def device():
    """The real one, whatever seed is asked for."""
    try:
        there = ml.device.get("cuda")
    except ml.DeviceError as error:
        pytest.skip(str(error))
    return lambda seed=0: there


@pytest.fixture
def there(device):
    """A tape on it, in force; the function gives another one."""
    with use(Tape(device())):
        yield lambda seed=0: Tape(device())


MODELS = [("mlp", {"hidden": 64, "layers": 4}), ("lenet", {}), ("resnet20", {"preset": "tiny"}), ("densenet121", {"preset": "tiny"}),
          ("mobilenet_v3_large", {"preset": "tiny"})]


@pytest.mark.parametrize(("model", "arguments"), MODELS, ids=[m for m, _ in MODELS])
def test_fifty_steps_have_the_same_bits_in_every_executor(device, model, arguments):
    there = device()
    first = Run(there, model, **arguments)
    wanted = first.train(SequentialExecutor(first.graph, there), 50)
    for kind in (StreamExecutor, GraphExecutor):
        for scheduler in (schedulers.in_order, schedulers.multi_stream):
            run = Run(there, model, **arguments)
            assert equal(run.train(kind(run.graph, scheduler(run.graph), device=there), 50), wanted), (kind, scheduler)


def test_a_thousand_steps_take_no_more_memory(device):
    import cupy

    there = device()
    run = Run(there)
    step = GraphExecutor(run.graph, schedulers.multi_stream(run.graph), device=there)
    batch = next(run.batches)
    for _ in range(20):
        step(*batch)
    there.synchronize()
    before, free = cupy.get_default_memory_pool().total_bytes(), cupy.cuda.runtime.memGetInfo()[0]
    for _ in range(1000):
        step(*batch)
    there.synchronize()
    assert cupy.get_default_memory_pool().total_bytes() == before
    assert cupy.cuda.runtime.memGetInfo()[0] >= free - (1 << 20)


SHAPES = [((32, 16, 16, 16), (32, 3, 3, 16), Geometry((1, 1), (1, 1), (1, 1), 1)), ((8, 33, 31, 24), (40, 5, 5, 24), Geometry((2, 2), (2, 2), (1, 1), 1)),
          ((16, 32, 32, 3), (16, 3, 3, 3), Geometry((2, 2), (1, 1), (1, 1), 1)), ((16, 14, 14, 72), (72, 5, 5, 1), Geometry((1, 1), (2, 2), (1, 1), 72)),
          ((32, 8, 8, 64), (24, 1, 1, 64), Geometry((1, 1), (0, 0), (1, 1), 1)), ((4, 16, 16, 8), (8, 3, 3, 4), Geometry((1, 1), (1, 1), (2, 2), 2))]


@pytest.mark.parametrize(("x", "w", "geometry"), SHAPES)
def test_convolutions_are_strict_float32(device, x, w, geometry):
    rng = np.random.default_rng(0)
    y = (x[0], *geometry.output(x[1:3], w[1:3]), w[0])
    arrays = {"x": rng.standard_normal(x), "w": rng.standard_normal(w), "dy": rng.standard_normal(y)}
    single = {k: v.astype(np.float32) for k, v in arrays.items()}
    cases = {"conv2d": (("x", "w"), y, {}), "conv2d_input_grad": (("dy", "w"), x, {"size": x[1:3]}),
             "conv2d_weight_grad": (("x", "dy"), w, {"taps": w[1:3], "bias": False})}
    for name, (reads, shape, constants) in cases.items():
        constants |= {"geometry": geometry}
        out = np.full(shape, np.nan, np.float32)
        specs = KERNELS[name].cuda_work
        given = [single[r] for r in reads]
        work = [np.zeros(s, t) for s, t in (specs(given, [out], **constants) if specs else ())]
        run_kernel_on(device(), name, given, [out], work, constants)
        wanted = KERNELS[name].reference(np, *(single[r].astype(np.float64) for r in reads), **constants)
        assert np.linalg.norm(out - wanted) <= 1e-5 * np.linalg.norm(wanted), name


@pytest.mark.parametrize("n", [64, 509, 1024])
def test_products_are_strict_float32_unless_tf32_is_asked_for(device, n):
    there = device()
    rng = np.random.default_rng(0)
    a, b, out = rng.standard_normal((n, n)).astype(np.float32), rng.standard_normal((n, n)).astype(np.float32), np.zeros((n, n), np.float32)
    wanted = a.astype(np.float64) @ b.astype(np.float64)

    def error() -> float:
        run_kernel_on(there, "matmul", [a, b], [out], [], {})
        return float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))

    assert error() <= 1e-5
    there.tf32 = True
    try:
        assert error() <= 1e-3
    finally:
        there.tf32 = False


def minidl(*arguments: str) -> Any:
    done = subprocess.run([sys.executable, "-m", "minidl", *arguments, "--json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_command_line_trains_and_compares(device):
    device()
    job = ("--model", "lenet", "--device", "cuda", "--steps", "30", "--batch-size", "32")
    assert minidl("train", *job)["loss_last"] < 2.4
    found = minidl("compare", *job, "--schedulers", "in_order,multi_stream,multi_region")
    assert found["bit_identical"]
    assert minidl("train", *job)["device"] == "cuda:0"


def test_the_cpu_and_the_gpu_agree(device):
    there, here = oracle(device(), model="lenet"), oracle(ml.device.cpu(), model="lenet")
    np.testing.assert_allclose(there[0], here[0], rtol=1e-3)
