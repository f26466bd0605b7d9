"""Pipelines on CUDA, without a GPU: every schedule and transport gives the bits of one process, whatever order streams
run in, with messages staged in host memory or read on the device."""

from __future__ import annotations

import pytest
from helpers import deadline
from test_cuda_distributed import STEPS, alone, aware, batches, gpus, rate, recorded, ring, staged, streams_only, stub

import minidl as ml
from minidl.pricing.cost import CostModel
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import DistributedExecutor

__all__ = ["gpus", "stub"]  # fixtures


NAMES = ["gpipe", "one_f_one_b", "zb_h1", "interleaved"]
#: name, ranks, micro-batches, seed of the streams' order, transport, whether steps are captured
CASES = [("one_f_one_b", 2, 4, 4, aware, True), ("zb_h1", 3, 6, 5, ring, True),
         *(pytest.param(*row, marks=pytest.mark.wide) for row in (
             *((name, 2, 4, 3, staged, captured) for name in NAMES for captured in (True, False)),
             *(("one_f_one_b", 2, 4, seed, t, seed % 2 == 0) for seed in range(4, 8) for t in (staged, aware)),
             *((name, 2, 6, 5, ring, True) for name in NAMES))),
         *(pytest.param(name, 2 if seed % 3 else 3, 6, seed, (staged, staged, aware, ring)[seed % 4], seed % 2 == 1,
                        marks=pytest.mark.slow)
           for name in [*NAMES, "zb_auto", "fast_forward", "hanayo"] for seed in range(10, 22))]


@pytest.mark.parametrize(("name", "ranks", "micro_batches", "seed", "transport", "captured"), CASES)
def test_every_order_gives_the_bits_of_one_process(gpus, stub, name, ranks, micro_batches, seed, transport, captured):
    """Each parameter as the rank that updates it has it. NCCL moves messages on a stream for each direction."""
    devices = gpus(ranks, seed)
    wanted = alone(devices[0], micro_batches).parameters
    devices = devices if captured else streams_only(devices)
    own = [recorded(device, micro_batches, micro_batches) for device in devices]
    x, y = batches(micro_batches)
    plans = [ml.plan(graph, name, CostModel.analytic(), ml.Machine(ranks)) for _, _, graph in own]

    def work(communicator):
        rank = communicator.rank
        model, opt, _ = own[rank]
        run = DistributedExecutor(*plans[rank].with_messages, transport(communicator, devices[rank]),
                                  device=devices[rank])
        for t in range(STEPS):
            opt.lr = rate(t)
            run(*[part for i in range(micro_batches) for part in (x[t, i], y[t, i])])
        run.close()
        held = {id(spec.live) for spec in run.program.graph.storages if spec.live is not None}
        return {i: p.numpy().tobytes() for i, p in enumerate(model.parameters()) if id(p.storage) in held}

    with deadline():
        found = run_ranks(ranks, work)
    assert {i: bits for one in found for i, bits in one.items()} == {i: p.tobytes() for i, p in enumerate(wanted)}
