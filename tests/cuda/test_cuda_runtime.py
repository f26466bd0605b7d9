"""The CUDA device without a GPU: streams, captured graphs, inputs and results, on a runtime that
reorders all it may."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import cuda_runtime
import numpy as np
import pytest
from covering import pairs
from gpu_steps import Run, equal, trained
from helpers import ROOT, drawn, late_schedule, python_calls
from hypothesis import given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl import nn, schedulers
from minidl.autograd.tape import Tape, use
from minidl.cli import main
from minidl.core.graph import View
from minidl.core.tasks import strides_of
from minidl.devices import DeviceError
from minidl.devices.cuda import clock, lanes
from minidl.devices.cuda import device as devices
from minidl.devices.cuda.device import Cuda
from minidl.devices.lanes import Work
from minidl.measuring import measure, sms
from minidl.measuring.pairs import measure_pairs
from minidl.passes.boundary import must_stay
from minidl.runtime.checking import random_schedule
from minidl.runtime.executors import GraphExecutor, SequentialExecutor, StreamExecutor
from minidl.training.job import Job
from minidl.training.recorded import Recorded
from minidl.training.trainer import Trainer, TrainingError


def all_late(graph: Any, arrange: Any = schedulers.in_order) -> Any:
    """A schedule in which every task that may be is one step late."""
    return late_schedule(graph, np.flatnonzero(~must_stay(graph)), arrange)


@pytest.mark.few(1)
@pytest.mark.parametrize(*pairs(2, seed=range(4), kind=[StreamExecutor, GraphExecutor],
                                optimizer=["sgd", "muon", "adamw"]))
def test_schedules_give_the_bits_of_the_sequential_run(device, kind, seed, optimizer):
    """Of steps that are issued while earlier ones run, whose inputs do not mix."""
    chosen = schedulers.multi_stream if seed % 2 else lambda g: random_schedule(g, 3, np.random.default_rng(seed))
    assert equal(trained(device(seed), kind, chosen, optimizer=optimizer), trained(device(seed), optimizer=optimizer))


def test_the_device_computes_what_the_cpu_does(device):
    there, here = trained(device()), trained(ml.device.cpu())
    np.testing.assert_allclose(there[0], here[0], rtol=1e-5)
    for p, q in zip(there[1], here[1], strict=True):
        np.testing.assert_allclose(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [StreamExecutor, GraphExecutor])
@pytest.mark.parametrize("seed", range(3))
def test_weight_gradients_cross_the_border_on_streams_and_in_graphs(device, seed, kind):
    def late(graph: Any) -> Any:
        return all_late(graph, lambda g: random_schedule(g, 2, np.random.default_rng(seed)))

    assert equal(trained(device(seed), kind, late), trained(device(seed)))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [StreamExecutor, GraphExecutor])
def test_pinned_inputs_are_sent_from_where_they_lie(device, kind, monkeypatch):
    monkeypatch.setattr(devices, "NODES", 0)  # a graph uploads small ones from memory of its own
    wanted, run = trained(device(3)), Run(device(3))
    there = run.device
    batches = []
    for _ in range(5):
        arrays = next(run.batches)
        batches.append(tuple(there.pinned(a.shape, str(a.dtype)) for a in arrays))
        for host, array in zip(batches[-1], arrays, strict=True):
            host[...] = array
    run.batches = iter(batches)
    executor = run.executor(kind)
    feed = executor._body[0].bound.feed
    feed._prepare()
    for slot in feed._buffers:
        for host in slot["hosts"]:
            host[...] = 99  # nobody may read or write it
    assert equal(run.train(executor), wanted)
    assert all((host == 99).all() for slot in feed._buffers for host in slot["hosts"])


@pytest.mark.parametrize("kind", [StreamExecutor, GraphExecutor])
def test_inputs_of_a_dropped_executor_are_kept_until_they_are_copied(device, kind):
    """The stand-in refuses copies from pinned memory that was given back."""
    run = Run(device(1))
    for _ in range(2):
        run.executor(kind, schedulers.in_order)(*next(run.batches))
        gc.collect()
    run.device.synchronize()


def test_parts_that_share_memory_are_captured_on_zeros(device, monkeypatch):
    """Tasks run before they are captured; what another part left there may be no labels."""
    warm_up, seen = lanes.Captured._warm_up, []

    def looked(self: Any, segments: Any) -> None:
        bound = self.work.calls.__self__
        seen.append(self.device.read(self.device.array(bound.arena,
                                                       View(0, (bound.plan.arena_bytes,), (1,), 0, "uint8"))).any())
        warm_up(self, segments)

    monkeypatch.setattr(lanes.Captured, "_warm_up", looked)
    Run(device(0)).executor(GraphExecutor, all_late)
    assert len(seen) > 1
    assert not any(seen)


def _without_labels(self: Any, x: Any, y: Any) -> Any:
    out = self.model(x)
    loss = (out * out).mean()
    loss.backward()
    self.opt.step()
    return loss


def test_a_missing_wait_shows(device, monkeypatch):
    """The same run without the events between streams: some order of the runtime must give other numbers. There are no
    labels in it, which a race would make indices of anything."""
    monkeypatch.setattr(Run, "step", _without_labels)
    wanted = trained(device(0))

    def lost(self: Any, work: Work, trace: bool = False) -> Any:
        return lanes.Streams(self, replace(work, waits=[]), trace)

    monkeypatch.setattr(Cuda, "lanes", lost)
    assert any(not equal(trained(device(seed), StreamExecutor), wanted) for seed in range(6))


@pytest.mark.few(1)
@pytest.mark.parametrize("nth", [0, 1, -1])
def test_a_graph_that_lost_an_edge_is_refused(device, monkeypatch, nth):
    """The edge of a node that has no other: the first is the one between uploads, the second the first task's."""
    original = cuda_runtime.Runtime.dependencies

    def lost(self: Any, graph: Any) -> Any:
        nodes, edges = original(self, graph)
        into = Counter(b for _, b in edges)
        edges.remove(sorted(e for e in edges if into[e[1]] == 1)[nth])
        return nodes, edges

    run = Run(device())
    monkeypatch.setattr(cuda_runtime.Runtime, "dependencies", lost)
    with pytest.raises(DeviceError, match=r"the captured graph lets task \w+ start before [\w ]+ has ended"):
        run.executor(GraphExecutor)


@pytest.mark.wide
def test_the_picture_of_a_capture_is_what_is_captured(tmp_path):
    pictures = ROOT / "docs" / "pictures"
    subprocess.run([sys.executable, pictures / "capture.py", tmp_path / "capture.svg"], check=True, timeout=300,
                   stderr=subprocess.DEVNULL)
    assert (tmp_path / "capture.svg").read_text() == (pictures / "capture.svg").read_text(), (
        "python docs/pictures/capture.py draws it again")


@pytest.mark.parametrize(("nodes", "calls"), [(devices.NODES, 1), (0, 6)])
def test_small_inputs_are_uploaded_by_the_graph_of_a_step(device, monkeypatch, nodes, calls):
    """Its loss comes to the host by it, too: a call is a launch, without uploads, copies across, a copy of the loss."""
    monkeypatch.setattr(devices, "NODES", nodes)
    wanted, run, counts = trained(device(5)), Run(device(5)), []
    step = run.executor(GraphExecutor)

    def counted(*inputs: Any) -> Any:
        issued = run.device.driver.issued
        result = step(*inputs)
        counts.append(run.device.driver.issued - issued)
        return result

    assert equal(run.train(counted), wanted)
    assert counts == [calls] * 5


def test_the_chain_goes_before_what_runs_beside_it(device):
    """In a captured step as on streams: the kernels of `main` have a higher priority than all others."""
    run = Run(device())
    step = run.executor(GraphExecutor)
    machine, (main, sub) = run.device.driver.machine, step._body[0].lanes.streams
    executable = machine.executables[step._body[0].lanes.graphs[0].executable]
    of_main, of_sub = (machine.queues[stream.ptr].priority for stream in (main, sub))
    assert of_main < of_sub
    assert set(executable.priorities(machine.queues[main.ptr])) == {of_main, of_sub}


@pytest.mark.slow
def test_tasks_larger_than_the_cache_are_timed_on_two_sets_of_buffers(device, monkeypatch):
    """Else each repeat would find its data in the cache. No parameter changes."""
    run, timed = Run(device()), []
    monkeypatch.setattr(clock, "REPEATS", 2)
    monkeypatch.setattr(clock, "ROUNDS", 1)
    each = clock.each
    monkeypatch.setattr(clock, "each", lambda driver, stream, programs, progress, repeats: timed.append(
        [len(sets) for sets in programs]) or each(driver, stream, programs, progress, repeats))
    before = [p.numpy() for p in run.model.parameters()]
    touched = [sum(run.graph.storages[s].bytes for s in {view.storage for launch in launches for view in launch.views})
               for launches in run.graph.launches]
    largest = touched.index(max(touched))
    monkeypatch.setattr(run.device, "cache_bytes", 2 * touched[largest] - 1)
    costs = ml.measure(run.graph, device=run.device)
    assert timed[0][largest] == 2
    assert timed[0].count(1) > len(timed[0]) / 2
    assert all(time > 0 for time in costs.tasks.values())
    for was, p in zip(before, run.model.parameters(), strict=True):
        np.testing.assert_array_equal(was, p.numpy())


def test_a_call_of_a_small_captured_step_is_a_launch_and_a_dozen_calls_of_python(device, monkeypatch):
    """And no memory is allocated."""
    run, sizes = Run(device()), []
    step = run.executor(GraphExecutor)
    original = cuda_runtime.Runtime.allocate
    monkeypatch.setattr(cuda_runtime.Runtime, "allocate",
                        lambda self, n, stream: sizes.append(n) or original(self, n, stream))
    x, y = next(run.batches)
    held = [step(x, y) for _ in range(3)]
    assert len(python_calls(lambda: step(x, y))) <= 12
    assert len(python_calls(lambda: step(x, y).fetch())) <= 14
    del held[:]
    run.device.synchronize()
    assert not sizes


def _with_logits(self: Any, x: Any, y: Any) -> Any:
    logits = self.model(x)
    loss = nn.cross_entropy(logits, y)
    loss.backward()
    self.opt.step()
    return loss, logits


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(8))
def test_results_of_a_captured_step_can_be_read_at_any_time(device, monkeypatch, seed):
    """Whatever the arrays of its inputs are, which the caller overwrites; wrong ones in between change nothing."""
    monkeypatch.setattr(Run, "step", _with_logits)
    random, plain = np.random.default_rng(seed), Run(device(seed))
    oracle, batches = SequentialExecutor(plain.graph, plain.device), [next(plain.batches) for _ in range(9)]
    wanted = [(float(loss), logits.numpy()) for loss, logits in (oracle(*batch) for batch in batches)]
    there, held = device(seed), {}
    run, other = Run(there), Run(there)
    step = run.executor(GraphExecutor, lambda g: random_schedule(g, 2, random))
    aside = other.executor(GraphExecutor, schedulers.in_order)

    def read(n: int) -> None:
        loss, logits = held.pop(n)
        if n % 2:
            assert float(loss) == wanted[n][0]
            assert (logits.numpy() == wanted[n][1]).all()
        else:  # as tensors of the device
            with use(Tape(there)):
                assert float(loss + 0) == wanted[n][0]
            assert (logits.reshape(160).numpy() == wanted[n][1].reshape(-1)).all()

    for n, (x, y) in enumerate(batches):
        given = [(lambda a: a.copy(), lambda a: a.copy("F"), lambda a: np.repeat(a, 2, 0)[::2], _pinned(there))[
            int(random.integers(4))](a) for a in (x, y)]
        with pytest.raises(ValueError, match=r"label 10 of sample 3 is out of range"):
            step(x, np.where(np.arange(16) == 3, 10, y))
        with pytest.raises(ml.ShapeError, match=r"input 0 is float32 \(15, .*; the step was recorded with"):
            step(x[:15], y)
        held[n] = step(*given)
        for a in given:
            a[...] = 99
        aside(x, y)
        for late in [m for m in held if random.random() < 0.2]:
            read(late)
    kept = len(there.in_use)
    del step
    gc.collect()
    assert len(there.in_use) == kept - 2
    for late in [*held]:
        read(late)


def _pinned(device: Any) -> Any:
    def made(a: Any) -> Any:
        found = device.pinned(a.shape, str(a.dtype))
        found[...] = a
        return found

    return made


@pytest.mark.parametrize("kind", [StreamExecutor, GraphExecutor])
def test_a_trace_has_a_record_for_each_task(device, kind):
    run = Run(device())
    step = run.executor(kind, trace=True)
    step(*next(run.batches))
    tasks = step.timeline.what == 0
    assert tasks.sum() == len(run.graph)
    assert (step.timeline.end[tasks] > step.timeline.start[tasks]).all()
    assert (step.timeline.issued[tasks] <= step.timeline.start[tasks]).all()


@pytest.mark.few(3)
@pytest.mark.parametrize(("shape", "strides", "offset"),
                         [((), (), 0), ((5,), (1,), 3), ((3, 4), (4, 1), 0), ((4, 3), (1, 4), 2),
                          ((2, 3, 4), (24, 8, 2), 1), ((0, 3), (3, 1), 0)])
def test_what_is_written_is_read(device, shape, strides, offset):
    there = device(1)
    memory = there.allocate(4 * 64)
    view = View(0, shape, strides, offset, "float32")
    array = there.array(memory, view)
    value = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    there.write(array, value)
    np.testing.assert_array_equal(there.read(array), value)
    np.testing.assert_array_equal(there.fetch(array)(), value)
    assert there.interface(array)["data"][1] is False, "other libraries may write to it"
    copied = there.snapshot(array)
    copy = there.array(copied, View(0, shape, strides_of(shape), 0, "float32"))
    np.testing.assert_array_equal(there.read(copy), value)


def test_a_task_between_others_costs_what_it_takes_longer_than_alone(device, monkeypatch):
    there = device(0)
    times = iter([70.0, 50.0, 900.0])
    monkeypatch.setattr(there, "task_times", lambda programs, repeats: [next(times)])
    monkeypatch.setattr(measure, "ORDERS", 3)
    assert measure._between(Run(there).graph, there, np.random.default_rng(0), alone=40.0, tasks=6) == 5.0


def test_eager_steps_and_checkpoints(device, tmp_path):
    wanted, run = trained(device(0)), Run(device(2))
    with use(Tape(run.device)):
        first = [float(run.step(ml.array(x), ml.array(y))) for x, y in [next(run.batches)]]
    assert first == wanted[0][:1]
    ml.checkpoint.save(tmp_path, run.model, run.opt, step=1)
    for other in (Run(ml.device.cpu()), Run(device(4))):
        ml.checkpoint.load(tmp_path, other.model, other.opt)
        for p, q in zip(run.model.parameters(), other.model.parameters(), strict=True):
            np.testing.assert_array_equal(p.numpy(), q.numpy())


@pytest.mark.slow
def test_costs_are_measured_in_graphs(device, monkeypatch):
    """The time of a step besides its tasks is the device's: the main stream's between two steps, behind other work. The
    host's wait does not count."""
    run, seen, behind = Run(device()), [], clock.behind
    monkeypatch.setattr(clock, "behind", lambda *given: seen.append(behind(*given)) or seen[-1])
    cost = ml.measure(run.graph, device=run.device)
    assert [cost.step] == seen
    assert (cost.durations(run.graph) > 0).all()
    assert cost.device == "cuda:0"


@pytest.mark.wide
def test_a_task_takes_longer_between_others_than_repeated(device, monkeypatch):
    """Alone each task takes 2 us here, and 5 us in a whole order; then 1 us, which is no negative difference."""
    run = Run(device())
    tasks = sum(bool(launches) for launches in run.graph.launches)
    whole = 5.0 * tasks

    def times(self, programs, progress=None, repeats=clock.REPEATS):
        return [whole] if repeats == 1 else [2.0 if sets[0] else 0.0 for sets in programs]

    monkeypatch.setattr(type(run.device), "task_times", times)
    assert ml.measure(run.graph, device=run.device).launch == pytest.approx(3.0)
    whole = 1.0 * tasks
    assert ml.measure(run.graph, device=run.device).launch == 0


@pytest.mark.slow
def test_pairs_are_measured_in_graphs(device, monkeypatch):
    monkeypatch.setattr(sms, "SIZE", 1 << 12)
    run = Run(device())
    corun = measure_pairs(run.graph, ml.CostModel.analytic(), {"1W0": "a", "2F0": "b", "3F0": "b"}, [("a", "b")],
                          device=run.device)
    assert corun.slowdown["a"]["b"] >= 1
    assert corun.slowdown["b"]["a"] >= 1
    assert corun.needs.keys() == {"a", "b"}


# -------------------------------------------------------------------------------------------------------- whole runs
def trainer(**more: Any) -> Trainer:
    return Trainer(Recorded(Job(model="mlp", model_args={"hidden": 16}, batch_size=16, **more)),
                   ml.CostModel.analytic())


def test_losses_are_waited_for_some_steps_later(there):
    there(3)
    found, reference = trainer(device="cuda"), trainer()
    for n in range(12):
        found.step()
        assert len(found.losses) == max(0, n + 1 - Trainer.in_flight)
    found.collect()
    for _ in range(12):
        reference.step()
    np.testing.assert_allclose(found.losses, reference.losses, rtol=1e-4)


def test_a_loss_that_is_no_number_is_told_with_its_step(there):
    there(3)
    run = trainer(device="cuda", lr=1e30)
    with pytest.raises(TrainingError, match=r"the loss is (nan|inf) at step [234] of mlp with lr 1e\+30"):
        for _ in range(20):
            run.step()


def test_the_command_line_trains_and_compares_as_on_the_cpu(there, command):
    there(3)
    job = ("--model", "mlp", "--model-arg", "hidden=16", "--batch-size", "16", "--steps", "6", "--costs", "analytic")
    here, found = command("train", *job), command("train", *job, "--device", "cuda")
    assert here.keys() == found.keys()
    assert found["device"] == "cuda:0"
    assert found["loss_last"] == pytest.approx(here["loss_last"], rel=1e-4)
    assert found["accuracy"] == pytest.approx(here["accuracy"], abs=0.02)
    arms = command("compare", *job, "--device", "cuda", "--schedulers", "in_order,multi_stream,multi_region")
    assert arms["bit_identical"]
    assert arms["arms"][0]["params_sha256"] == found["params_sha256"]
    early = command("train", *job, "--device", "cuda", "--dependent-launch")
    assert early["params_sha256"] == found["params_sha256"]
    plain = command("train", *job, "--device", "cuda", "--fusion", "none")
    assert plain["loss_last"] == pytest.approx(found["loss_last"], rel=1e-4)


CONVOLUTIONS = ("compare", "--model", "lenet", "--batch-size", "8", "--steps", "3", "--costs", "analytic", "--device",
                "cuda", "--schedulers", "in_order,multi_stream")


@pytest.mark.slow
def test_bits_that_need_not_be_equal_are_told_and_no_failure(there, command, capsys):
    """The device that is there makes the last bits of a gradient as it likes, if it may."""
    device = there(3)
    loose = command(*CONVOLUTIONS, "--nondeterministic")
    assert not device.deterministic
    assert not loose["bit_identical"]
    assert not loose["deterministic"]
    assert main([*CONVOLUTIONS, "--nondeterministic"]) == 0
    assert "the parameters differ; with --nondeterministic they need not be equal\n" in capsys.readouterr().out
    assert main([*CONVOLUTIONS]) == 0  # the next job is asked for its own
    assert device.deterministic
    assert "equal bit for bit\n" in capsys.readouterr().out


@pytest.mark.wide
def test_bits_that_differ_where_they_must_not_are_a_failure(there, capsys, monkeypatch):
    there(3)
    # whatever is asked for
    monkeypatch.setattr(Cuda, "deterministic", property(lambda self: False, lambda self, value: None))
    assert main([*CONVOLUTIONS]) == 1
    assert "THE PARAMETERS DIFFER" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------ issuing order
@settings(max_examples=drawn(60), deadline=None)
@given(st.integers(1, 4), st.integers(0, 30), st.integers(0, 2**32))
def test_no_wait_is_issued_before_its_record(count, tasks, seed):
    rng = np.random.default_rng(seed)
    where = rng.integers(0, count, tasks).tolist()
    line = [[t for t in range(tasks) if where[t] == lane] for lane in range(count)]
    waits = [(b, a) for a in range(tasks) for b in range(a + 1, tasks) if where[a] != where[b] and rng.random() < 0.2]
    order = lanes.issue_order(Work([""] * count, [0] * count, line, waits, lambda t, s: [], str))
    place = {task: i for i, (task, _) in enumerate(order)}
    assert sorted(place) == list(range(tasks))
    assert all(place[a] < place[b] for b, a in waits)
    assert all(place[a] < place[b] for tasks_of in line for a, b in zip(tasks_of, tasks_of[1:], strict=False))


def test_the_cpu_has_no_graphs():
    run = Run(ml.device.cpu())
    with pytest.raises(DeviceError, match="cpu has no graphs to capture"):
        GraphExecutor(run.graph, schedulers.in_order(run.graph))
