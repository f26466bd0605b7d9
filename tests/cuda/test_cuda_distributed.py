"""Data-parallel ranks on CUDA, without a GPU: every schedule and transport gives the bits of a sequential run, whatever
order streams run in; a missing wait shows; ranks take their GPUs, or say in one line why not."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import cuda_machine
import cuda_runtime
import numpy as np
import pytest
from cuda_signatures import check
from helpers import bits, deadline, replicas

import minidl as ml
from minidl import models, optim
from minidl.autograd.tape import Tape, use
from minidl.core.graph import View
from minidl.core.tasks import Kind
from minidl.devices.cuda import device as cuda_device
from minidl.devices.cuda.device import Cuda
from minidl.measuring import links as link_costs
from minidl.runtime.comm import Communicator, OnDevice, RankError, Staged, nccl
from minidl.runtime.comm.flight import Entry, Flight
from minidl.runtime.comm.handover import ByEvents, handover
from minidl.runtime.comm.loopback import LoopBack, run_ranks
from minidl.runtime.comm.nccl import NCCL, NCCLError
from minidl.runtime.executors import DistributedExecutor, SequentialExecutor
from minidl.schedulers import names
from minidl.training import same
from minidl.training.agreement import Disagreement

SHARE, STEPS = 4, 5  # captured from the third step on


# --------------------------------------------------------------------------------------------------------- without GPUs
class Machine(cuda_machine.Machine):
    """One rank's GPU, which may wait for what another rank's does."""

    def check_stuck(self) -> None:
        assert any(isinstance(q.ops[0][1][0], Elsewhere)
                   for q in self.queues.values() if q.ops and q.ops[0][0] == "wait")


class Runtime(cuda_runtime.Runtime):
    machines: WeakValueDictionary[int, Machine] = WeakValueDictionary()  #: by a stream's pointer, of all GPUs

    def __init__(self, seed: int) -> None:
        super().__init__(seed, Machine)

    def address(self) -> str:
        return f"GPU {id(self)}"

    def stream(self, priority: int = 0) -> Any:
        made = super().stream(priority)
        self.machines[made.ptr] = self.machine
        return made


class Elsewhere:
    """What another rank leaves, as an event to wait for."""

    def __init__(self, left: dict[Any, Any], key: Any) -> None:
        self.left, self.key = left, key

    @property
    def reached(self) -> int:
        return int(self.key in self.left)


class Nccl:
    """NCCL between the ranks of this process: each call goes to its stream, a group as one."""

    available = True
    NCCL_UINT8, NCCL_INT32, NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_SUM = 1, 2, 6, 7, 8, 0

    def __init__(self) -> None:
        self.left: dict[Any, Any] = {}
        self.group = threading.local()
        self.names: list[bytes] = []

    def get_unique_id(self) -> bytes:
        self.names.append(f"communicator {len(self.names)}".encode())
        return self.names[-1]

    def NcclCommunicator(self, size: int, name: bytes, rank: int) -> Any:
        check("NcclCommunicator", TOLD["NcclCommunicator"], (size, name, rank), {})
        assert name in self.names
        return NcclRanks(self, size, name, rank)

    def groupStart(self) -> None:
        self.group.sends, self.group.fetches = [], []

    def groupEnd(self) -> None:
        sends, fetches = self.group.sends, self.group.fetches
        ranks, stream = (sends or fetches)[0][2:]
        ranks.issue(stream, [(array, (ranks.name, ranks.calls, ranks.rank, peer)) for array, peer, *_ in sends],
                    [(array, [(ranks.name, ranks.calls, peer, ranks.rank)]) for array, peer, *_ in fetches])


#: the parameters of NcclCommunicator's methods, which can be looked up only where NCCL is
TOLD = {"NcclCommunicator": "NcclCommunicator(int ndev, bytes commId, int rank, NcclConfig config=None)",
        "send": "NcclCommunicator.send(self, intptr_t sendbuf, size_t count, int datatype, int peer, intptr_t stream)",
        "recv": "NcclCommunicator.recv(self, intptr_t recvbuf, size_t count, int datatype, int peer, intptr_t stream)",
        "allReduce": "NcclCommunicator.allReduce(self, intptr_t sendbuf, intptr_t recvbuf, size_t count, int "
                     "datatype, int op, intptr_t stream)"}


class NcclRanks:
    def __init__(self, nccl: Nccl, size: int, name: bytes, rank: int) -> None:
        self.nccl, self.size, self.name, self.rank, self.calls = nccl, size, name, rank, 0

    def send(self, at: int, count: int, kind: int, peer: int, stream: int) -> None:
        check("send", TOLD["send"], (at, count, kind, peer, stream), {})
        self.nccl.group.sends.append((_memory(at, count, kind), peer, self, stream))

    def recv(self, at: int, count: int, kind: int, peer: int, stream: int) -> None:
        check("recv", TOLD["recv"], (at, count, kind, peer, stream), {})
        self.nccl.group.fetches.append((_memory(at, count, kind), peer, self, stream))

    def allReduce(self, at: int, out: int, count: int, kind: int, op: int, stream: int) -> None:
        check("allReduce", TOLD["allReduce"], (at, out, count, kind, op, stream), {})
        assert at == out
        array = _memory(at, count, kind)
        peers = range(self.size)
        self.issue(stream, [(array, (self.name, self.calls, self.rank, r)) for r in peers],
                   [(array, [(self.name, self.calls, r, self.rank) for r in peers])])

    def issue(self, stream: int, posts: list[Any], fetches: list[Any]) -> None:
        """`posts`: arrays and the keys they are left under; `fetches`: arrays and the keys whose sum they get."""
        left, self.calls = self.nccl.left, self.calls + 1
        machine = Runtime.machines[stream]
        machine.not_in_capture("ranks sum")
        touched = [(array.ctypes.data, array.nbytes) for array, _ in (*posts, *fetches)]
        machine.issue(stream, lambda: left.update({key: array.copy() for array, key in posts}), touched)
        with machine.lock:
            machine.queues[stream].ops += [("wait", (Elsewhere(left, key), 1)) for _, keys in fetches for key in keys]

        def fetch() -> None:
            for array, keys in fetches:
                array[...] = sum(left.pop(key) for key in keys)

        machine.issue(stream, fetch, touched)

    def destroy(self) -> None:
        pass


def _memory(at: int, count: int, kind: int) -> Any:
    dtype = np.dtype({1: "uint8", 2: "int32", 6: "float16", 7: "float32", 8: "float64"}[kind])
    return np.ctypeslib.as_array((ctypes.c_ubyte * (count * dtype.itemsize)).from_address(at)).view(dtype)


def made(seed: int, name: str = "cuda:0") -> Cuda:
    runtime = Runtime(seed)
    return Cuda(runtime, lambda: cuda_runtime.make_products(runtime), lambda: cuda_runtime.make_dnn(runtime), name)


@pytest.fixture
def gpus(monkeypatch):
    """Makes as many GPUs as there are ranks, each with its order."""

    def make(ranks: int, seed: int) -> list[Cuda]:
        found = [made(100 * seed + r, f"cuda:{r}") for r in range(ranks)]
        for r, device in enumerate(found):
            monkeypatch.setitem(cuda_device._devices, r, device)
        return found

    return make


# ------------------------------------------------------------------------------------------------------------- training
def batches(ranks):
    random = np.random.default_rng(3)
    return random.normal(size=(STEPS, ranks, SHARE, 12)).astype("f"), random.integers(0, 5, (STEPS, ranks, SHARE))


def network():
    ml.seed(1)
    model = models.mlp(12, 16, 8, 16, 5)
    return model, optim.SGD(model.parameters(), 0.05, momentum=0.9)


def recorded(device, ranks, micro_batches=1):
    """A network on a device, and its step on the shares of some ranks as micro-batches."""
    x, y = batches(ranks)
    with use(Tape(device)):
        model, opt = network()

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


def alone(device, ranks):
    """The model that one process leaves which takes the ranks' shares as micro-batches."""
    model, opt, graph = recorded(device, ranks, ranks)
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
        found.append((model, opt, replicas(graph, name, None, lambda sizes: 1 + sum(sizes.values()) / 100, len(devices),
                                           buckets=2, part_bytes=300, k=2)))
    return found


def staged(communicator, device):
    return communicator


def on_ranks(name, devices, act, transport=staged, trace=False):
    """What each rank makes of `act(rank, run, step)`, where `step(t)` runs one step."""
    own = prepared(name, devices)
    x, y = batches(len(devices))

    def work(communicator):
        rank = communicator.rank
        _, opt, found = own[rank]
        run = DistributedExecutor(found.graph, found.schedule, transport(communicator, devices[rank]),
                                  device=devices[rank], trace=trace)

        def step(t):
            opt.lr = rate(t)  # while the step before may still run
            run(x[t, rank], y[t, rank])

        try:
            return act(SimpleNamespace(rank=rank, model=own[rank][0], run=run, step=step))
        finally:
            run.close()

    with deadline():
        return run_ranks(len(devices), work)


def trained(name, devices, transport=staged, trace=False):
    """Of each rank its parameters, as arrays and as bits, and its executor."""
    def act(own):
        for t in range(STEPS):
            own.step(t)
        own.run.close()
        return SimpleNamespace(parameters=[p.numpy() for p in own.model.parameters()],
                               bits=bits(*own.model.parameters()), run=own.run)

    return on_ranks(name, devices, act, transport, trace)


def streams_only(devices):
    for device in devices:
        device.captures = False
    return devices


class Aware(LoopBack):
    """A transport that reads and writes the memory of GPUs at once, as an MPI for CUDA does."""

    on_device = True


def aware(communicator, device):
    return Aware(communicator.rank, communicator._members, communicator._board)


def ring(communicator, device):
    return NCCL(communicator, device)


def free_ring(communicator, device):
    return NCCL(communicator, device, deterministic=False)


@pytest.fixture
def stub(monkeypatch):
    """NCCL between loop-back ranks."""
    found = Nccl()
    monkeypatch.setattr(nccl, "library", lambda: found)
    yield found
    assert not found.left, "something was sent and not received"


DATA = names("data", exact=True)
#: name, ranks, seed of the streams' order, transport, whether steps are captured
CASES = [("reverse_first_k", 2, 1, staged, True), ("dear", 2, 5, ring, True),
         *(pytest.param(*row, marks=pytest.mark.wide) for row in (
             *((name, 2, 1, staged, True) for name in DATA),
             *((name, 2, 1, staged, False) for name in ("priority", "dear")),
             *((name, 2, 5, transport, True) for transport in (aware, ring) for name in ("buckets", "dear")),
             ("no_overlap", 2, 5, ring, True))),
         *(pytest.param(name, 4 if seed % 3 == 0 else 2, seed, staged, seed % 2 == 1, marks=pytest.mark.slow)
           for name in DATA for seed in range(2, 12))]


@pytest.mark.parametrize(("name", "ranks", "seed", "transport", "captured"), CASES)
def test_every_schedule_gives_the_bits_of_a_sequential_run(gpus, stub, name, ranks, seed, transport, captured):
    devices = gpus(ranks, seed)
    wanted = alone(devices[0], ranks).bits
    devices = devices if captured else streams_only(devices)
    assert {found.bits for found in trained(name, devices, transport)} == {wanted}


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
    for mine, wanted in zip(first.parameters, alone(gpus(1, 0)[0], 2).parameters, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("lost", ["the gradient's end", "the sum's return", "the end of what MPI takes"])
def test_a_missing_wait_shows(gpus, monkeypatch, lost):
    """Some order of the runtime must give other numbers."""
    wanted = alone(gpus(1, 0)[0], 2).bits
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

    return on_ranks(name, devices, act)[0]


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
        on_ranks("priority", gpus(3, 2), act)
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
