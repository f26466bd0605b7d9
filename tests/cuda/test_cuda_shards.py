"""Shards over CUDA ranks, without a GPU: on every transport, states, gradients and parameters in shares leave the bits
of ranks that update everything, whatever order streams run in; a missing wait shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from covering import pairs
from cuda_ranks import aware, ring, staged
from helpers import deadline, drawn
from test_shard import run_to_the_end

import minidl as ml
from minidl import models, optim
from minidl.autograd.tape import Tape, use
from minidl.core.graph import View
from minidl.core.tasks import Kind
from minidl.devices.far import OnHost
from minidl.runtime.comm.flight import Entry, Flight
from minidl.runtime.comm.handover import ByEvents, handover
from minidl.runtime.comm.loopback import LoopBack, run_ranks
from minidl.runtime.comm.places import ShareOnDevice, StagedShare
from minidl.runtime.executors import runtime
from minidl.training import checkpoint
from minidl.training.job import Job
from minidl.training.rank_trainer import RankTrainer
from minidl.training.recorded import Recorded

TRANSPORTS = {"staged": staged, "aware": aware, "nccl": ring}
SMALL = {"model": "mlp", "model_args": {"layers": 3, "hidden": 13}, "batch_size": 24}
GPT = {"model": "gpt", "model_args": {"preset": "tiny", "dropout": 0.1}, "batch_size": 12}
CONV = {"model": "resnet20", "model_args": {"width": 2}, "batch_size": 4, "optimizer": "sgd"}


def trained(devices: Any, job: dict[str, Any], transport: Any = staged, steps: int = 3, load: Path | None = None,
            save: Path | None = None, captured: bool = True) -> tuple[set[str], dict[str, bytes]]:
    """The hashes of all ranks' parameters, and rank 0's whole states. Planned and allocated bytes must be equal."""
    every = [Recorded(Job(**{"optimizer": "adamw", "scheduler": "barrier", **job}, device=f"cuda:{rank}",
                          parallel="data"), rank, len(devices)) for rank in range(len(devices))]
    for device in devices:
        device.captures = captured

    def work(communicator: Any) -> tuple[str, dict[str, bytes]]:
        recorded = every[communicator.rank]
        if load is not None:
            with use(recorded.tape):
                checkpoint.load(load, recorded.model, recorded.optimizer, loader=recorded.train_data)
        device = devices[communicator.rank]
        trainer = RankTrainer(recorded, ml.CostModel.analytic(), transport(communicator, device), (1.0, 0.001))
        # threads would wait for each other in the one lock that Python 3.11 has for a cached property
        trainer.run = runtime(trainer.program, device=device, transport=trainer.communicator)
        run_to_the_end(trainer, steps, save)
        bound = trainer.run._body[0].bound
        held = sum(len(m) for m in (bound.arena, *bound.persistent) if not isinstance(m, OnHost))
        assert held == trainer.program.peak_bytes
        with use(recorded.tape):
            states = {name: t.numpy().tobytes() for name, t in recorded.optimizer.named_tensors()}
        return trainer.params_sha256(), states if communicator.rank == 0 else {}

    with deadline():
        found = run_ranks(len(devices), work)
    return {sha for sha, _ in found}, found[0][1]


PLAIN: dict[str, Any] = {}


def once(make: Any, gpus: Any, count: int, *what: Any, **more: Any) -> Any:
    """What `make` finds on so many ranks without shards, in one order of the streams: made once for all tests."""
    key = f"{make.__name__} {count} {what} {more}"
    if key not in PLAIN:
        PLAIN[key] = make(gpus(count, 0), *what, **more)
    return PLAIN[key]


SHARDS = "1", "2,prefetch=0", "3,prefetch=0,keep=none", "3,prefetch=1,keep=1"


@pytest.mark.few(1)
@pytest.mark.parametrize(*pairs(2, shard=SHARDS, transport=[*TRANSPORTS], of=[
    (2, {}), (3, {"scheduler": "no_overlap", "recompute": "all"}), (3, {"clip": 0.5, "optimizer": "adam"}),
    (2, {"scheduler": "buckets", "micro_batches": 2, "clip": 0.5})]))
def test_bits_and_states_are_those_of_ranks_that_update_everything(gpus, stub, shard, transport, of):
    ranks, job = of[0], {**SMALL, **of[1]}
    plain = once(trained, gpus, ranks, job)
    assert trained(gpus(ranks, 2), {**job, "shard": shard}, TRANSPORTS[transport], captured=shard != "1") == plain


@pytest.mark.few(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("job", [{**SMALL, "dtype": "fp16", "shard": "2,prefetch=0"},
                                 {**SMALL, "offload": "all", "shard": "3,prefetch=0,keep=none"}], ids=str)
def test_with_a_loss_scale_and_with_offload(gpus, stub, job, transport):
    """Flags of gradients that are not finite travel as whole numbers; shares of states live on the host."""
    plain = once(trained, gpus, 2, {**job, "offload": "none", "shard": 0})
    assert trained(gpus(2, 4), job, TRANSPORTS[transport]) == plain


@pytest.mark.slow
@pytest.mark.parametrize("job", [GPT, CONV], ids=str)
def test_dropout_and_batch_norm(gpus, stub, job):
    plain = trained(gpus(2, 5), job, steps=2)
    for seed, (shard, transport) in enumerate(zip(SHARDS, (aware, ring, staged, ring), strict=True)):
        assert trained(gpus(2, seed), {**job, "shard": shard}, transport, steps=2) == plain


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(drawn(12)))
def test_more_orders_and_more_ranks(gpus, stub, seed):
    ranks, transport = 2 + seed % 3, [*TRANSPORTS.values()][seed % 3]
    job = {**SMALL, "clip": (None, 0.5)[seed % 2], "scheduler": ("barrier", "buckets", "no_overlap")[seed // 3 % 3]}
    shard = SHARDS[seed // 2 % 4]
    plain = once(trained, gpus, ranks, job)
    assert trained(gpus(ranks, seed), {**job, "shard": shard}, transport, captured=bool(seed // 5 % 2)) == plain


def recorded(device: Any) -> tuple[Any, Any]:
    """A network, and its step on two micro-batches. There are no labels, which a lost wait would make indices of
    anything."""
    with use(Tape(device)):
        ml.seed(1)
        model = models.mlp(12, 16, 8, 16, 5)
        opt = optim.Adam(model.parameters(), 0.01)
        opt.max_norm = 0.05

        def step(*parts: Any) -> Any:
            for i, x in enumerate(parts):
                with ml.micro_batch(i, 4 * i):
                    y = model(x)
                    loss = (y * y).mean() * 0.5
                    loss.backward()
            opt.step()
            return loss

        return model, ml.record(step, *[np.zeros((4, 12), np.float32)] * 2)


def on_ranks(devices: Any, name: str, transport: Any = staged, shard: Any = 0, stages: int = 1, steps: int = 3
             ) -> list[dict[int, bytes]]:
    """The parameters that each rank holds whole at the end, of data-parallel ranks or replicas of stages."""
    replicas, own = len(devices) // stages, [recorded(device) for device in devices]
    machine = (ml.Machine(replicas, collective=costs) if stages == 1 else
               ml.Machine(stages, replicas=replicas, collective=costs))
    plans = [ml.plan(graph, name, ml.CostModel.analytic(), machine, shard=shard) for _, graph in own]
    x = np.random.default_rng(3).normal(size=(steps, replicas, 2, 4, 12)).astype("f")

    def work(communicator: Any) -> dict[int, bytes]:
        rank = communicator.rank
        run = runtime(plans[rank].program(rank), device=devices[rank], transport=transport(communicator, devices[rank]))
        for t in range(steps):
            run(*x[t, rank // stages])
        run.settle()
        bound = run._body[0].bound
        assert sum(map(len, (bound.arena, *bound.persistent))) == run.peak_bytes
        run.whole(everywhere=True)
        run.close()
        held = {id(live) for s in run.program.graph.storages for live in (s.live, s.share_of) if live is not None}
        return {i: p.numpy().tobytes() for i, p in enumerate(own[rank][0].parameters()) if id(p.storage) in held}

    with deadline():
        return run_ranks(len(devices), work)


def costs(sizes: dict[int, int]) -> float:
    return 5 + 1e-3 * sum(sizes.values())


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("shard", ["1", "3,prefetch=0,keep=none", "3"])
@pytest.mark.parametrize("name", ["one_f_one_b", "interleaved"])
def test_replicas_of_stages_share_out(gpus, stub, name, shard, transport):
    assert on_ranks(gpus(4, 1), name, TRANSPORTS[transport], shard, stages=2) == once(
        on_ranks, gpus, 4, name, stages=2)


class Overtaking(LoopBack):
    """Every other message and sum ends some polls after it could."""

    moves = 0

    def _late(self, move: Any) -> Any:
        self.moves += 1
        late = 12 * (self.moves % 2)
        yield from move
        for _ in range(late):
            yield

    def _receive(self, *what: Any) -> Any:
        receive = super()._receive(*what)
        return lambda: self._late(receive())

    def _exchange(self, *what: Any) -> Any:
        return self._late(super()._exchange(*what))


@pytest.mark.parametrize(("name", "shard", "stages"), [
    ("interleaved", 0, 2), pytest.param("interleaved", "3", 2, marks=pytest.mark.wide),
    pytest.param("one_f_one_b", "1", 2, marks=pytest.mark.wide),
    pytest.param("buckets", 0, 1, marks=pytest.mark.wide), pytest.param("buckets", "2", 1, marks=pytest.mark.wide)])
def test_who_awaits_a_transfer_awaits_those_before_it_on_its_lane(gpus, name, shard, stages):
    """A task awaits the last of its messages from a rank. One before it may end later, and its copy to the device be
    issued later."""
    def overtaking(communicator: Any, device: Any) -> Any:
        return Overtaking(communicator.rank, communicator._members, communicator._board)

    wanted = once(on_ranks, gpus, 4, name, stages=stages)
    for seed in (2, 3):
        assert on_ranks(gpus(4, seed), name, overtaking, shard, stages) == wanted


@pytest.mark.few(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_a_step_begins_with_waits_for_the_one_before(gpus, stub, monkeypatch, transport):
    """Gathers read shares that the last update of the step before writes; some order shows it where they do not."""
    wanted = once(on_ranks, gpus, 4, "one_f_one_b", stages=2)
    monkeypatch.setattr(ByEvents, "_awaited", lambda self, after: [self._ready[task] for task in after])
    assert any(on_ranks(gpus(4, seed), "one_f_one_b", TRANSPORTS[transport], "3,prefetch=0,keep=none", 2) != wanted
               for seed in range(12)), "no order showed it"


@pytest.mark.few(1)
@pytest.mark.parametrize(("saved", "loaded"), [(1, 0), (3, 1), (0, 3)])
def test_a_checkpoint_is_whole_and_loads_at_any_level(gpus, tmp_path, saved, loaded):
    wanted = once(trained, gpus, 2, SMALL, steps=4)
    trained(gpus(2, 1), {**SMALL, "shard": saved}, steps=2, save=tmp_path / "file")
    assert trained(gpus(2, 2), {**SMALL, "shard": loaded}, steps=2, load=tmp_path / "file") == wanted


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_shares_of_arrays_of_any_size_meet_again(gpus, stub, transport):
    """Of arrays of odd sizes, also of fewer elements than ranks; and shares of what is equal on all ranks."""
    devices, random, sizes = gpus(3, 6), np.random.default_rng(0), (1, 2, 7, 12)
    values = [[random.normal(size=n).astype("f") for n in sizes] for _ in range(3)]

    def work(communicator: Any) -> list[Any]:
        device = devices[communicator.rank]
        link, hand = TRANSPORTS[transport](communicator, device), handover(device)
        flight, held = Flight(link), []

        def array(n: int, value: Any) -> Any:
            held.append(device.allocate(4 * n))
            made = device.array(held[-1], View(0, (n,), (1,), 0, "float32"))
            device.write(made, value)
            return made

        own = [array(a.size, a) for a in values[communicator.rank]]
        shares, received = [array(-(-a.size // 3), np.nan) for a in own], array(36, np.nan)
        equal = [array(-(-a.size // 3), np.nan) for a in own]
        for kind in (Kind.AS, Kind.AG):
            for i, (a, share) in enumerate(zip(own, shares, strict=True)):
                room = (received[: 3 * share.size],) if kind == Kind.AS else ()
                place = hand.share(link, a, share, [-1], *room)
                flight.submit(Entry(i, link.bind(kind, place, 0), 0, 4, done=hand.moved(-1, link, False)))
                flight.drain()
        for a, share in zip(own, equal, strict=True):
            for call in hand.copied(link, a, share, [-1]):
                call()
        device.synchronize()
        return [device.read(a) for a in (*own, *shares, *equal)]

    with deadline():
        found = run_ranks(3, work)
    for i, n in enumerate(sizes):
        wanted = (values[0][i] + values[1][i] + values[2][i]) * np.float32(1 / 3)
        padded = np.zeros(3 * -(-n // 3), np.float32)
        padded[:n] = wanted
        for rank, arrays in enumerate(found):
            np.testing.assert_array_equal(arrays[i], wanted)
            for share in (arrays[len(sizes) + i], arrays[2 * len(sizes) + i]):
                np.testing.assert_array_equal(share, np.split(padded, 3)[rank])


LOST = {"the tasks' end": (ByEvents, "ready", TRANSPORTS), "the step's end": (ByEvents, "ended", ("staged", "nccl")),
        "a transfer's end": (StagedShare, "arrived", ("staged",)),
        "a transfer's end by NCCL": (ShareOnDevice, "arrived", ("nccl",)),
        "a transfer before another": (ByEvents, "moved", ("staged",))}  #: the others wait for the device themselves


@pytest.mark.few(1)
@pytest.mark.parametrize(("lost", "transport"), [(lost, t) for lost, (*_, every) in LOST.items() for t in every])
def test_a_missing_wait_shows(gpus, stub, monkeypatch, transport, lost):
    """Some order of the runtime must give other numbers."""
    wanted = once(on_ranks, gpus, 2, "buckets", steps=8)
    where, name, _ = LOST[lost]
    monkeypatch.setattr(where, name, lambda self, *_: [])
    assert any(on_ranks(gpus(2, seed), "buckets", TRANSPORTS[transport], "2,prefetch=0", steps=8) != wanted
               for seed in range(12)), "no order showed it"
