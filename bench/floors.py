"""What holds a step back on one core: the time of each kernel family beside its floor, the larger of its flops at the
rate of a large product and its bytes at a copy's; and the peak of fused multiply-adds of the core.
"""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from against_torch import launch_times

from minidl import device
from minidl.measuring.kernel_times import SIDE, Rolled
from minidl.measuring.work import work_of_launch

SECONDS = 0.2  #: of runs, of which a quick one counts
SIZES = tuple(1 << n for n in range(14, 27, 2))  #: bytes of copies
CHAINS, TURNS = 12, 1 << 16  #: sums that do not wait for each other; steps of each


def peak() -> float:
    """GFLOP/s of fused multiply-adds in float32 on registers alone: a loop of LLVM's vectors, as
    wide as this processor's registers."""
    from llvmlite import binding, ir

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = binding.get_host_cpu_features()
    lanes = 16 if features.get("avx512f") else 8 if features.get("avx") else 4
    vector, counter, module = ir.VectorType(ir.FloatType(), lanes), ir.IntType(64), ir.Module()
    run = ir.Function(module, ir.FunctionType(ir.FloatType(), [counter, ir.FloatType()]), "run")
    multiply_add = ir.Function(module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{lanes}f32")
    begin, again, done = (run.append_basic_block(name) for name in ("begin", "again", "done"))
    build = ir.IRBuilder(begin)
    one = build.insert_element(ir.Constant(vector, ir.Undefined), run.args[1], ir.Constant(ir.IntType(32), 0))
    factor = build.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes))
    build.branch(again)
    build.position_at_end(again)
    turn = build.phi(counter)
    turn.add_incoming(ir.Constant(counter, 0), begin)
    sums = [build.phi(vector) for _ in range(CHAINS)]
    new = [build.call(multiply_add, [old, factor, factor]) for old in sums]
    for i, old in enumerate(sums):
        old.add_incoming(ir.Constant(vector, [float(i)] * lanes), begin)
        old.add_incoming(new[i], again)
    after = build.add(turn, ir.Constant(counter, 1))
    turn.add_incoming(after, again)
    build.cbranch(build.icmp_unsigned("<", after, run.args[0]), again, done)
    build.position_at_end(done)
    total = new[0]  # the sums of before would need registers of their own
    for each in new[1:]:
        total = build.fadd(total, each)
    build.ret(build.extract_element(total, ir.Constant(ir.IntType(32), 0)))
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=features.flatten().replace("+prefer-256-bit", "-prefer-256-bit"),
        opt=2)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), machine)
    engine.finalize_object()
    call = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_int64, ctypes.c_float)(engine.get_function_address("run"))
    return 2 * lanes * CHAINS * TURNS / quickest(lambda: call(TURNS, 0.5)) / 1e3


def quickest(run: Callable[[], object]) -> float:
    """Microseconds of this thread for a quick run, the tenth percentile of many, so that other work counts less."""
    times, end = list[float](), time.perf_counter() + SECONDS
    run()
    while not times or time.perf_counter() < end:
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return float(np.percentile(times, 10)) * 1e6


def roofline(device: Any) -> tuple[float, Callable[[float, float], float]]:
    """(flops per microsecond of a large product, the least microseconds for flops and bytes): `of_device` by quick
    runs."""
    rng = np.random.default_rng(0)
    product = Rolled(device, "matmul", [rng.standard_normal((SIDE, SIDE), np.float32) for _ in range(2)], {})
    copies = [Rolled(device, "relu", [rng.standard_normal(size // 8, np.float32)], {}) for size in SIZES]
    most = 2.0 * SIDE**3 / quickest(product.run)
    best = np.maximum.accumulate([copy.bytes / quickest(copy.run) for copy in copies][::-1])[::-1]

    def least(flops: float, nbytes: float) -> float:
        return max(flops / most, nbytes / float(best[min(np.searchsorted(SIZES, nbytes), len(SIZES) - 1)]))

    return most, least


def floors(graph: Any, x: Any, y: Any) -> dict[str, Any]:
    """The rates of this core, and a step's milliseconds and floor, whole and by kernel family, the longest first. A
    launch is timed alone, the least of several rounds; a group's time is shared out among its members' families."""
    (most, least), found = roofline(device.cpu()), defaultdict[str, list[float]](lambda: [0.0, 0.0, 0.0])
    for _, launch, seconds in launch_times(graph, x, y):
        parts = [(family, flops, max(1e-6, least(flops, nbytes))) for family, flops, nbytes in
                 work_of_launch(launch)]
        for family, flops, floor in parts:
            share = floor / sum(part[2] for part in parts)
            found[family] = [a + b for a, b in zip(found[family], (seconds * 1e3 * share, floor / 1e3, flops / 1e9),
                                                   strict=True)]
    whole = [sum(column) for column in zip(*found.values(), strict=True)]
    return {"peak_gflops": round(peak(), 1), "product_gflops": round(most / 1e3, 1),
            **_row(whole), "families": {name: _row(found[name]) for name in sorted(found, key=lambda n: -found[n][0])}}


def _row(numbers: list[float]) -> dict[str, float]:
    ms, floor, gflop = numbers
    return {"ms": round(ms, 4), "floor_ms": round(floor, 4), "share": round(floor / ms, 3), "gflop": round(gflop, 4)}
