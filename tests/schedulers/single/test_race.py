"""PD-ASGD in real time: threads race for the weights of each layer, and the log alone repeats a run bit for bit."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from command_line import refusal, run_json
from helpers import PATIENCE, until
from test_pd_asgd import FLAGS, SIZES, drawn_run, recorded, replayed, sgd, stream

import minidl as ml
from minidl.core.tasks import Kind, unpack
from minidl.runtime.race import Race
from minidl.runtime.version_log import VersionRead, staleness
from minidl.schedulers.batches import Batches


def racing(batches: int = 6, sizes: Any = SIZES, momentum: float = 0.9, **options: Any) -> tuple[Any, Race, Batches]:
    model, graph = recorded(batches, sizes, momentum)
    plan = ml.plan(graph, "pd_asgd", clock="real", **options)
    found = Batches.of(plan.graph, "pd_asgd")
    return model, Race(plan.graph, found.forward, found.backward, found.rest, **plan.notes["race"]), found


def ran(data: list[list[Any]], model: Any, race: Race) -> tuple[list[bytes], list[bytes], list[VersionRead]]:
    losses = [race(*parts).numpy().tobytes() for parts in data]
    race.close()
    return losses, [p.numpy().tobytes() for p in model.parameters()], race.log.entries


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.campaign)
                                             for seed in range(2, 202))])
def test_runs_repeat_from_their_logs(seed: int) -> None:
    """A random network with random threads: a replay of the log, which has one version for each update."""
    told, options, data = drawn_run(seed)
    model, race, _ = racing(**told, **options)
    losses, weights, log = ran(data, model, race)
    assert replayed(data, log, **told) == (losses, weights), seed
    made: dict[int, list[int]] = {}
    for e in log:
        if unpack(e.key).kind == Kind.U:
            made.setdefault(e.stage, []).append(e.version)
    assert all(versions == [*range(1, 3 * told["batches"] + 1)] for versions in made.values()), seed


def test_a_forward_that_overtakes_an_update_reads_older_weights() -> None:
    """The backward thread of batch 0 begins when the forward of batch 1 has ended, so batch 1 is one update late."""
    model, race, found = racing(2, backward=1, queue=1)
    first, last, overtaken = found.backward[0][0], found.forward[1][-1], threading.Event()
    assert not race._layers[first], "a task that waits holds no lock"
    race._calls[first] = [lambda: overtaken.wait(PATIENCE), *race._calls[first]]
    race._calls[last] = [*race._calls[last], overtaken.set]
    data = stream(1, 2)
    losses, weights, log = ran(data, model, race)
    assert replayed(data, log, batches=2) == (losses, weights)
    assert all(late.tolist() == [0, 1] for late in staleness(log).values())


def test_one_thread_each_without_a_queue_is_sgd_in_bits() -> None:
    data = stream(3)
    model, race, _ = racing(forward=1, backward=1, queue=0)
    assert ran(data, model, race)[:2] == sgd(data)


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_an_error_in_a_thread_ends_the_step_and_no_thread(part: str) -> None:
    _, race, found = racing()
    task, data = getattr(found, part)[2][-1], stream(1)[0]
    calls = race._calls[task]

    def fails() -> None:
        raise MemoryError("of a task")

    race._calls[task] = [fails]
    with pytest.raises(MemoryError, match="of a task"):
        race(*data)
    race._calls[task] = calls
    assert np.isfinite(race(*data).numpy())
    race.close()


def test_the_command_line_races_and_repeats(capsys: Any, tmp_path: Any) -> None:
    log, real = str(tmp_path / "log.jsonl"), ("--scheduler-arg", "clock=real")
    code, record = run_json(capsys, *FLAGS, *real, "--log-versions", log)
    assert code == 0
    for clock in ((), real):
        assert run_json(capsys, *FLAGS, *clock, "--replay", log)[1]["params_sha256"] == record["params_sha256"]

    refused = partial(refusal, capsys, *FLAGS)
    assert "is simulated or real, not 'sun'" in refused("--scheduler-arg", "clock=sun")
    adam = (*real, "--optimizer", "adam")
    assert "share a value" in refused(*adam)
    assert run_json(capsys, *FLAGS, *adam, "--scheduler-arg", "backward=1", "--scheduler-arg", "queue=0")[0] == 0
    assert "in real time records no timeline" in refused(*real, "--trace", str(tmp_path / "trace.json"))


def test_a_thread_that_hangs_is_named_with_the_threads_that_wait_for_its_layer() -> None:
    told, options, data = drawn_run(0)
    _, race, _ = racing(**told, **options)
    gate, held = threading.Event(), int(np.flatnonzero(race.graph.kind == Kind.F)[0])
    calls = race._calls[held]
    race._calls[held] = [lambda: gate.wait(PATIENCE), *calls]
    runs = threading.Thread(target=lambda: race(*data[0]))
    runs.start()
    try:
        until(lambda: {lane.state for lane in race.doing().lanes} >= {"runs"}, "a thread holds a layer")
        running = next(lane for lane in race.doing().lanes if lane.state == "runs")
        assert running.task == race.graph.name(held)
        assert race.progress() == race.progress()
        for lane in race.doing().lanes:
            assert lane.state == "runs" or set(lane.awaits) <= {running.task}
    finally:
        gate.set()
        runs.join()
        race.close()
    assert race.doing().lanes == ()
    assert race.doing().step == 1
