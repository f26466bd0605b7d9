"""Costs are the times of tasks on a free core, and the steps that `compare` reports are those of a run of its own."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

import minidl as ml
from minidl.core.schedule import RankGrid
from minidl.core.tasks import Kind
from minidl.devices.native.lanes import NativeLanes
from minidl.measuring import links, measure
from minidl.measuring.measure import DISTURBED, MOST_RUNS, RUNS, Profile, undisturbed
from minidl.pricing.cost import Cross
from minidl.runtime.bound import Bound
from minidl.runtime.checking import random_schedule
from minidl.runtime.comm.loopback import run_ranks
from minidl.training import bystanders, loop
from minidl.training import trainer as training
from minidl.training.job import Job
from minidl.training.rank_trainer import TRIAL_STEPS, RankTrainer
from minidl.training.recorded import Recorded
from minidl.training.trainer import Trainer, interleaved

TIMES = np.array([5.0, 200.0, 20_000.0])  #: of three tasks, in microseconds


def test_repeats_that_are_equal_or_as_different_as_caches_make_them_give_their_mean():
    orders = [np.array([TIMES, 1.02 * TIMES]), np.array([1.04 * TIMES, 1.06 * TIMES])]
    assert undisturbed(orders) == pytest.approx(1.03 * TIMES)
    assert undisturbed([np.zeros((7, 2))]).tolist() == [0, 0]
    runs = np.linspace(1, DISTURBED - 0.01, 7)[:, None] * TIMES
    assert undisturbed([runs]) == pytest.approx(runs.mean(axis=0))


@pytest.mark.parametrize("seed", range(5))
def test_other_work_on_the_machine_does_not_count(seed):
    """Half of all repeats of each task wait for a turn of another process; so do all repeats of one order."""
    random = np.random.default_rng(seed)
    orders = [TIMES * random.uniform(0.98, 1.02, (7, 3)) for _ in range(3)]
    calm = undisturbed(orders)
    for runs in orders:
        for task in range(3):
            runs[random.choice(7, 3, replace=False), task] += random.uniform(3_000, 20_000, 3)
    assert undisturbed(orders) == pytest.approx(calm, rel=0.03)
    orders.append(2 * orders[0])
    assert undisturbed(orders) == pytest.approx(calm, rel=0.03)


def test_transfers_that_wait_for_a_turn_of_another_process_do_not_count():
    assert measure.transfer_time([100.0, 150.0, 110.0, 140.0]) == pytest.approx(125.0)
    assert measure.transfer_time([100.0, 150.0, 110.0, 140.0, 3000.0, 5000.0, 9000.0]) == pytest.approx(125.0)


def test_costs_of_ranks_are_those_of_the_ranks_that_nothing_disturbed():
    def cost(*times, source="measured", step=1.0):
        return ml.CostModel(tasks=dict(zip(("0F0", "0B0"), times, strict=True)), source=source, step=step)

    found = measure.of_ranks([cost(10.0, 20.0), cost(12.0, 20.0, step=5.0), cost(30.0, 60.0)])
    assert found == cost(11.0, 20.0)
    assert measure.of_ranks([cost(30.0, 60.0), cost(10.0, 20.0)]).tasks == cost(10.0, 20.0).tasks
    assert measure.of_ranks([cost(1, 2, source="given"), cost(3, 4)]) == cost(1, 2, source="given")
    others = ml.CostModel(tasks={"0F0": 1.0}, source="measured")
    assert measure.of_ranks([cost(1.0, 2.0), others]) == cost(1.0, 2.0)


def test_an_order_is_legal_random_and_goes_on_with_what_it_has_begun():
    """Micro-batches do not take turns task by task, and updates come last."""
    many = Recorded(Job(model="mlp", model_args={"preset": "tiny"}, batch_size=32, micro_batches=8)).graph
    random = np.random.default_rng(0)
    orders = [measure.warm_order(many, random) for _ in range(20)]
    for order in orders:
        assert sorted(order) == [*range(len(many))]
        place = np.argsort(order)
        assert (place[many.preds.ids] < place[many.preds.row_of_each()]).all()
    assert len(set(map(tuple, orders))) == 20
    uniform = [random_schedule(many, 1, random).ids(many) for _ in range(20)]
    turns, others = ([np.count_nonzero(np.diff(many.micro_batch[order])) for order in found]
                     for found in (orders, uniform))
    assert np.median(turns) < np.median(others) / 2
    assert np.median([np.flatnonzero(many.kind[order] == Kind.U).mean() for order in orders]) > 0.8 * len(many)


@pytest.fixture
def clock(monkeypatch):
    """Drawing an order takes 10 s, and a run 1 s, on the clock of measurements."""
    now = [0.0]
    monkeypatch.setattr(measure, "perf_counter", lambda: now[0])
    draw, once = measure.warm_order, Profile._once

    def slow_draw(*arguments):
        now[0] += 9.0
        return draw(*arguments)

    def slow_run(self):
        now[0] += 1.0
        once(self)

    monkeypatch.setattr(measure, "warm_order", slow_draw)
    monkeypatch.setattr(Profile, "_once", slow_run)


@pytest.fixture(scope="module")
def graph():
    return Recorded(Job(model="mlp", model_args={"preset": "tiny"})).graph


def test_orders_are_drawn_anew_when_they_have_run_for_as_long_as_they_took_to_draw(graph, clock):
    profile = Profile(graph)
    for _ in range(25):
        profile.run()
    assert [len(runs) for runs in profile._samples] == [10, 10, 5]
    assert profile.seconds == 25, "drawing does not count"


@pytest.mark.parametrize(("seconds", "runs"), [(0.0, RUNS), (30.0, 30), (1e9, MOST_RUNS)])
def test_costs_are_measured_for_so_many_seconds_of_runs(graph, clock, monkeypatch, seconds, runs):
    count, shares = [], []
    once = Profile.run
    monkeypatch.setattr(Profile, "run", lambda self: (count.append(1), once(self)))
    measure.measure(graph, seconds=seconds or 1e-9, progress=shares.append)
    assert len(count) == runs
    assert shares == sorted(shares)


def test_trainers_take_turns_of_several_steps_of_which_the_first_is_not_timed():
    order = []

    class Counted(Trainer):
        def step(self):
            super().step()
            order.append(self.name)
            self.seconds[-1] = 9.0 if len(self.seconds) % training.TURN == 1 else 1.0

    one, two = (Counted(Recorded(Job(model="mlp", model_args={"preset": "tiny"})), ml.CostModel.analytic())
                for _ in range(2))
    one.name, two.name = "one", "two"
    seen = []
    interleaved([one, two], 7, seen.append)
    assert order == ["one"] * 5 + ["two"] * 5 + ["one"] * 2 + ["two"] * 2
    assert seen == [5, 7]
    assert one.step_ms() == two.step_ms() == {"median": 1000.0, "p10": 1000.0, "p90": 1000.0}
    assert one.params_sha256() == two.params_sha256()
    alone = Trainer(Recorded(Job(model="mlp", model_args={"preset": "tiny"})), ml.CostModel.analytic())
    interleaved([alone], 1)
    assert alone.step_ms()["median"] == pytest.approx(alone.seconds[0] * 1e3, abs=1e-3), "a single step is timed"


def test_a_step_after_an_evaluation_is_not_timed():
    """Of ranks, one evaluates while the others wait in their next step."""
    one = Trainer(Recorded(Job(model="mlp", model_args={"preset": "tiny"}, batch_size=256)), ml.CostModel.analytic())
    loop.run(one, loop.Course(steps=13))  # an epoch has 5 steps and a half
    assert one.recorded.train_data.samples < 6 * 256
    assert one.strange == [0, *one.strange[1:]]
    assert len(one.strange) == 3
    one.seconds = [9.0 if n in one.strange else 1.0 for n in range(13)]
    assert one.step_ms()["p90"] == 1000.0


def test_only_the_steps_of_the_k_that_was_chosen_are_timed():
    def part(communicator):
        job = Job(model="mlp", parallel="data", scheduler="reverse_first_k")
        recorded = Recorded(job, communicator.rank, communicator.size)
        trainer = RankTrainer(recorded, ml.CostModel.analytic(), communicator, (50.0, 1e-3))
        tried = TRIAL_STEPS * len(trainer._trials)
        assert tried
        for _ in range(tried + 3):
            trainer.step()
        strange = trainer.strange
        trainer.finish()
        return strange == [*range(tried + 1)]

    assert run_ranks(2, part) == [True, True]


@pytest.mark.parametrize(("hosts", "cores", "wanted"), [
    ("aa", [{0, 1}, {0, 1}], 1), ("aa", [{0, 1, 2, 3}] * 2, 2), ("ab", [{0, 1}, {0, 1, 2, 3}], 2),
    ("aa", [{0}, {1}], 1), ("aaa", [{0, 1}] * 3, 1)])
def test_ranks_share_the_cores_of_their_machine(monkeypatch, hosts, cores, wanted):
    class Ranks:
        def gather(self, value):
            return [(host, sorted(own)) for host, own in zip(hosts, cores, strict=True)]

    assert links.cores_of_each(Ranks()) == wanted


@pytest.mark.parametrize(("hosts", "cores", "wanted"), [
    ("aa", [{0, 1}, {0, 1}], [0]), ("aaa", [{1, 2, 3, 4}] * 3, [1, 3]), ("ab", [{0, 1}, {0, 1}], None),
    ("aa", [{0}, {1}], None), ("aaa", [{0, 1}] * 3, None)])
def test_ranks_deal_out_the_cores_of_their_machine(monkeypatch, hosts, cores, wanted):
    """Unless a launcher has, or there are too few; 1 and 3 are two threads of one core."""
    class Ranks:
        rank = 0

        def gather(self, value):
            assert value == (hosts[0], places[0][1])
            return places

    held = []
    monkeypatch.setattr(links, "siblings", lambda core: {core, 4 - core} if core in (1, 3) else {core})
    monkeypatch.setattr(links, "gethostname", lambda: hosts[0])
    monkeypatch.setattr(links.os, "sched_getaffinity", lambda process: cores[0])
    monkeypatch.setattr(links.os, "sched_setaffinity", lambda process, own: held.append(own))
    order = (0, 1, 3, 2, 4)
    places = [(host, sorted(own, key=order.index)) for host, own in zip(hosts, cores, strict=True)]
    links.hold_to_cores(Ranks())
    assert held == ([] if wanted is None else [wanted])


def test_costs_of_a_process_become_those_of_ranks(monkeypatch):
    monkeypatch.setattr(links, "cores_of_each", lambda communicator: 1)
    cost = ml.CostModel(cores=2, sync=1.0, doze=2.0, wake=3.0, cross=Cross(1.0, 1.0))

    def found(cost):
        return run_ranks(2, lambda c: links.among_ranks(cost, c))[0]

    assert found(cost) == ml.CostModel(cores=1), "the lane that computes also sums: nothing is handed over"
    monkeypatch.setattr(links, "cores_of_each", lambda communicator: 2)
    assert found(cost) == cost
    assert found(ml.CostModel()) == ml.CostModel(), "the cores are not known"


@pytest.mark.parametrize(("scheduler", "told"), [
    ("barrier", {}), ("priority", {}), ("buckets", {"shard": "3"})])
def test_the_lane_of_a_rank_with_one_core_sums_without_a_thread(monkeypatch, scheduler, told):
    job = Job(model="mlp", parallel="data", scheduler=scheduler, **told)

    def part(communicator):
        trainer = RankTrainer(Recorded(job, communicator.rank, 2), replace(ml.CostModel.analytic(), cores=2),
                              communicator, (50.0, 1e-3))
        for _ in range(3):
            trainer.step()
        threads = [thread.name for thread in threading.enumerate() if f"{communicator.rank}/comm" in thread.name]
        trainer.finish()
        return threads, trainer.params_sha256(), trainer.losses

    found = []
    for cores in (1, 2):
        monkeypatch.setattr(links, "cores_of_each", lambda communicator, cores=cores: cores)
        found.append(run_ranks(2, part))
    (alone, *sums), (beside, *others) = zip(*found[0], strict=True), zip(*found[1], strict=True)
    assert alone == ([], [])
    assert all(beside)
    assert sums == others


def test_ranks_that_share_cores_are_predicted_to_compute_and_sum_in_turn():
    """Each on one core: no less than the time of all tasks and transfers; each on two, they overlap."""
    job = Job(model="mlp", parallel="data", scheduler="priority")
    recorded = Recorded(job, 0, 2)
    cost = replace(ml.CostModel.analytic(), cores=2)
    machine = ml.Machine(2, collective=lambda sizes: 50.0 + 1e-3 * sum(sizes.values()))
    two = recorded.plan(cost, machine)
    one = recorded.plan(replace(cost, cores=1), machine)
    whole = two.notes["compute"] + two.notes["communication"]
    assert one.step == pytest.approx(whole, rel=1e-6)
    assert two.step < 0.95 * whole


def flights_take(monkeypatch, start, end):
    """On the clock of measurements, each rank's transfers take so many microseconds to start, and to end together."""
    clocks = threading.local()

    def later(microseconds):
        clocks.now = getattr(clocks, "now", 0.0) + microseconds * 1e-6

    class Counting(links.Flight):
        def _start(self, entry):
            super()._start(entry)
            later(start)

        def run(self, step=False):
            super().run(step)
            later(end)

    monkeypatch.setattr(links, "Flight", Counting)
    monkeypatch.setattr(links, "perf_counter", lambda: getattr(clocks, "now", 0.0))


def test_a_small_sum_costs_its_part_of_a_row(monkeypatch):
    """A start of 1 us a sum, and an end of 16 us however many there are."""
    flights_take(monkeypatch, 1, 16)
    for each, rate in run_ranks(2, lambda c: links.measure_link(c, sizes=(4, 64, 256), repeats=3)):
        assert each == pytest.approx(2.0)
        assert rate == pytest.approx(0.0)


@pytest.mark.parametrize(("machines", "latency"), [(1, 6.0), (2, 28.0)])
def test_a_message_costs_both_cores_of_a_machine_and_time_between_machines(monkeypatch, machines, latency):
    """A start of 3 us on each rank, and 50 us until all have ended: no rank waits for that within a step."""
    flights_take(monkeypatch, 3, 50)
    monkeypatch.setattr(links, "gethostname", lambda: str(int(threading.current_thread().name[-1]) % machines))
    for link in run_ranks(2, lambda c: links.measure_messages(c, RankGrid(2, 1))):
        assert link.core == (machines == 1)
        assert link.latency == pytest.approx(latency)
        assert link.bandwidth > 1e6


def test_a_step_costs_what_it_takes_around_its_tasks(monkeypatch):
    """Measured in the runs that measure the tasks: here copying outputs takes 2 ms, but only after a task has run."""
    ran = []
    run, results = NativeLanes.run, Bound.results

    def with_tasks(lanes):
        ran.append(any(lanes.work.tasks))
        run(lanes)

    def after(bound):
        if ran[-1]:
            time.sleep(2e-3)
        return results(bound)

    monkeypatch.setattr(NativeLanes, "run", with_tasks)
    monkeypatch.setattr(Bound, "results", after)
    assert Recorded(Job(model="mlp", model_args={"preset": "tiny"})).measure().step >= 2000


@pytest.mark.parametrize("scheduler", ["one_f_one_b", "zb_h1"])
def test_a_pipeline_takes_a_period_since_its_ranks_begin_the_next_step_without_a_barrier(scheduler):
    job = Job(model="ffnn", model_args={"preset": "tiny"}, parallel="pipeline", scheduler=scheduler, micro_batches=4)
    plan = Recorded(job).plan(replace(ml.CostModel.analytic(), step=3.0), ml.Machine(2))
    assert plan.step == pytest.approx(plan.period + 3.0)
    assert plan.step < plan.timeline.makespan + 3.0 + 1e-9


def test_others_are_the_processes_beside_this_one(monkeypatch, tmp_path):
    now = {"cpu": 0.0, "clock": 100.0}
    stat = tmp_path / "stat"

    def works(user, stolen):
        ticks = os.sysconf("SC_CLK_TCK")
        stat.write_text(f"cpu  {int(user * ticks)} 0 0 {10**6} 0 0 0 {int(stolen * ticks)} 0 0\ncpu0 1 2\n")

    monkeypatch.setattr(bystanders, "STAT", stat)
    monkeypatch.setattr(bystanders.time, "process_time", lambda: now["cpu"])
    monkeypatch.setattr(bystanders.time, "monotonic", lambda: now["clock"])
    works(5, 1)
    count = bystanders.Bystanders()
    works(20, 2)
    now.update(cpu=6.0, clock=110.0)
    assert count.cores() == pytest.approx((15 + 1 - 6) / 10)
    stat.unlink()
    assert count.cores() == 0, "a system that does not say"
