"""On a GPU: the executors' tests again, accuracy against float64, memory over many steps, the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from cuda_on_gpu import run_kernel_on
from forms import outputs, reference
from gpu_steps import Run, equal, trained
from helpers import PATIENCE
from reference_calls import calls
from test_cuda_offload import WHATS
from test_cuda_offload import trained as offloaded
from test_cuda_runtime import (  # noqa: F401  the same tests, with this file's device
    test_a_trace_has_a_record_for_each_task,
    test_costs_are_measured_in_graphs,
    test_eager_steps_and_checkpoints,
    test_results_of_a_captured_step_can_be_read_at_any_time,
    test_schedules_give_the_bits_of_the_sequential_run,
    test_the_device_computes_what_the_cpu_does,
    test_weight_gradients_cross_the_border_on_streams_and_in_graphs,
    test_what_is_written_is_read,
)
from test_flash_attention import test_all_orders_have_the_same_bits_and_train_as_before  # noqa: F401
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
from test_references import OURS

import minidl as ml
from minidl import schedulers
from minidl.autograd.tape import Tape, use
from minidl.kernels import KERNELS
from minidl.kernels.conv import Geometry
from minidl.runtime.executors import GraphExecutor, StreamExecutor

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


MODELS = [("mlp", {"hidden": 64, "layers": 4}), ("lenet", {}), ("resnet20", {"preset": "tiny"}),
          ("densenet121", {"preset": "tiny"}), ("mobilenet_v3_large", {"preset": "tiny"})]


@pytest.mark.parametrize(("model", "arguments"), MODELS, ids=[m for m, _ in MODELS])
def test_fifty_steps_have_the_same_bits_in_every_executor(device, model, arguments):
    wanted = trained(device(), steps=50, model=model, **arguments)
    for kind in (StreamExecutor, GraphExecutor):
        for scheduler in (schedulers.in_order, schedulers.multi_stream):
            found = trained(device(), kind, scheduler, 50, model=model, **arguments)
            assert equal(found, wanted), (kind, scheduler)


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("kind", [StreamExecutor, GraphExecutor])
def test_offloaded_steps_have_the_same_bits(device, kind, what):
    assert offloaded(device(), kind, policy="multi_stream", offload=what)[:2] == offloaded(device())[:2]


def test_a_thousand_steps_take_no_more_memory(device):
    import cupy

    there = device()
    run = Run(there)
    step = run.executor(GraphExecutor)
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


SHAPES = [((32, 16, 16, 16), (32, 3, 3, 16), Geometry((1, 1), (1, 1), (1, 1), 1)),
          ((8, 33, 31, 24), (40, 5, 5, 24), Geometry((2, 2), (2, 2), (1, 1), 1)),
          ((16, 32, 32, 3), (16, 3, 3, 3), Geometry((2, 2), (1, 1), (1, 1), 1)),
          ((16, 14, 14, 72), (72, 5, 5, 1), Geometry((1, 1), (2, 2), (1, 1), 72)),
          ((32, 8, 8, 64), (24, 1, 1, 64), Geometry((1, 1), (0, 0), (1, 1), 1)),
          ((4, 16, 16, 8), (8, 3, 3, 4), Geometry((1, 1), (1, 1), (2, 2), 2))]


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
    a, b, out = (rng.standard_normal((n, n)).astype(np.float32), rng.standard_normal((n, n)).astype(np.float32),
                 np.zeros((n, n), np.float32))
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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("low", "unit"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
@pytest.mark.parametrize("sizes",
                         [(2, 12, 128, 128, 64), (1, 4, 1000, 1000, 64), (2, 3, 33, 77, 128), (2, 2, 7, 5, 8)], ids=str)
def test_flash_attention_is_as_close_as_attention_with_probabilities(device, sizes, low, unit, causal):
    """To float64 of the same numbers; with the same bits each time. q, k and v lie as cuts of a projection do."""
    there, rng, (n, h, t, s, d) = device(), np.random.default_rng(0), sizes
    if not there.flash:
        pytest.skip(f"{there.name} has no flash kernels")
    q, k, v = (rng.standard_normal((n, length, 3, h, d)).astype(low).transpose(2, 0, 3, 1, 4)[i]
               for i, length in enumerate((t, s, s)))
    dy = rng.standard_normal((n, t, h, d)).astype(low).transpose(0, 2, 1, 3)
    how = {"scale": d**-0.5, "causal": causal}

    def run(name: str, reads: list[Any], writes: list[Any], **constants: Any) -> list[Any]:
        specs = KERNELS[name].cuda_work
        run_kernel_on(there, name, reads, writes,
                      [np.zeros(*spec) for spec in specs(reads, writes, **constants)] if specs else [], constants)
        return writes

    def flash() -> list[Any]:
        y, lse = run("flash_attention", [q, k, v],
                     [np.zeros(dy.shape, low), np.full((n, h, t), np.nan, np.float32)], **how)
        return [y, *run("flash_attention_grad", [q, k, v, y, lse, dy],
                        [np.zeros(a.shape, low) for a in (q, k, v)], **how)]

    y, p = run("attention", [q, k, v], [np.zeros(dy.shape, low), np.zeros((n, h, t, s), low)], **how)
    plain = [y, *run("attention_grad", [q, k, v, p, dy], [np.zeros(a.shape, low) for a in (q, k, v)],
                     scale=how["scale"])]
    wide = [a.astype(np.float64) for a in (q, k, v, dy)]
    y, p = KERNELS["attention"].reference(np, *wide[:3], **how)
    wanted = [y, *KERNELS["attention_grad"].reference(np, *wide[:3], p, wide[3], scale=how["scale"])]
    found = flash()
    for name, a, b, w in zip(("y", "dq", "dk", "dv"), found, plain, wanted, strict=True):
        error, other = (float(np.linalg.norm(x.astype(np.float64) - w) / np.linalg.norm(w)) for x in (a, b))
        assert error <= 2 * max(other, unit), name
    assert [a.tobytes() for a in flash()] == [a.tobytes() for a in found]


def minidl(*arguments: str) -> Any:
    done = subprocess.run([sys.executable, "-m", "minidl", *arguments, "--json"], capture_output=True,
                          text=True, timeout=PATIENCE)
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
    there, here = trained(device(), model="lenet"), trained(ml.device.cpu(), model="lenet")
    np.testing.assert_allclose(there[0], here[0], rtol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OURS)
def test_references_give_over_cupy_what_they_give_over_numpy(device, name, dtype):
    """To the rounding of what is read, since sums of it may cancel, or to ten times the error that NumPy has itself."""
    there = device()
    for reads, constants in calls()[name]:
        given, wide = ([r.astype(t) if r.dtype == "float32" else r for r in reads] for t in (dtype, "float64"))
        xp = there.driver.cupy
        with there.driver.device, there.main.raw, np.errstate(all="ignore"):
            found = [v.get() for v in outputs(KERNELS[name].reference(xp, *map(xp.asarray, given), **constants))]
            own, wanted = (reference(name, arrays, **constants) for arrays in (given, wide))
        largest = max((float(np.abs(r[np.isfinite(r)]).max(initial=0)) for r in given if r.dtype.kind == "f"),
                      default=0.0)
        for f, o, w in zip(found, own, wanted, strict=True):
            assert (f.dtype, f.shape) == (o.dtype, o.shape)
            if f.dtype.kind != "f":
                np.testing.assert_array_equal(f, o)
                continue
            finite = np.isfinite(w)
            np.testing.assert_array_equal(np.isfinite(f), finite)
            error, its = (np.linalg.norm(x[finite].astype("float64") - w[finite]) for x in (f, o))
            norm = max(np.linalg.norm(w[finite]), largest * w.size**0.5)
            assert error <= max(100 * np.finfo(dtype).eps * norm, 10 * its), constants
