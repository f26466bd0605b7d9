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


def trained(name, devices, micro_batches, transport=staged):
    """The parameters that a pipeline leaves, each from the rank that updates it."""
    own = [recorded(device, micro_batches, micro_batches) for device in devices]
    x, y = batches(micro_batches)
    plans = [ml.plan(graph, name, CostModel.analytic(), ml.Machine(len(devices))) for _, _, graph in own]

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
        return {i: p.numpy() for i, p in enumerate(model.parameters()) if id(p.storage) in held}

    with deadline():
        found = run_ranks(len(devices), work)
    return dict(sorted((i, p) for one in found for i, p in one.items()))


def same(found, wanted):
    return len(found) == len(wanted) and all(found[i].tobytes() == p.tobytes() for i, p in enumerate(wanted))


@pytest.mark.few(1)
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1", "interleaved"])
def test_every_schedule_gives_the_bits_of_one_process(gpus, name, captured):
    devices = gpus(2, 3)
    wanted = alone(devices[0], 4).parameters
    assert same(trained(name, devices if captured else streams_only(devices), 4), wanted)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(4, 8))
@pytest.mark.parametrize("transport", [staged, aware])
def test_whatever_order_streams_run_in(gpus, seed, transport):
    devices = gpus(2, seed)
    wanted = alone(devices[0], 4).parameters
    assert same(trained("one_f_one_b", streams_only(devices) if seed % 2 else devices, 4, transport), wanted)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1", "interleaved"])
def test_nccl_moves_messages_on_a_stream_for_each_direction(gpus, stub, name):
    devices = gpus(3 if name == "zb_h1" else 2, 5)
    wanted = alone(devices[0], 6).parameters
    assert same(trained(name, devices, 6, ring), wanted)
    assert not stub.left, "something was sent and not received"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 22))
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1", "zb_auto", "interleaved", "fast_forward", "hanayo"])
def test_more_orders_and_more_ranks(gpus, stub, name, seed):
    devices = gpus(2 if seed % 3 else 3, seed)
    micro_batches = 6
    wanted = alone(devices[0], micro_batches).parameters
    assert same(trained(name, devices if seed % 2 else streams_only(devices), micro_batches,
                        (staged, staged, aware, ring)[seed % 4]), wanted)
