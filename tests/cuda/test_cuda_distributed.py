"""Ranks on CUDA, without a GPU: every schedule of replicas and of stages, and every transport, gives the bits of a
sequential run, whatever order streams run in; a missing wait shows; ranks take their GPUs, or say in one line why
not."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import cuda_runtime
import numpy as np
import pytest
from cuda_ranks import TOLD, Runtime, aware, free_ring, ring, staged
from helpers import bits, deadline, replicas

import minidl as ml
from minidl import models, optim
from minidl.autograd.tape import Tape, use
from minidl.core.graph import View
from minidl.core.tasks import Kind
from minidl.devices.cuda import device as cuda_device
from minidl.measuring import links as link_costs
from minidl.runtime.comm import Communicator, OnDevice, RankError, Staged, nccl
from minidl.runtime.comm.flight import Entry, Flight
from minidl.runtime.comm.handover import ByEvents, handover
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.comm.nccl import NCCL, NCCLError
from minidl.runtime.executors import DistributedExecutor, SequentialExecutor
from minidl.schedulers import names
from minidl.training import same
from minidl.training.agreement import Disagreement

SHARE, STEPS = 4, 5  # captured from the third step on


# ------------------------------------------------------------------------------------------------------------- training
def batches(ranks):
    random = np.random.default_rng(3)
    return random.normal(size=(STEPS, ranks, SHARE, 12)).astype("f"), random.integers(0, 5, (STEPS, ranks, SHARE))


def recorded(device, ranks, micro_batches=1):
    """A network on a device, and its step on the shares of some ranks as micro-batches."""
    x, y = batches(ranks)
    with use(Tape(device)):
        ml.seed(1)
        model = models.mlp(12, 16, 8, 16, 5)
        opt = optim.SGD(model.parameters(), 0.05, momentum=0.9)

        def step(*parts):
            total = None
            for i in range(micro_batches):
                with ml.micro_batch(i, i * SHARE):
                    total = ml.nn.cross_entropy(model(parts[2 * i]), parts[2 * i + 1]) * (1 / micro_batches)
                    total.backward()
            opt.step()
            return total

        return model, opt, ml.record(step, *[part for r in range(micro_batches) for part in (x[0, r], y[0, r])])


def rate(step):
    return 0.05 / (step + 1)


@cache
def alone(ranks):
    """The model that one process leaves which takes the ranks' shares as micro-batches."""
    model, opt, graph = recorded(device := cuda_runtime.device(), ranks, ranks)
    x, y = batches(ranks)
    run = SequentialExecutor(graph, device)
    for t in range(STEPS):
        opt.lr = rate(t)
        run(*[part for r in range(ranks) for part in (x[t, r], y[t, r])])
    return SimpleNamespace(parameters=[p.numpy() for p in model.parameters()], bits=bits(*model.parameters()))


def prepared(name, devices, ranks=None):
    """Of each rank model, optimizer and plan."""
    found = []
    for device in devices:
        model, opt, graph = recorded(device, ranks or len(devices))
        plan = replicas(graph, name, None, lambda sizes: 1 + sum(sizes.values()) / 100, len(devices), buckets=2,
                        part_bytes=300, k=2)
        found.append((model, opt, (plan.graph, plan.schedule)))
    return found


def on_ranks(devices, plans, act, transport=staged, micro_batches=None, trace=False):
    """What each rank makes of `act(own)`, where `own.step(t)` runs one step: on the rank's share of the batch, or on
    all shares as micro-batches."""
    x, y = batches(micro_batches or len(devices))

    def work(communicator):
        rank = communicator.rank
        model, opt, plan = plans[rank]
        run = DistributedExecutor(*plan, transport(communicator, devices[rank]), device=devices[rank], trace=trace)

        def step(t):
            opt.lr = rate(t)  # while the step before may still run
            run(*[part for i in (range(micro_batches) if micro_batches else [rank]) for part in (x[t, i], y[t, i])])

        try:
            return act(SimpleNamespace(rank=rank, model=model, run=run, step=step))
        finally:
            run.close()

    with deadline():
        return run_ranks(len(devices), work)


def all_steps(own):
    """A rank's parameters, as arrays and as bits, and its executor."""
    for t in range(STEPS):
        own.step(t)
    own.run.close()
    return SimpleNamespace(parameters=[p.numpy() for p in own.model.parameters()],
                           bits=bits(*own.model.parameters()), run=own.run)


def trained(name, devices, transport=staged, trace=False):
    return on_ranks(devices, prepared(name, devices), all_steps, transport, trace=trace)


def streams_only(devices):
    for device in devices:
        device.captures = False
    return devices


DATA = names("data", exact=True)
#: name, ranks, seed of the streams' order, transport, whether steps are captured
CASES = [("reverse_first_k", 2, 1, staged, True), ("no_overlap", 2, 5, ring, True),
         *(pytest.param(*row, marks=pytest.mark.wide) for row in (
             *((name, 2, 1, staged, True) for name in DATA),
             *((name, 2, 1, staged, False) for name in ("priority", "dear")),
             *((name, 2, 5, transport, True) for transport in (aware, ring) for name in ("buckets", "dear")))),
         *(pytest.param(name, 4 if seed % 3 == 0 else 2, seed, staged, seed % 2 == 1, marks=pytest.mark.slow)
           for name in DATA for seed in range(2, 8))]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "ranks", "seed", "transport", "captured"), CASES)
def test_every_schedule_gives_the_bits_of_a_sequential_run(gpus, stub, name, ranks, seed, transport, captured):
    devices = gpus(ranks, seed) if captured else streams_only(gpus(ranks, seed))
    assert {found.bits for found in trained(name, devices, transport)} == {alone(ranks).bits}


STAGED = ["gpipe", "one_f_one_b", "zb_h1", "interleaved"]
#: name, ranks, micro-batches, seed of the streams' order, transport, whether steps are captured
OF_STAGES = [("one_f_one_b", 2, 4, 4, aware, True), ("zb_h1", 3, 6, 5, ring, True),
             *(pytest.param(*row, marks=pytest.mark.wide) for row in (
                 *((name, 2, 4, 3, staged, captured) for name in STAGED for captured in (True, False)),
                 *(("one_f_one_b", 2, 4, seed, t, seed % 2 == 0) for seed in range(4, 8) for t in (staged, aware)),
                 *((name, 2, 6, 5, ring, True) for name in STAGED))),
             *(pytest.param(name, 2 if seed % 3 else 3, 6, seed, (staged, staged, aware, ring)[seed % 4], seed % 2 == 1,
                            marks=pytest.mark.slow)
               for name in [*STAGED, "zb_auto", "fast_forward", "hanayo"] for seed in range(10, 16))]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "ranks", "micro_batches", "seed", "transport", "captured"), OF_STAGES)
def test_pipelines_give_the_bits_of_one_process(gpus, stub, name, ranks, micro_batches, seed, transport, captured):
    """Each parameter as the rank that updates it has it. NCCL moves messages on a stream for each direction."""
    devices = gpus(ranks, seed) if captured else streams_only(gpus(ranks, seed))
    plans = [(model, opt, ml.plan(graph, name, ml.CostModel.analytic(), ml.Machine(ranks)).with_messages)
             for model, opt, graph in (recorded(device, micro_batches, micro_batches) for device in devices)]

    def act(own):
        left = all_steps(own).parameters
        last = [call.args for call in own.run._communication.closing]
        assert len({*last}) == len(last), "a step ends with each wait once"
        held = {id(spec.live) for spec in own.run.program.graph.storages if spec.live is not None}
        return {i: left[i].tobytes() for i, p in enumerate(own.model.parameters()) if id(p.storage) in held}

    found = on_ranks(devices, plans, act, transport, micro_batches)
    assert {i: bits for one in found for i, bits in one.items()} == {
        i: p.tobytes() for i, p in enumerate(alone(micro_batches).parameters)}


def test_groups_of_nccl_sum_among_themselves(gpus, stub):
    devices = gpus(4, 3)

    def work(communicator):
        device = devices[communicator.rank]
        group = NCCL(communicator, device).group((communicator.rank % 2, communicator.rank % 2 + 2))
        memory = device.allocate(32)
        array = device.array(memory, View(0, (8,), (1,), 0, "float32"))
        device.write(array, np.full(8, communicator.rank, np.float32))
        flight = Flight(communicator)
        flight.submit(Entry(0, group.bind(Kind.A, handover(device).place(group, [array], ()), 0), 0, 32))
        flight.drain()
        device.synchronize()
        return device.read(array).tolist()

    with deadline():
        assert run_ranks(4, work) == [[1.0] * 8, [2.0] * 8] * 2


def test_sums_by_nccl_itself_equal_to_rounding(gpus, stub):
    first, second = trained("buckets", gpus(2, 3), free_ring)
    assert first.bits == second.bits
    for mine, wanted in zip(first.parameters, alone(2).parameters, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("lost", ["the gradient's end", "the sum's return", "the end of what MPI takes"])
def test_a_missing_wait_shows(gpus, monkeypatch, lost):
    """Some order of the runtime must give other numbers."""
    wanted = alone(2).bits
    transport = aware if lost == "the end of what MPI takes" else staged
    monkeypatch.setattr(ByEvents, "ready",
                        (lambda self, task, stream: []) if lost == "the gradient's end" else ByEvents.ready)
    if lost == "the sum's return":
        monkeypatch.setattr(Staged, "arrived", lambda self, stream: [])
    monkeypatch.setattr(OnDevice, "_run", lambda self, calls, over: _unwatched(calls))
    assert any({found.bits for found in trained("priority", gpus(2, seed), transport)} != {wanted}
               for seed in range(12)), "no order showed it"


def _unwatched(calls):
    for call in calls:
        call()
    yield from ()


# ----------------------------------------------------------------------------------------------------- captured, traced
def launches_of_a_step(name, devices):
    def act(own):
        for _ in range(3):
            own.step(0)
        issued, program = devices[own.rank].driver.issued, own.run._body[0].lanes._program
        own.step(1)
        return devices[own.rank].driver.issued - issued, len(program)

    return on_ranks(devices, prepared(name, devices), act)[0]


def test_a_captured_step_is_cut_at_communication_alone(gpus):
    issued, calls = launches_of_a_step("barrier", streams_only(gpus(2, 1)))
    captured, few = launches_of_a_step("barrier", gpus(2, 1))
    assert captured < issued
    assert few < calls
    # nothing is handed over before the end: two runs, of the updates and of forward and backward, and the
    # input's two copies
    whole, _ = launches_of_a_step("no_overlap", gpus(2, 1))
    separate, _ = launches_of_a_step("no_overlap", streams_only(gpus(2, 1)))
    assert whole <= separate - 20


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("captured", [True, False])
def test_a_trace_has_every_task_of_a_step_once(gpus, captured):
    devices = gpus(2, 4)
    for rank, found in enumerate(trained("reverse_first_k",
                                         devices if captured else streams_only(devices), trace=True)):
        timeline, run = found.run.timeline, found.run
        assert sorted(timeline.key[timeline.tasks].tolist()) == sorted(run.schedule.keys.tolist())
        assert {lane.rank for lane in timeline.lanes} == {rank}
        assert (timeline.end >= timeline.start).all()
        assert (timeline.start >= timeline.issued).all()


# ------------------------------------------------------------------------------------------------------------- failures
def test_a_rank_that_raises_ends_the_others(gpus):
    seen = {}

    def act(own):
        try:
            for t in range(STEPS):
                if own.rank == 1 and t == 3:
                    raise ArithmeticError("a bad day")
                own.step(t)
            own.run.settle()
        except Exception as error:
            seen[own.rank] = error
            raise

    with pytest.raises(ArithmeticError):
        on_ranks(devices := gpus(3, 2), prepared("priority", devices), act)
    for rank in (0, 2):
        assert isinstance(seen[rank], RankError)
        assert "rank 1 failed: ArithmeticError: a bad day" in str(seen[rank])


def told(devices, error, ask=NCCL):
    """What all ranks say when they ask for a transport."""
    def work(communicator):
        with pytest.raises(error) as found:
            ask(communicator, devices[communicator.rank])
        return str(found.value)

    with deadline():
        (said,) = set(run_ranks(len(devices), work))
    return said


def test_nccl_refuses_ranks_that_share_a_gpu(gpus, stub, monkeypatch):
    monkeypatch.setattr(nccl.socket, "gethostname", lambda: "node1")
    monkeypatch.setattr(Runtime, "address", lambda self: "0000:17:00.0")
    assert told(gpus(3, 0), NCCLError) == ("ranks 0 and 1 share GPU 0000:17:00.0 of node1, which NCCL refuses; start "
                                           "one rank a GPU, or use --transport staged")


def test_a_transport_that_cannot_be_had_or_started_is_one_line_everywhere(gpus, stub):
    def refuse() -> bytes:
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: no network")

    stub.get_unique_id = refuse
    assert told(gpus(2, 0), NCCLError) == "rank 0 cannot start NCCL: NCCL_ERROR_SYSTEM_ERROR: no network"
    stub.available = False
    assert told(gpus(2, 0), Disagreement, lambda *of: same.transport("nccl", *of)) == (
        "rank 0 has no NCCL; install nvidia-nccl-cu13 (or -cu12) there, or use --transport staged")


@pytest.mark.may_skip
def test_nccls_methods_take_what_they_are_told_to_take():
    """Where NCCL is, CuPy's own words."""
    real = pytest.importorskip("cupy_backends.cuda.libs.nccl", reason="NCCL is not installed", exc_type=ImportError)
    found = {name: getattr(real.NcclCommunicator, name).__doc__.splitlines()[0]
             for name in ("send", "recv", "allReduce")}
    assert found | {"NcclCommunicator": real.NcclCommunicator.__doc__.splitlines()[0]} == TOLD
    assert [real.NCCL_UINT8, real.NCCL_INT32, real.NCCL_FLOAT16, real.NCCL_FLOAT32, real.NCCL_FLOAT64, real.NCCL_SUM,
            real.NCCL_BFLOAT16] == [1, 2, 6, 7, 8, 0, 9]


def test_ranks_take_the_gpus_of_their_machine_in_turn(monkeypatch):
    monkeypatch.setattr(cuda_device, "gpus", lambda: 2)
    ranks = [SimpleNamespace(local_rank=r) for r in range(5)]
    assert [same.device_of("cuda", r) for r in ranks] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]
    assert {same.device_of("cuda:1", r) for r in ranks} == {"cuda:1"}
    assert {same.device_of("cpu", r) for r in ranks} == {"cpu"}
    assert isinstance(Communicator.local_rank, int)


def test_a_link_is_measured_from_device_to_device(gpus):
    devices = gpus(2, 9)
    links = run_ranks(2, lambda c: link_costs.measure_link(c, devices[c.rank], sizes=(4, 256, 4096), repeats=2))
    assert links[0] == links[1]
    assert min(links[0]) >= 0
