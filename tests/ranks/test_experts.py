"""Experts over ranks: each data-parallel rank has a share of them, rows travel to the ranks of theirs and back. What
training leaves has the bits of one process that has all experts and takes the ranks' batches in turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_runs import WIDTH, alone, check, prepared, trained

import minidl as ml
from minidl import nn, ops
from minidl.core.machine import PlanError
from minidl.core.placement import Refused
from minidl.core.tasks import SUMS, Kind
from minidl.devices import DeviceError
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.communication import Communication
from minidl.training.job import Job
from minidl.training.keeper import Keeper

OVER: dict[str, Any] = {"network": "experts", "experts_over": "data", "scheduler": "barrier", "ranks": 1, "replicas": 2,
                        "micro_batches": 1}
DATA = ["barrier", "buckets", "fifo", "priority", "dear", "reverse_first_k", "no_overlap"]
#: what is shown -> settings
CASES: dict[str, dict[str, Any]] = {
    "two ranks": {}, "three ranks": {"replicas": 3}, "one expert a rank": {"replicas": 6},
    "four ranks of eight": {"replicas": 4, "told": {"experts": 8, "top_k": 3}},
    "one token": {"rows": 1, "replicas": 3, "told": {"top_k": 1}},
    "ties and empty experts": {"told": {"ties": True}},
    "drops": {"replicas": 3, "told": {"capacity": 1, "balance": 0.01, "shared": 1}},
    "drops and ties": {"told": {"capacity": 2, "ties": True, "score": "sigmoid", "bias": False}},
    "micro-batches": {"micro_batches": 3, "clip": 0.05},
    "one token of each micro-batch": {"micro_batches": 2, "replicas": 6, "rows": 1, "told": {"capacity": 1}},
    "clipping": {"replicas": 3, "clip": 0.05, "optimizer": "adamw"},
    "clipping of some steps": {"clip": 0.5, "optimizer": "adam", "scheduler": "priority"},
    "skipped steps": {"scaled": True, "bad": (1,), "clip": 0.05},
    "shards of the rest": {"shard": "3,prefetch=0,keep=none", "scaled": True, "clip": 0.05, "micro_batches": 2},
    "recompute": {"recompute": "all", "saved": True}, "offload": {"offload": "all", "optimizer": "adam"},
    "parts": {"split": 2, "recompute": "all"}, "a bound on W": {"options": {"lag": 1}},
    "batch norm, dropout, a tied weight": {"norm": True, "drop": True, "tied": True},
    "parts of sums": {"scheduler": "priority", "options": {"part_bytes": 60}, "saved": True},
    "a hint": {"options": {"order": "hint"}, "scheduler": "fifo"}}


def over(**more: Any) -> dict[str, Any]:
    return {**OVER, **more}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CASES)
def test_ranks_leave_the_bits_of_one_process(name: str) -> None:
    check(over(**CASES[name]))


@pytest.mark.few(1)
@pytest.mark.parametrize("scheduler", DATA)
@pytest.mark.parametrize("more", [{}, {"clip": 0.05, "replicas": 3}, {"micro_batches": 2}])
def test_every_policy_leaves_them(scheduler: str, more: dict[str, Any]) -> None:
    check(over(scheduler=scheduler, **more))


def drawn_settings(random: np.random.Generator) -> dict[str, Any]:
    """Any setting that ranks can have."""
    def one(*values: Any) -> Any:
        return values[int(random.integers(len(values)))]

    ranks = one(2, 2, 3, 4)
    experts = ranks * int(random.integers(1, 4))
    told = {"experts": experts, "top_k": int(random.integers(1, min(experts, 3) + 1)), "ties": one(False, False, True),
            "capacity": one(None, None, 1, 2, 5), "shared": one(0, 0, 1), "score": one("softmax", "sigmoid"),
            "balance": one(0.0, 0.01), "bias": one(True, False), "layers": one(2, 4)}
    found = over(replicas=ranks, rows=one(1, 2, 4, 7), micro_batches=one(1, 1, 2, 3), told=told,
                 scheduler=one(*DATA), optimizer=one("sgd", "adam", "adamw"), clip=one(None, 0.05, 0.5),
                 scaled=one(False, False, True), recompute=one("none", "none", "all"), saved=one(False, False, True))
    if found["scheduler"] in ("barrier", "buckets"):
        found["shard"] = one(0, 0, 1, "2,prefetch=0", "3,prefetch=0,keep=none")
    return found


@pytest.mark.parametrize("count", [2, pytest.param(300, marks=pytest.mark.campaign)])
def test_random_settings_leave_them(count: int) -> None:
    for i in range(count):
        chosen = drawn_settings(np.random.default_rng([count, i]))
        print(i, chosen)
        check(chosen)


def test_what_is_asked_for_changes_bits() -> None:
    """So that the tests above would tell a capacity, ties or a balance loss that is not there."""
    told = [{}, {"capacity": 1}, {"ties": True}, {"balance": 0.1}, {"top_k": 1}]
    assert len({repr(alone(over(told=each)).tensors) for each in told}) == len(told)


def test_the_tasks_of_a_rank() -> None:
    plan = prepared(over(), 0)[0][1]
    graph, made = plan.graph, {}
    for t in graph:
        for launch in t.launches:
            if launch.kernel in ("route", "dispatch", "combine") and t.kind == Kind.F:
                made.setdefault(launch.kernel, []).append(t.unit)
    assert sorted(t.name for t in graph if t.kind == Kind.X) == sorted(
        [*(f"{u}X0" for u in made["route"]), *(f"{u}X0{part}" for u in (*made["dispatch"], *made["combine"])
                                              for part in ("", "/1"))])
    shares = [spec for spec in graph.storages if spec.share_of is not None]
    assert {spec.name for spec in shares if spec.role == ml.Role.PARAMETER} == {
        f"experts/{i}/fc{j}.{what}" for i in (0, 1) for j in (1, 2) for what in ("weight", "bias")}
    assert all(2 * spec.bytes == spec.share_of.data.nbytes for spec in shares)
    summed = {int(graph.buffer_storage[b.index]) for t in graph if t.kind in SUMS for b in t.reads}
    update = {t.unit: {v.storage for launch in t.launches for v in launch.views} for t in graph if t.kind == Kind.U}
    assert not any(summed & update[graph[u].unit] for u in range(len(graph)) if graph[u].kind == Kind.U
                   and any(spec in shares for spec in map(graph.storages.__getitem__, update[graph[u].unit])))


@pytest.mark.parametrize(("more", "says"), [
    ({"told": {"experts": 5}}, "2 ranks cannot have equal shares of 5 experts; take a number of ranks that divides it"),
    ({"told": {"bias_rate": 0.01}}, "the bias of a router moves by the loads of all ranks, one after the other"),
    ({"optimizer": "muon"}, "muon in 9U0 needs all experts"),
    ({"scheduler": "layup"}, "ranks do not sum gradients under layup"),
    ({"scheduler": "delayed_update"}, "delayed_update keeps a copy of the weights"),
    ({"scheduler": "gpipe", "ranks": 2, "replicas": 1, "micro_batches": 4}, "each of several data-parallel ranks"),
    ({"replicas": 1}, "each of several data-parallel ranks has a share; give --parallel data and at least 2 ranks"),
    ({"network": "mlp"}, "the network has no experts")])
def test_what_ranks_cannot_share_out_is_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused) as error:
        prepared(over(**more), 0)
    assert str(error.value).startswith(f"experts over ranks: {says}")
    assert "leave --experts-over out" in str(error.value) or "divides it" in str(error.value)


class Mixing(nn.Module):
    """Experts whose rows meet others, or drop some of their numbers."""

    def __init__(self, how: str) -> None:
        self.how, self.one, self.router = how, nn.GroupedLinear(4, WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.drop, self.first = nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        x = self.first(x) if self.how in ("", "relu") else x
        to = ops.route(ops.softmax(self.router(x)), 1)
        rows = ops.dispatch(x, to.place)
        if self.how == "softmax":
            rows = ops.softmax(rows, 0)
        if self.how == "dropout":
            rows = self.drop(rows)
        if self.how == "relu":
            rows = ops.relu(rows)
        if self.how == "others":
            rows = rows + x
        return ops.combine(self.one(rows, to.counts), to.gate, to.place)


@pytest.mark.parametrize("how", ["softmax", "dropout", "others"])
def test_work_on_several_rows_at_once_is_refused(how: str) -> None:
    says = "in another form than by rows" if how == "softmax" else "does not work on each row of experts by itself"
    with pytest.raises(Refused, match=says):
        prepared({**OVER, "network": lambda *flags: Mixing(how)}, 0)


def test_rows_after_the_last_one_become_zeros_only_for_kernels_that_read_them() -> None:
    def cleared(how: str) -> list[str]:
        graph = prepared({**OVER, "network": lambda *flags: Mixing(how)}, 0)[0][1].graph
        return [t.name for t in graph for launch in t.launches if "rest" not in dict(launch.constants) and (
            launch.kernel in ("grouped_linear", "grouped_linear_input_grad") or (
                launch.kernel == "exchange" and launch.writes[0].shape[0] > launch.reads[0].shape[0] > 1))]

    assert cleared("") == []
    relu = cleared("relu")
    assert len(relu) == 2, "the rows that relu reads, and the gradients that its gradient reads"


def test_a_place_for_experts_that_there_is_not_is_refused() -> None:
    with pytest.raises(PlanError, match="experts_over is 'model'; it must be none or data"):
        prepared(over(experts_over="model"), 0)


def test_a_device_whose_counts_are_not_on_the_host_is_refused() -> None:
    gpu = SimpleNamespace(device=SimpleNamespace(name="cuda:0"))
    with pytest.raises(DeviceError, match="experts over ranks: cuda:0 does not know on the host how many rows"):
        Communication.exchanged(SimpleNamespace(), 0, gpu, None, (), 0)


# ------------------------------------------------------------------------------------------------------------ transport
def exchanged(comm: Any, counts: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """What a rank receives if rank r sends counts[r, s] rows of its number to rank s; and what it should receive."""
    ranks, room = comm.size, int(counts.sum()) + 2
    sent, got, out, into = (np.zeros(ranks, np.int64), np.zeros((ranks, 1), np.int64), np.zeros((room, width), "f"),
                            np.full((room, width), -1, "f"))
    sent[:] = counts[comm.rank]
    comm._awaited(comm.exchange_rows(sent.reshape(1, -1), (), got, 0)())
    assert (got[:, 0] == counts[:, comm.rank]).all()
    begin = 0
    for s, n in enumerate(sent.tolist()):
        out[begin : begin + n] = 10 * comm.rank + s + 1
        begin += n
    move = comm.exchange_rows(out, (sent, got), into, 1)
    for _ in range(2):  # a transfer can be started again
        into[:] = -1
        comm._awaited(move())
    wanted = np.zeros_like(into)
    wanted[: got.sum()] = np.repeat(10 * np.arange(ranks) + comm.rank + 1, got[:, 0])[:, None]
    return into, wanted


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**31))
@settings(max_examples=drawn(100), deadline=None)
def test_rows_reach_their_ranks_in_order_and_zeros_follow(ranks: int, width: int, seed: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 4, (ranks, ranks)) * np.random.default_rng(seed).integers(0, 2)
    for into, wanted in run_ranks(ranks, lambda comm: exchanged(comm, counts, width)):
        assert np.array_equal(into, wanted)


def test_a_run_goes_on_from_its_checkpoint_on_other_ranks(tmp_path: Path) -> None:
    """Two ranks train and save; one process, and four ranks, go on with the same bits as each other."""
    job = Job(model="moe_gpt", model_args={"preset": "tiny", "dropout": 0}, batch_size=8, parallel="data",
              scheduler="barrier", experts_over="data", optimizer="adamw")

    def saved(trainer: Any) -> Any:
        found = Keeper(tmp_path, schedules=False)
        found.gather(trainer)
        found.save(trainer, 3, {"loss": 1.0})
        return trainer.params_sha256()

    whole = trained(job, 2, result=saved)
    assert len({*whole}) == 1
    (folder,) = tmp_path.iterdir()
    on = [trained(replace(job, experts_over=where), 4, load=folder) for where in ("data", "none")]
    assert on[0] == on[1]
