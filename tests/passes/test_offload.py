"""Offloaded activations and states: the same bits, a smaller peak, and copies where the peak allows them."""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_runs
from command_line import refusal, run, run_json
from helpers import classified

import minidl as ml
from minidl import nn, optim, schedulers
from minidl.core.draw import PALETTE, group_of
from minidl.core.graph import Role, TaskGraph
from minidl.core.machine import PlanError
from minidl.core.placement import Refused
from minidl.core.schedule import ScheduleError
from minidl.core.tasks import Kind
from minidl.devices import far
from minidl.devices.device import cpu
from minidl.devices.far import Mapped, mapped
from minidl.measuring.far import measure_far
from minidl.passes.draft import Draft
from minidl.passes.offload import Moves, offload
from minidl.plans.memory import MemoryLimitError
from minidl.plans.plan import Plan
from minidl.pricing.cost import CostError, Link
from minidl.runtime.comm import RankError
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import DistributedExecutor, TaskError
from minidl.schedulers.search import away

EXAMPLE = np.zeros((8, 16), np.float32), np.zeros(8, np.int64)


class Net(nn.Module):
    """Dropout, a batch norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(16, 32), nn.Dropout(0.5)
        self.norm, self.last = nn.BatchNorm1d(32), nn.Linear(32, 10)

    def forward(self, x: Any) -> Any:
        h = nn.relu(self.first(x))
        return self.last(h + self.norm(self.drop(h)))


def recorded(model: Any, x: Any = EXAMPLE[0], y: Any = EXAMPLE[1], optimizer: Any = optim.Adam) -> TaskGraph:
    return ml.record(classified(model, optimizer(model.parameters(), 0.01)), x, y)


def batches(steps: int = 3) -> list[Any]:
    random = np.random.default_rng(0)
    return [(random.normal(size=(8, 16)).astype(np.float32), random.integers(0, 10, 8)) for _ in range(steps)]


def state(model: Any) -> dict[str, bytes]:
    return {name: a.tobytes() for name, a in model.state_dict().items()}


def trained(policy: str = "in_order", **options: Any) -> tuple[list[bytes], dict[str, bytes], ml.Plan]:
    """Losses, everything that outlives the steps, and the plan."""
    ml.seed(0)
    plan = ml.plan(recorded(model := Net()), policy, **options)
    run = ml.StreamExecutor(plan.graph, plan.schedule)
    losses = [run(*batch).numpy().tobytes() for batch in batches()]
    run.close()
    return losses, state(model), plan


def chain(layers: int, optimizer: Any = optim.Adam) -> TaskGraph:
    """Linear layers whose activations are larger than their weights."""
    ml.seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(layers)])
    return recorded(model, np.zeros((256, 16), np.float32), np.zeros(256, np.int64), optimizer)


def moved(graph: TaskGraph, moves: Moves) -> Draft:
    return offload(replace(Draft.of(graph), schedule=schedulers.in_order(graph)), moves)


@pytest.mark.parametrize("what", ["activations", "states", "all"])
@pytest.mark.parametrize("policy", ["in_order", "multi_stream", "multi_region"])
def test_bits_are_those_of_the_plain_step(policy: str, what: str, both_lanes: str):
    """With dropout, batch norm and Adam."""
    losses, left, plain = trained(policy)
    again = trained(policy, offload=what)
    assert (losses, left) == again[:2]
    assert {Kind.D, Kind.H} <= {t.kind for t in again[2].graph}
    assert max(again[2].peak_bytes) < max(plain.peak_bytes)


def test_recomputed_and_split_steps_offload_the_rest():
    losses, left, _ = trained()
    again = trained(recompute=(1, 2), offload="all")
    assert (losses, left) == again[:2]
    assert {Kind.R, Kind.D} <= {t.kind for t in again[2].graph}
    parted = trained(split=2), trained(split=2, offload="all")
    assert parted[0][:2] == parted[1][:2]


ON_RANKS = {"ranks": 1, "replicas": 2, "micro_batches": 1, "optimizer": "adam", "norm": True, "drop": True}


@pytest.mark.few(1)
@pytest.mark.parametrize("more", [{"offload": "activations"}, {"offload": "all", "shard": 1}], ids=str)
def test_data_parallel_ranks_with_and_without_shards_leave_the_bits_of_one_process(more: dict[str, Any]):
    rank_runs.check({**ON_RANKS, **more, "scheduler": "barrier"})


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["barrier", "buckets", "no_overlap"])
def test_states_of_data_parallel_ranks_leave_without_shards(policy: str):
    """Updates end the step, as they do with shards."""
    rank_runs.check({**ON_RANKS, "scheduler": policy, "offload": "states"})
    whole, away = (rank_runs.prepared({**ON_RANKS, "scheduler": policy, **more})[0][1]
                   for more in ({}, {"offload": "states"}))
    assert max(away.peak_bytes) < max(whole.peak_bytes)
    states = sum(s.bytes for s in whole.graph.storages if s.role == Role.STATE)
    assert 0 < away.graph.bytes[away.graph.kind == Kind.H].sum() <= states


def test_the_peak_of_activations_does_not_grow_with_the_network():
    """Without a window two activations of 16 KiB and the loss are there at a time, whatever the depth."""
    found = [ml.plan(chain(n), "in_order", offload="activations").as_json()["activation_peak_bytes"] for n in (8, 32)]
    assert found[0] == found[1] == 2 * 256 * 16 * 4 + 256
    assert ml.plan(chain(32), "in_order").as_json()["activation_peak_bytes"] > 10 * found[0]


@pytest.mark.parametrize("window", [0, 1, 3])
def test_d_and_h_stand_where_the_window_says(window: int):
    draft = moved(chain(12), Moves("activations", window))
    graph, main = draft.graph, draft.order.ids(draft.graph)[: draft.order.ptr[1]].tolist()
    place = {t: i for i, t in enumerate(main)}
    assert [lane.name for lane in draft.order.lanes] == ["main", "out", "in"]
    for t in graph:
        if t.kind == Kind.D:
            made = [p for p in graph.preds[t.index].tolist() if graph.kind[p] == Kind.F]
            waits = [s for s in graph.succs[t.index].tolist() if s in place]
            assert min(place[s] for s in waits) == max(place[p] for p in made) + 1 + window
        if t.kind == Kind.H:
            back = {b.index for b in t.writes}
            readers = [u for u in place if back & {*graph.reads[u].tolist()}]
            after = [p for p in graph.preds[t.index].tolist() if p in place]
            assert max(place[p] for p in after) == min(place[s] for s in readers) - 1 - window


def test_those_that_are_away_for_the_longest_leave_first():
    graph = chain(12)
    every = [t.unit for t in moved(graph, Moves("activations")).graph if t.kind == Kind.D]
    some = [t.unit for t in moved(graph, Moves("activations", 1, 4)).graph if t.kind == Kind.D]
    assert some == every[:4] == sorted(some)


def test_within_a_limit_as_few_leave_as_can_and_the_step_is_the_shortest():
    graph = chain(6)
    whole, least = (ml.plan(graph, "in_order", offload=what) for what in ("none", "all"))
    limit = (whole.peak_bytes[0] + least.peak_bytes[0]) // 2
    found = ml.plan(graph, "in_order", machine=ml.Machine(memory_limit=limit), offload="all")
    assert found.peak_bytes[0] <= limit
    assert "bytes a step are copied out" in found.remarks[-1]
    fits = []
    for window in away.WINDOWS:
        for most in range(1, 20):
            draft = moved(graph, Moves("all", window, most))
            plan = Plan("in_order", draft.graph, draft.order, ml.CostModel.analytic())
            if plan.peak_bytes[0] <= limit:
                fits.append(plan.step)
                break
    assert found.step == pytest.approx(min(fits))
    assert ml.plan(graph, "in_order", machine=ml.Machine(memory_limit=whole.peak_bytes[0]), offload="all").remarks == ()
    with pytest.raises(MemoryLimitError, match=f"the least that can be had is {least.peak_bytes[0]:,}"):
        ml.plan(graph, "in_order", machine=ml.Machine(memory_limit=1000), offload="all")


def test_an_executor_from_before_states_moved_refuses_to_train_on_the_old_ones():
    ml.seed(0)
    model = Net()
    graph = recorded(model)
    before = [ml.SequentialExecutor(graph), ml.StreamExecutor(graph, schedulers.in_order(graph))]
    others = recorded(Net())
    apart = ml.StreamExecutor(others, schedulers.in_order(others))
    plan = ml.plan(graph, "in_order", offload="states")
    runs = [ml.StreamExecutor(plan.graph, plan.schedule) for _ in range(2)]
    for old in before:
        with pytest.raises(RuntimeError, match=r"has moved to far memory since this executor was made; make it after"):
            old(*batches()[0])
    for moved_run, batch in zip([*runs, ml.StreamExecutor(graph, schedulers.in_order(graph))], batches(), strict=True):
        moved_run(*batch)
    apart(*batches()[0])
    assert state(model) == trained()[1]
    assert all(isinstance(s.live.data, Mapped) for s in plan.graph.storages if s.role == "far")


def test_a_saved_order_must_say_what_is_offloaded():
    graph = chain(6)
    made = ml.plan(graph, "in_order", offload="all")
    for wrong in ("all", '{"what": "both"}', '{"what": "all", "window": -1, "most": null}'):
        with pytest.raises(ScheduleError, match="it must say what"):
            ml.plan(graph, replace(made.schedule, notes={"offloaded": wrong}))


def test_kinds_have_colours_of_their_own():
    assert len({PALETTE[group_of(kind)] for kind in Kind if kind < Kind.A}) == Kind.A


def test_copies_take_the_time_of_their_link():
    graph = moved(chain(4), Moves("activations")).graph
    cost = ml.CostModel(kinds={"F": 1.0, "O": 1.0, "W": 1.0, "U": 1.0}, far=Link(2.0, 1e3))
    time = {t.name: x for t, x in zip(graph, cost.durations(graph), strict=True)}
    assert {time[t.name] for t in graph if t.kind in (Kind.D, Kind.H)} == {2.0 + 256 * 16 * 4 / 1e3}
    with pytest.raises(CostError, match=r"lack task \d+D0"):
        replace(cost, far=None).durations(graph)


def test_the_link_to_far_memory_is_measured():
    assert measure_far(cpu()).bandwidth > 0


@pytest.mark.parametrize(("policy", "optimizer", "ranks", "what", "why"), [
    ("in_order", optim.SGD, 1, "states", "no states of an optimizer"),
    ("fifo", optim.Adam, 2, "states", "fifo updates beside the next step"),
    ("in_order", optim.Adam, 1, "everything", "it must be one of none, activations, states, all")])
def test_what_cannot_be_offloaded_is_refused(policy: str, optimizer: Any, ranks: int, what: str, why: str):
    with pytest.raises((Refused, PlanError), match=why):
        ml.plan(chain(4, optimizer), policy, machine=ml.Machine(ranks), offload=what)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["one_f_one_b", "modulo"])
def test_a_saved_plan_takes_the_flag_that_it_was_made_with(name: str, tmp_path: Path, capsys):
    """It offloaded a second time: a refusal, or an error of our own."""
    flags = ["plan", "--model", "mlp", "--costs", "analytic", "--parallel", "pipeline", "--ranks", "2",
             "--micro-batches", "4", "--scheduler"]
    saved, again = tmp_path / "a.csv", tmp_path / "b.csv"
    for file, scheduler in ((saved, name), (again, str(saved))):
        assert run(capsys, *flags, scheduler, "--offload", "all", "--save", str(file))[0] == 0
    assert again.read_text() == saved.read_text()
    for other in (["--offload", "states"], ["--offload", "all", "--memory-limit", "900KB"]):
        assert "already offloads all; leave --offload out" in refusal(capsys, *flags, str(saved), *other)


def test_ranks_may_open_files_of_one_name_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each rank opens the file that was asked for once, to see that it can, and may not meet another rank's."""
    fill, met = os.posix_fallocate, list[str]()

    def meanwhile(*asked: int) -> None:
        monkeypatch.setattr(os, "posix_fallocate", fill)
        met.extend([*os.listdir(tmp_path), "looked"])
        mapped(0, str(tmp_path / "far"))
        fill(*asked)

    monkeypatch.setattr(os, "posix_fallocate", meanwhile)
    mapped(0, str(tmp_path / "far"))
    assert met == ["looked"]
    assert not os.listdir(tmp_path)


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    for path, why in ((taken, "File exists"), (tmp_path, "File exists"), (tmp_path / "no" / "x", "No such file")):
        with pytest.raises(OSError, match=f"cannot copy out to .*: {why}"):
            cpu().set_far_file(str(path))
    assert taken.read_text() == "mine"
    assert cpu().far_file is None
    assert len(mapped(5000, str(tmp_path / "new"), 3)) == 5000
    assert os.listdir(tmp_path) == ["taken"]

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    ml.seed(0)
    model = Net()
    plan = ml.plan(recorded(model), "in_order", offload="all")
    before = state(model)
    with pytest.raises(OSError, match=r"cannot copy \d+,\d+ bytes out to a temporary file: No space left on device"):
        ml.StreamExecutor(plan.graph, plan.schedule)
    monkeypatch.undo()
    assert state(model) == before
    run = ml.StreamExecutor(plan.graph, plan.schedule)
    assert np.isfinite(run(*batches()[0]).numpy())
    run.close()


@pytest.fixture
def far_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A path, and a call that takes all bytes from the open far files that messages call so."""
    files, opened = list[tuple[str, int]](), far.mapped

    def remembered(*asked: Any) -> Any:
        found = opened(*asked)
        files.append((found.owner.name, found.owner.number))
        return found

    def cut_short(name: str) -> None:
        for number in {number for called, number in files if called == name}:
            with suppress(OSError):  # it is closed already
                os.truncate(f"/proc/self/fd/{number}", 0)

    cpu().set_far_file(str(tmp_path / "far"))
    monkeypatch.setattr(far, "mapped", remembered)
    yield str(tmp_path / "far"), cut_short
    cpu().set_far_file(None)


@pytest.mark.parametrize("what", ["activations", "states"])
def test_a_far_file_that_becomes_shorter_in_a_run_is_an_error_that_names_task_and_file(what: str, far_file: Any,
                                                                                      both_lanes: str):
    path, cut_short = far_file
    ml.seed(0)
    plan = ml.plan(recorded(Net()), "in_order", offload=what)
    run = ml.StreamExecutor(plan.graph, plan.schedule)
    run(*batches()[0])
    cut_short(path)
    with pytest.raises(TaskError, match=rf"^task \d+[DH]0(/1)? \(.*\) on lane 0/(out|in) failed: OSError: cannot copy "
                                        rf"[\d,]+ bytes (out to|back from) {path}: the file has become shorter$"):
        run(*batches()[1])
    run.close()


def test_if_a_ranks_copy_fails_the_others_end(far_file: Any):
    path, cut_short = far_file
    plans, errors = [], dict[int, Exception]()
    for _ in range(2):
        ml.seed(0)
        plans.append(ml.plan(recorded(Net()), "barrier", machine=ml.Machine(2), offload="activations"))

    def work(communicator: Any) -> None:
        plan = plans[communicator.rank]
        try:
            run = DistributedExecutor(plan.graph, plan.schedule, communicator)
            run(*batches()[0])
            if communicator.rank == 1:
                cut_short(f"{path}.1")
            run(*batches()[1])
            run.settle()
        except Exception as error:
            errors[communicator.rank] = error
            raise

    with pytest.raises(TaskError, match=rf"task \d+D0 \(.*\) on rank 1 failed: OSError: cannot copy .* {path}.1: "):
        run_ranks(2, work)
    assert isinstance(errors[0], RankError)


def test_a_full_disk_in_a_step_of_training_is_one_line(monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """The last checkpoint is of a step that is whole."""
    write, left = os.pwritev, [20]

    def filled(*arguments: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    train = ["train", "--model", "mlp", "--costs", "analytic", "--checkpoint", str(tmp_path)]
    away = [*train, "--checkpoint-every", "1", "--offload", "activations"]
    monkeypatch.setattr(os, "pwritev", filled)
    code, out, err = run(capsys, *away, "--steps", "1000", "--json")
    assert code == 2
    said = err.splitlines()[-1]
    assert re.fullmatch(r"minidl: task \d+D0 .* failed: OSError: cannot copy [\d,]+ bytes out to a temporary file in "
                        r".*: No space left on device", said)
    assert (out, err.count("minidl:"), "Traceback" in err) == ("", 1, False)
    monkeypatch.undo()
    resumed = run_json(capsys, *train, "--resume", "--steps", "60")[1]
    whole = run_json(capsys, *train[:-2], "--steps", "60")[1]
    assert 0 < resumed["steps"] < 60
    assert resumed["params_sha256"] == whole["params_sha256"]
