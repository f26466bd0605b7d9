"""The ladder of rungs on a runtime without a GPU: the whole path from networks to the record, and what
is checked on it."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda_runtime
import ladder
import ladder_record
import ladder_rungs
import processes
import pytest
from helpers import PATIENCE, planned, torch_or_skip
from ladder_cases import PRECISIONS, Case, Effort
from ladder_checks import passed
from ladder_minidl import CHIP, FUSED, PLAIN, Ours, longest
from ladder_runs import How, compiled_run, first_run
from ladder_table import result, run_text
from ladder_torch import COMPILED, EAGER, Theirs, twins

import minidl as ml
from minidl import schedulers
from minidl.devices.cuda import device as cuda_devices
from minidl.pricing.corun import CoRun

SHORT = Effort(seconds=0, warm_up=0, group=1, groups=2, steps=3, single=1)
TINY = {"tiny": Case("densenet121", {"preset": "tiny"}, 2)}
ALONE = How(SHORT, lambda graph, device: ml.CostModel.analytic(), None)
TF32 = PRECISIONS["tf32"]


@pytest.fixture
def device(monkeypatch):
    made = cuda_runtime.device(3)
    monkeypatch.setitem(cuda_devices._devices, 0, made)
    return made


@pytest.fixture
def one_thread():
    torch = torch_or_skip()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def two_rungs(device: Any, *rungs: str) -> dict[str, Any]:
    return first_run(TINY["tiny"], TF32, device, replace(ALONE, rungs=rungs or ("E0a in_order", "E1 in_order")))


def run_with(**correct: Any) -> dict[str, Any]:
    """A first run without times."""
    return {"correct": {"equal_bits": True, "finite": True, **correct}, "left_out": {}}


@pytest.mark.slow
def test_all_rungs_are_trained_compared_and_timed_in_turn(device, tmp_path):
    path = tmp_path / "record.json"
    about = {"sources": "s", "commit": "c", "date": "d"}
    ladder.Climb(TINY, [TF32], about, str(path))(ladder.Here(TINY, {"tf32": TF32}, device, ALONE))
    record = json.loads(path.read_text())
    assert record["name"] == "ladder"
    entry = record["networks"]["tf32"]["tiny"]
    run = entry["first"]
    assert run["correct"]["rungs"] == list(PLAIN)
    assert run["correct"]["equal_bits"]
    assert record["passed"]
    rungs = [*PLAIN, *FUSED]
    for key in ("step_ms", "host_us", "ready_s", "peak_bytes", "about"):
        assert list(run[key]) == rungs
    assert {"E1 in_order", "E2 multi_stream", "E3 in_order"} <= run["launch_us"].keys() <= {
        name for name in rungs if not name.startswith("E0")}
    assert all(s["n"] == SHORT.groups for s in run["step_ms"].values())
    assert {"E0a in_order / E0b multi_stream", "E0a in_order / E0b multi_region", "E1 in_order / E2 multi_stream",
            "E1 in_order / E2 multi_region", "E0a in_order / E1 in_order",
            "E1 in_order / E3 multi_region"} <= run["ratios"].keys()
    assert run["minidl"] == "E3 multi_region"
    assert record["summary"]["tf32"]["E1 in_order / E2 multi_region"]["networks"] == 1
    assert set(run["left_out"]) == {*EAGER}, "every rung that is missing says why"
    assert all(entry[name]["left_out"] == {name: "not asked for"} for name in COMPILED)
    text = run_text("tiny", run)
    assert all(f"  {name:20} " in text for name in rungs)
    assert "left out: B1 tuned: not asked for" in text
    assert "one stream / out of order, both captured (E1 / E2): " in result(record)


@pytest.mark.wide
def test_a_rung_with_other_bits_is_noticed(device, monkeypatch):
    make = Ours.rung

    def other(self: Any, name: str, schedule: Any) -> Any:
        rung, model = make(self, name, schedule)
        if name.startswith("E1"):
            next(iter(model.parameters())).assign(0.5)
        return rung, model

    monkeypatch.setattr(Ours, "rung", other)
    run = two_rungs(device)
    assert not run["correct"]["equal_bits"]
    assert not passed(run)


@pytest.mark.slow
def test_a_rung_that_fails_is_left_out_and_the_others_are_measured(device, monkeypatch):
    def broken(self: Any, *arguments: Any) -> Any:
        raise RuntimeError("no graphs\ntoday")

    monkeypatch.setattr(cuda_devices.Cuda, "captured", broken)
    run = first_run(TINY["tiny"], TF32, device, ALONE)
    assert list(run["step_ms"]) == [name for name in PLAIN if name.startswith("E0")]
    assert run["left_out"]["E1 in_order"] == "RuntimeError: no graphs today"
    assert run["correct"]["equal_bits"]
    assert not passed(run)


@pytest.mark.slow
def test_a_rung_that_fails_while_it_is_timed_is_left_out(device, monkeypatch):
    make = Ours.rung

    def failing(self: Any, name: str, schedule: Any) -> Any:
        rung, model = make(self, name, schedule)
        if name == "E1 in_order":
            step, turns = rung.step, itertools.count()
            rung.step = lambda: step() if next(turns) < ALONE.effort.steps else 1 / 0  # after the checks
        return rung, model

    monkeypatch.setattr(Ours, "rung", failing)
    run = two_rungs(device)
    assert list(run["step_ms"]) == ["E0a in_order"]
    assert (run["minidl"], run["left_out"]["E1 in_order"]) == ("E0a in_order", "ZeroDivisionError: division by zero")
    assert not passed(run)
    with pytest.raises(RuntimeError, match="no rung can be timed"):
        two_rungs(device, "E1 in_order")


@pytest.mark.slow
def test_torch_is_held_against_float64_and_timed_beside(device, one_thread):
    case = Case("mobilenet_v3_large", {"preset": "tiny"}, 2)  # it has a dropout, which the comparison leaves out
    run = first_run(case, PRECISIONS["float32"], device, replace(ALONE, torch_on="cpu",
                                                                     rungs=("E0a in_order", *EAGER)))
    found = run["correct"]["losses"]
    assert found["agrees"]
    assert list(found["errors"]) == ["E0a in_order"]
    assert len(found["float64"]) == found["steps"] == 3
    assert list(run["step_ms"]) == ["E0a in_order", "B0 eager", "B1 tuned"]
    assert run["about"]["B1 tuned"]["memory_format"] in ("contiguous", "channels_last")
    assert "B2 graph" in run["left_out"]
    assert (ladder_record.fastest({"first": run}, ["B1 tuned", "B2 graph"])
            == ("B1 tuned", run["ratios"]["B1 tuned / E0a in_order"]["median"]))
    assert passed(run)


@pytest.mark.slow
def test_bfloat16_is_that_of_both_sides(device, one_thread, monkeypatch):
    made = []
    monkeypatch.setattr(Theirs, "network",
                        lambda self, *a, network=Theirs.network, **k: made.append(network(self, *a, **k)) or made[-1])
    monkeypatch.setattr(Theirs, "tuned", lambda self: self.eager(True))
    kinds = ("E0a in_order", "E1 in_order", "E3 in_order")
    case, bf16 = Case("lenet", {}, 4), PRECISIONS["bf16"]
    ours = Ours(case, bf16, device)
    _, graph = ours.recorded("E1 in_order")
    products = [launch for task in graph.launches for launch in task if launch.kernel in ("linear", "conv2d")]
    assert len(products) == 5
    assert {view.dtype for launch in products for view in (*launch.reads, *launch.writes)} == {"bfloat16"}
    run = first_run(case, bf16, device, replace(ALONE, torch_on="cpu", rungs=(*kinds, *EAGER)))
    assert passed(run), run["correct"]
    assert list(run["step_ms"]) == [*kinds, "B0 eager", "B1 tuned"]
    assert run["correct"]["losses"]["error_of_torch"] > 1e-5, "torch rounds too"
    assert {p.dtype for p in made[-1].parameters()} == {torch_or_skip().float32}, "master weights"


@pytest.mark.slow
def test_every_network_has_a_twin():
    """With the same names and shapes of weights, so that both sides begin equal."""
    torch_or_skip()
    for label, case in {**ladder.CASES, **ladder.OTHERS}.items():
        if case.arguments.get("image_size", 32) > 32 or case.model == "resnet50":
            continue  # the same network as with small images, but slow to draw
        model = ml.models.create(case.model, **case.arguments)
        module = importlib.import_module(twins(model))
        module.load(module.twin(case.model, case.complete()), model)
        assert label.startswith(case.model)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "more", "precision"), [("bert", {"head": "masked"}, "bf16"), ("gpt", {}, "float32")])
def test_networks_of_tokens_climb_all_rungs(device, one_thread, model, more, precision):
    case = Case(model, {"preset": "tiny", "layers": 1, "dropout": 0.0, **more}, 2)
    run = first_run(case, PRECISIONS[precision], device, replace(ALONE, torch_on="cpu"))
    assert passed(run), run
    assert list(run["step_ms"]) == [*PLAIN, *FUSED, "B0 eager", "B1 tuned"]
    assert set(run["left_out"]) == {"B2 graph"}, "it needs a GPU"


@pytest.mark.parametrize(("name", "more"), [("bert", {"head": "masked"}), ("gpt", {})])
def test_a_twin_of_tokens_stays_on_the_device_of_its_tokens(name, more):
    torch = torch_or_skip()
    import torch_language

    complete = {**ml.models.arguments(name), **ml.models.preset_arguments(name, "tiny"), **more}
    network = torch_language.twin(name, complete).to("meta")
    made = []

    class Devices(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            made.extend([found.device.type] if isinstance(found, torch.Tensor) else [])
            return found

    with Devices():
        network(torch.ones((2, 16), dtype=torch.int64, device="meta"))
    assert set(made) == {"meta"}


@pytest.mark.slow
def test_a_compiler_is_timed_beside_what_stands_for_minidl(device, one_thread, monkeypatch):
    modes, costs = [], []
    monkeypatch.setattr(Theirs, "compiled", lambda self, mode: modes.append((mode, self.format)) or self.eager(True))
    case, how = Case("lenet", {}, 2), replace(ALONE, torch_on="cpu",
                                              costs=lambda *graph: costs.append(graph) or ml.CostModel.analytic())
    first = first_run(case, TF32, device, replace(how, torch_on=None, rungs=("E1 in_order", "E2 multi_region")))
    assert len(costs) == 1
    first["about"]["B1 tuned"] = {"memory_format": "channels_last"}
    run = compiled_run("B4 max-autotune", first, case, TF32, device, how)
    assert modes == [("max-autotune", torch_or_skip().channels_last)]
    assert list(run["step_ms"]) == ["E2 multi_region", "B4 max-autotune"]
    assert list(run["ratios"]) == ["B4 max-autotune / E2 multi_region"]
    assert len(costs) == 1, "it is planned once"
    with pytest.raises(ImportError, match="apex is not installed"):
        compiled_run("B5 torchsched", first, case, TF32, device, how)
    assert (compiled_run("B5 torchsched", first, case, TF32, device, ALONE)
            == {"left_out": {"B5 torchsched": "not asked for"}})


def test_the_pairs_that_share_most_time_are_measured_first():
    graph = planned(("1F0", "x", "a"), ("2F0", "a", "b"), ("2W0", "a b", "c"), ("1W0", "x b", "d"))
    cost = ml.CostModel(tasks={"1F0": 4.0, "2F0": 3.0, "2W0": 5.0, "1W0": 1.0})
    groups = {"1F0": "f", "2F0": "f", "2W0": "long", "1W0": "short"}
    assert (longest(graph, cost, groups, [("f", "short"), ("f", "long"), ("none", "long")])
            == [("f", "long"), ("f", "short"), ("none", "long")])


@pytest.mark.parametrize("wrong", [{"equal_bits": False}, {"finite": False}, {"fused_agrees": False},
                                   {"losses": {"agrees": False}}])
def test_each_check_counts(wrong):
    assert passed(run_with())
    assert not passed(run_with(**wrong))


# -------------------------------------------------------------------------------------------- many networks, one record
class Runs:
    """In place of what measures: notes what is asked for, and gives runs without times of their own."""

    def __init__(self, monkeypatch: Any, seconds: float = 0.0) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.broken: set[tuple[str, ...]] = set()
        self.seconds = seconds
        monkeypatch.setattr(ladder, "first_run",
                            lambda case, precision, device, how, keep: self.run(case, precision.name, "first"))
        monkeypatch.setattr(ladder, "compiled_run",
                            lambda name, first, case, precision, device, how: self.run(case, precision.name, name))
        monkeypatch.setattr(ladder, "give_back", lambda device: None)
        monkeypatch.setattr(ladder, "run_text", lambda label, run: label)

    def run(self, *asked: str) -> dict[str, Any]:
        self.asked.append(asked)
        if asked in self.broken:
            raise RuntimeError("out of\nmemory")
        return {**run_with(), "minidl": "E3 in_order", "step_ms": {},
                "ratios": {"a / b": {"median": 2.0 ** len(self.asked)}}}


def here(names: Any) -> Any:
    return ladder.Here({name: name for name in names}, PRECISIONS, None, None)


def climbing(path: Any, names: Any, runs: Any = ("first",), precisions: Any = (TF32,), about: Any = None,
             resume: bool = True) -> Any:
    """The climb of networks that are only names."""
    return ladder.Climb({name: name for name in names}, [*precisions], about or {"sources": "s"}, str(path),
                        resume=resume, runs=runs)


def test_a_record_is_gone_on_with_and_a_failure_is_one_networks_own(tmp_path, monkeypatch):
    path, runs, names = str(tmp_path / "record.json"), Runs(monkeypatch), ("one", "two", "three")
    runs.broken = {("two", "tf32", "first")}

    def again(sources: str = "s", budget: float = float("inf"), precisions: Any = (TF32,),
              resume: bool = True) -> dict[str, Any]:
        runs.asked.clear()
        about = {"sources": sources, "commit": "c", "date": "d"}
        made: dict[str, Any] = climbing(path, names, ("first", COMPILED[0]), precisions, about,
                                        resume)(here(names), budget)
        assert made == {k: v for k, v in json.loads(Path(path).read_text()).items() if k != "name"}
        return made

    record = again(resume=False)
    of = record["networks"]["tf32"]
    assert of["two"]["first"] == {"sources": "s", "commit": "c", "date": "d", "seconds": 0.0,
                                  "left_out": {"first": "RuntimeError: out of memory"}}
    assert of["two"][COMPILED[0]]["left_out"] == {COMPILED[0]: "what stands for minidl has no times yet"}
    assert of["one"][COMPILED[1]]["left_out"] == {COMPILED[1]: "not asked for"}
    assert not record["passed"]
    assert runs.asked == [(name, "tf32", "first") for name in names] + [(name, "tf32", COMPILED[0])
                                                                        for name in ("one", "three")]
    assert record["summary"]["tf32"]["a / b"] == {"geometric_mean": 4.0, "worst": 2.0, "networks": 2}
    runs.broken = set()
    assert again()["passed"]
    assert runs.asked == [("two", "tf32", "first"), ("two", "tf32", COMPILED[0])], "what is missing"
    assert again()["complete"]
    assert runs.asked == [], "nothing is"
    record = again("t", precisions=(TF32, PRECISIONS["bf16"]))
    assert [asked[1] for asked in runs.asked] == ["bf16"] * 6 + ["tf32"] * 6, (
        "what was measured of other sources comes last")
    again("u", budget=0)
    assert runs.asked == []
    runs.broken, names = {("four", "tf32", "first")}, ("four",)
    assert not again("t")["passed"]
    names = ("one",)
    assert again("t")["passed"], "of the networks that were asked for"


FAULTS = """
import json, os, sys, time
from pathlib import Path
label, folder = sys.argv[3], Path(sys.argv[6])
good = {"correct": {"equal_bits": True, "finite": True}, "left_out": {}, "minidl": "E3 in_order", "step_ms": {},
        "ratios": {"a / b": {"median": 2.0}}}

def keep(found):
    (folder / "new").write_text(json.dumps(found))
    os.replace(folder / "new", folder / "run.json")

if label == "spoils":  # as after an error that every later call of its CUDA context repeats
    keep(good)
    sys.exit("cudaErrorIllegalAddress: an illegal memory access was encountered")
if label == "dies":
    keep({**good, "step_ms": {}})
    os.kill(os.getpid(), 9)
if label == "hangs":
    time.sleep(3600)
keep(good)
"""


def test_a_run_that_hangs_dies_or_spoils_its_gpu_harms_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "run_text", lambda label, run: label)
    monkeypatch.setattr(processes, "GRACE", 0.2)
    monkeypatch.setattr(ladder, "POLL", 0.05)
    (tmp_path / "faults.py").write_text(FAULTS)
    apart = ladder.Apart([sys.executable, str(tmp_path / "faults.py")])
    names = ("hangs", "dies", "spoils", "works")
    made = climbing(tmp_path / "record.json", names)
    record = made(lambda job, first, seconds, keep: apart(job, first, 0.3 if job.label == "hangs" else PATIENCE, keep))
    found = {name: record["networks"]["tf32"][name]["first"] for name in names}
    assert found["hangs"]["left_out"] == {"first": "it took more than 0 s"}
    assert found["dies"]["stopped"] == "its process ended with -9"
    assert "step_ms" in found["dies"], "its results so far stay"
    assert "illegal memory access" in found["spoils"]["left_out"]["first"]
    assert "stopped" not in found["works"]
    assert [job.label for job in made.jobs()] == ["hangs", "dies", "spoils"], "they are tried again, the others are not"
    assert not record["passed"]


@pytest.mark.wide
def test_results_so_far_are_in_the_record(device, tmp_path, monkeypatch):
    """After the checks, and while rungs are timed: whenever the ladder is killed, they stay."""
    monkeypatch.setattr(ladder_rungs, "SEEN", 0.0)
    kept: list[Any] = []
    first_run(Case("lenet", {}, 2), TF32, device, replace(ALONE, rungs=("E0a in_order", "E1 in_order")),
              lambda found: kept.append(json.loads(json.dumps(found))))
    assert kept[0]["correct"]["equal_bits"]
    assert "step_ms" not in kept[0]
    assert len(kept) == 1 + SHORT.groups
    for found in kept[1:]:
        assert set(found["step_ms"]) == {"E0a in_order", "E1 in_order"}
        assert set(found["resident_ms"]) == {"E1 in_order"}
        assert run_text("lenet", found)


def test_a_resident_step_is_a_graph_without_uploads_on_a_batch_that_stays(device, monkeypatch):
    ours, made = Ours(Case("lenet", {}, 2), TF32, device), []
    ours.batches = ours.batches[:1]
    captured = cuda_devices.Cuda.captured

    def seen(self: Any, work: Any, trace: bool = False) -> Any:
        made.append(captured(self, work, trace))
        return made[-1]

    monkeypatch.setattr(cuda_devices.Cuda, "captured", seen)
    asked: list[Any] = []
    plans, predicted = ours.plans(["E1 in_order"], lambda *given: asked.append(given))
    assert (list(plans), predicted, asked) == (["in_order"], {}, []), "in order alone needs no costs"
    rung, model = ours.rung("E1 in_order", plans["in_order"])
    rung.resident()  # the first of three steps brings the batch
    rung.resident()
    sizes = [{len(device.driver.dependencies(graph)[0]) for graph in lanes.graphs} for lanes in made]
    assert sizes[2] == {size - len(ours.batches[0]) for size in sizes[0]}
    again, other = ours.rung("E1 in_order", plans["in_order"])
    for _ in range(3):
        again.step()
    assert all((a.numpy() == b.numpy()).all() for a, b in zip(model.parameters(), other.parameters(), strict=True))
    rung.close()
    again.close()


@pytest.mark.slow
def test_no_prediction_uses_a_step_of_its_own_schedule(device, monkeypatch):
    """The strength of contention comes from multi_stream's step on the device, without the host's part, and predicts
    multi_region; multi_stream itself is predicted as if it had not run."""
    ours, timed = Ours(Case("lenet", {}, 2), TF32, device), []
    monkeypatch.setattr(Ours, "_resident", lambda self, *given: "resident")

    def predicted(slower: float) -> dict[str, float]:
        def seconds(clock: Any, step: Any, times: int) -> float:
            timed.append(step)
            return slower * whole / 1e3

        monkeypatch.setattr(ladder_rungs.DeviceClock, "seconds", seconds)
        return ours.plans(["E2 multi_stream", "E2 multi_region"], contended)[1]

    def contended(graph: Any, device: Any) -> Any:
        cost = ml.CostModel.analytic()
        groups, _ = schedulers.profile_groups(graph, cost)
        return replace(cost, corun=CoRun(groups, needs=dict.fromkeys(groups.values(), (0.7, 0.6))))

    whole = 1.0
    whole = predicted(1.0)["multi_stream"]
    same, slow = predicted(1.0), predicted(1.1)
    assert same["multi_stream"] == slow["multi_stream"] == whole, "not fitted to itself"
    assert slow["multi_region"] > same["multi_region"]
    assert set(timed) == {"resident"}


def test_no_run_is_begun_that_would_not_fit(tmp_path, monkeypatch):
    runs, names, clock = Runs(monkeypatch), ("one", "two"), [0.0]
    monkeypatch.setattr(ladder.time, "perf_counter", lambda: clock[0])
    run, seconds = runs.run, {"first": 70.0, COMPILED[0]: 40.0}

    def slow(*asked: str) -> dict[str, Any]:
        clock[0] += seconds[asked[-1]]
        return run(*asked)

    runs.run = slow

    def climb(budget: float) -> Any:
        return climbing(tmp_path / "record.json", names, ("first", COMPILED[0]),
                        [TF32, PRECISIONS["bf16"]])(here(names), budget)

    record = climb(250)
    assert runs.asked == [("one", "tf32", "first"), ("two", "tf32", "first"),
                          ("one", "bf16", "first")], ("87.5 of 110 seconds for the third")
    assert clock[0] <= 250
    assert record["networks"]["bf16"]["two"]["first"] == {"left_out": {"first": "no time was left"}}
    assert not record["complete"]
    climb(300)
    assert runs.asked[3:] == [("two", "bf16", "first"), ("one", "tf32", COMPILED[0]), ("two", "tf32", COMPILED[0]),
                              ("one", "bf16", COMPILED[0]), ("two", "bf16", COMPILED[0])]


def test_stopped_it_loses_nothing_that_was_finished_and_goes_on_with_the_rest(tmp_path, monkeypatch):
    path, runs, names = tmp_path / "record.json", Runs(monkeypatch), ("one", "two", "three")
    run = runs.run

    def stopped(*asked: str) -> dict[str, Any]:
        if asked[0] == "two":
            raise KeyboardInterrupt
        return run(*asked)

    runs.run = stopped
    with pytest.raises(KeyboardInterrupt):
        climbing(path, names)(here(names))
    before = json.loads(path.read_text())["networks"]["tf32"]
    assert "step_ms" in before["one"]["first"]
    assert before["two"]["first"] == {"begun": True, "left_out": {"first": ladder.BEGUN}}
    assert "first" not in before.get("three", {})
    runs.run, runs.asked = run, []
    record = climbing(path, names)(here(names))
    assert [asked[0] for asked in runs.asked] == ["three", "two"], "what had been begun may be what took too long"
    assert record["networks"]["tf32"]["one"] == before["one"], "it is not measured again"
    assert list(record["networks"]["tf32"]) == [*names]
    assert record["passed"]


# -------------------------------------------------------------------------------------------------------------- targets
def network(tuned: float, graph: float, compiled: float | None, ooo: float, launch: float = 10.0) -> dict[str, Any]:
    """A made-up network: how many times longer rungs take."""

    def spread(value: float) -> dict[str, Any]:
        return {"median": value, "p10": value, "p90": value, "n": 10}

    mine = "E3 multi_region"
    ratios = {f"B1 tuned / {mine}": spread(tuned), f"B2 graph / {mine}": spread(graph),
              "E1 in_order / E2 multi_region": spread(ooo), "E0a in_order / E0b multi_region": spread(ooo / 2)}
    entry: dict[str, Any] = {"first": {"minidl": mine, "ratios": ratios,
                                       "step_ms": {"E1 in_order": spread(10.0), "E3 in_order": spread(10.0)},
                                       "predicted_ms": {"E1 in_order": 9.0, "E3 in_order": 10.5},
                                       "host_us": {mine: spread(50.0)},
                                       "launch_us": {"E3 in_order": spread(launch), "E1 in_order": spread(99.0)}}}
    if compiled:
        for name in COMPILED[:2]:
            entry[name] = {"minidl": mine, "step_ms": {}, "ratios": {f"{name} / {mine}": spread(compiled)}}
    return entry


def test_targets_are_told_from_the_record():
    networks = {"a": network(8.0, 1.5, 1.25, 1.3, 8.0), "b": network(2.0, 1.6, 1.8, 1.0, 12.0)}
    tuned, graphs, captured, not_captured, host, one_stream, out_of_order = ladder_record.targets(networks, wanted=2)
    assert tuned["seen"] == {"geometric_mean": 4.0, "worst": 2.0, "networks": 2, "of": 2}
    assert (tuned["target"], tuned["met"]) == (">= 2.5x", True)
    assert graphs["seen"]["worst"] == 1.25
    assert graphs["seen"]["geometric_mean"] == pytest.approx(2**0.5, abs=1e-4)
    assert graphs["seen"]["fastest"] == {"B3 reduce-overhead": 1, "B2 graph": 1}
    assert graphs["met"]
    assert (captured["seen"]["geometric_mean"], captured["met"]) == (pytest.approx(1.3**0.5, abs=1e-4), True)
    assert not_captured["met"] is None
    assert not_captured["seen"]["worst"] == 0.5
    assert host["seen"] == {"launch": 10.0, "worst_launch": 12.0, "step": 50.0, "worst_step": 50.0,
                            "networks": 2, "of": 2}
    assert one_stream["seen"] == {"error": pytest.approx(0.075), "worst_error": pytest.approx(-0.1), "networks": 2,
                                  "of": 2}
    assert (one_stream["met"], out_of_order["seen"]) == (False, None)
    slower = ladder_record.targets({"a": network(2.0, 9.0, 0.9, 1.0), "b": network(2.0, 9.0, 9.0, 1.0)}, wanted=2)
    assert [row["met"] for row in slower][:5] == [False, False, False, None, None], "2.8 on average, and 0.9"


def test_a_target_is_not_met_by_a_part_of_the_networks():
    some = ladder_record.targets({"a": network(8.0, 1.5, 1.5, 1.3)}, wanted=2)
    assert [row["met"] for row in some] == [None] * 7
    uncompiled = ladder_record.targets({"a": network(8.0, 1.5, None, 1.3)}, wanted=1)
    assert [row["met"] for row in uncompiled] == [True, None, True, None, None, False, None]
    assert uncompiled[1]["seen"]["compared_with"] == {"B2 graph": 1, "B3 reduce-overhead": 0, "B4 max-autotune": 0}
    assert [row["seen"] for row in ladder_record.targets({}, wanted=1)] == [None] * 7


@pytest.mark.slow
def test_rungs_of_the_chip_are_compared_with_the_same_without_their_setting(device, monkeypatch):
    """And leave the device as it was."""
    monkeypatch.setattr("minidl.measuring.sms.SIZE", 1 << 12)
    chosen = ladder.rungs_of(["E1", "E3"])
    assert chosen == ["E1 in_order", *FUSED, *CHIP]
    assert ladder.rungs_of(["E1", "E3 in_order", "B2", "B3"]) == ["E1 in_order", "E3 in_order", "B2 graph",
                                                                  "B3 reduce-overhead"], "a whole name is one rung"
    assert ladder.rungs_of(None) == [*PLAIN, *FUSED, *EAGER, *COMPILED]
    run = first_run(TINY["tiny"], TF32, device, replace(ALONE, rungs=chosen))
    assert passed(run), run
    assert list(run["step_ms"]) == chosen
    assert {f"{name.partition(',')[0]} / {name}" for name in CHIP} <= run["ratios"].keys()
    assert not [name for name in run["ratios"] if name.count(",") > 1]
    assert (device.small_products, device.dependent_launch) == (True, False)


def test_rungs_without_a_plain_one_are_refused(call, monkeypatch, capsys):
    monkeypatch.setattr(ladder.ml.device, "get", lambda name: SimpleNamespace(captures=True, name=name))
    assert call(ladder, "--rungs", "E3") == 2
    assert capsys.readouterr().err.startswith("ladder: --rungs must name at least one of E0a in_order")
