"""A plan that was saved, and perhaps edited, is a scheduler too: it is proved, priced, run and compared like any."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pipelines
import pytest
from command_line import reported, run_json
from helpers import PATIENCE, deadline

from minidl import schedulers
from minidl.cli import main, problem
from minidl.kernels import vectors

NETWORK = ["--model", "mlp", "--model-arg", "layers=6", "--model-arg", "hidden=32", "--batch-size", "32"]
RUN = [*NETWORK, "--steps", "3", "--costs", "analytic"]
PIPELINE = ["--parallel", "pipeline", "--ranks", "2", "--micro-batches", "4"]


def refused(capsys, *flags: str) -> str:
    with deadline(PATIENCE):
        assert main([*flags]) == 2
    return capsys.readouterr().err


@pytest.fixture(scope="module", autouse=True)
def _published_orders_are_planned_once():
    """On the same numbers, for all commands that price them beside another one, and with little effort."""
    plan, made = problem.Problem.plan, {}

    def planned(asked):
        if asked.recorded is not None or asked.scheduler.name not in schedulers.names("pipeline"):
            return plan(asked)
        machine = replace(asked.machine, collective=None)
        key = asked.scheduler.name, str((asked.step, asked.cost, machine, asked.options))
        if key not in made:
            made[key] = plan(asked)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        pipelines.little_effort(patch)
        patch.setattr(problem.Problem, "plan", planned)
        yield


@pytest.fixture
def saved(tmp_path, capsys):
    """Saves a plan; returns its path."""
    def save(*flags: str) -> str:
        path = str(tmp_path / "plan.csv")
        reported(capsys, "plan", *NETWORK, *flags, "--costs", "analytic", "--save", path)
        return path

    return save


def test_an_edited_plan_of_one_device_runs_with_the_same_bits(saved, capsys):
    path = saved("--scheduler", "multi_stream")
    lines = Path(path).read_text().splitlines()
    weight = next(i for i, line in enumerate(lines) if line.startswith("0,sub,") and "W" in line)
    moved = lines.pop(weight).replace("0,sub,", "0,main,")
    Path(path).write_text("\n".join([lines[0], *(x for x in lines[1:] if x.startswith("0,main,")), moved,
                                     *(x for x in lines[1:] if not x.startswith("0,main,"))]) + "\n")
    alone = reported(capsys, "train", *RUN)
    assert reported(capsys, "train", *RUN, "--scheduler", path)["params_sha256"] == alone["params_sha256"]
    arms = reported(capsys, "compare", *RUN, "--schedulers", f"in_order,{path}")
    assert arms["bit_identical"]
    assert [arm["scheduler"] for arm in arms["arms"]] == ["in_order", path]
    assert reported(capsys, "simulate", *NETWORK, "--scheduler", path, "--costs", "analytic")


MLP = ["--model", "mlp", "--batch-size", "16"]  # whose layers differ: `joint` cuts it as no rule from the flags says
GPT = ["--model", "gpt", "--model-arg", "layers=2", "--model-arg", "heads=2", "--model-arg", "width=16", "--model-arg",
       "length=16", "--batch-size", "4", "--data", "short.txt"]
ADAM = [*PIPELINE, "--optimizer", "adam"]
EIGHT, TWO, DATA = [*PIPELINE[:-1], "8"], [*PIPELINE[:-1], "2"], ["--parallel", "data", "--ranks", "2"]
#: flags of all commands, and flags of the plan
SAVED = {f"{i} {told.split()[0]}": ([*network, *ranks], ["--scheduler", *told.split()])
         for i, (network, ranks, told) in enumerate([
    (NETWORK, [], "multi_stream"), (NETWORK, PIPELINE, "zb_h1"), (NETWORK, ADAM, "interleaved"),
    (NETWORK, ADAM, "hanayo"), (NETWORK, ADAM, "zb_v"), (NETWORK, PIPELINE, "modulo_greedy"),
    (NETWORK, PIPELINE, "dualpipe_v"), (NETWORK, [*PIPELINE, "--clip", "0.5"], "gpipe"),
    (GPT, [*TWO, "--replicas", "2", "--clip", "1"], "zb_h1"),
    (MLP, PIPELINE, "joint"), (MLP, [*PIPELINE, "--replicas", "2"], "joint"),
    (MLP, [*PIPELINE, "--replicas", "2"], "one_f_one_b --scheduler-arg part_bytes=2000"),
    (NETWORK, EIGHT, "pipedream_2bw --scheduler-arg mini_batches=2"),
    (NETWORK, EIGHT, "layerpipe2 --chunks 2 --scheduler-arg history=average"),
    (NETWORK, EIGHT, "pipedream --scheduler-arg history=predicted"),
    (NETWORK, EIGHT, "adl --scheduler-arg mini_batches=2"), (NETWORK, [*EIGHT, "--replicas", "2"], "layerpipe"),
    (NETWORK, [*EIGHT, "--replicas", "2"], "pipedream"), (NETWORK, EIGHT, "paci"), (NETWORK, EIGHT, "layerpipe"),
    (NETWORK, EIGHT, "chimera"), (GPT, TWO, "seq1f1b --scheduler-arg slices=4"),
    (NETWORK, DATA, "priority --scheduler-arg part_bytes=1000"), (NETWORK, DATA, "reverse_first_k --scheduler-arg k=2"),
    (NETWORK, DATA, "buckets --buckets 2"), (NETWORK, DATA, "dear"), (NETWORK, DATA, "priority --split 3"),
    (NETWORK, PIPELINE, "zb_h1 --split 2"), (NETWORK, [*ADAM, "--replicas", "2"], "interleaved --shard 1"),
    (NETWORK, [*ADAM, "--replicas", "2"], "dualpipe_v --shard 3,prefetch=1,keep=none")])}
FIGURES = {"tasks", "waits", "peak_bytes", "peak_activations", "predicted_step_ms"}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SAVED)
def test_a_saved_plan_is_checked_and_runs_with_the_same_bits(name, tmp_path, capsys, monkeypatch):
    """And has the figures that it was planned with. It says its cut, its parts, how ranks sum, and the policy whose
    weight versions or slices no order shows."""
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("a short text, so that it is soon evaluated\n" * 20)
    both, flags = SAVED[name]
    told = [*both, "--costs", "analytic"]
    planned = reported(capsys, "plan", *told, *flags, "--save", "plan.csv")
    checked = reported(capsys, "check", "plan.csv", *told)
    assert checked["valid"]
    for figure in FIGURES & planned.keys():
        assert checked[figure] == planned[figure], figure
    first, again = (reported(capsys, "train", *told, *how, "--steps", "3")
                    for how in (flags, ["--scheduler", "plan.csv"]))
    assert again["params_sha256"] == first["params_sha256"]


def test_what_a_file_says_of_sums_and_clips_must_make_sense(saved, capsys):
    path = saved(*PIPELINE, "--scheduler", "gpipe", "--clip", "0.5")
    assert "does not belong here" in refused(capsys, "train", *RUN, *PIPELINE, "--scheduler", path)
    lines = Path(saved(*DATA, "--scheduler", "buckets", "--buckets", "2")).read_text().splitlines()
    assert lines[0].startswith("# sums over ranks: {")
    for wrong in ('{"groups": 3}', "[1]", '{"part_bytes": 0}', '{"more": 1}', "{"):
        Path(path).write_text("\n".join([f"# sums over ranks: {wrong}", *lines[1:]]) + "\n")
        assert "sums over ranks" in refused(capsys, "train", *RUN, *DATA, "--scheduler", path)


def test_a_plan_that_cannot_run_is_refused_before_it_does(saved, capsys):
    path = saved("--scheduler", "in_order")
    lines = Path(path).read_text().splitlines()
    lines[1], lines[2] = lines[2], lines[1]
    Path(path).write_text("\n".join(lines) + "\n")
    first = refused(capsys, "train", *RUN, "--scheduler", path).splitlines()[0]
    assert "1F0" in first
    Path(path).write_text("\n".join(lines[:-1]) + "\n")
    assert "missing" in refused(capsys, "train", *RUN, "--scheduler", path)
    assert "no such file" in refused(capsys, "train", *RUN, "--scheduler", "nowhere.csv").lower()
    assert "takes no argument" in refused(capsys, "train", *RUN, "--scheduler", path, "--scheduler-arg", "k=1")


@pytest.mark.few(2)
@pytest.mark.parametrize(("flag", "value"), [("--recompute", "all"), ("--recompute", "1,3"), ("--split", "2"),
                                             ("--split", "auto")])
def test_what_a_plan_says_itself_is_no_choice(flag, value, saved, capsys):
    """It was ignored without a word. Beside a policy it is for the policy, and in parts bits may differ; a value that
    asks for nothing may stay."""
    path = saved("--scheduler", "multi_stream")
    for command in (["train", *RUN, "--scheduler", path], ["compare", *RUN, "--schedulers", f"{path},{path}"]):
        said = refused(capsys, *command, flag, value)
        assert said == f"minidl: {flag} has no effect here; it goes with policies; the plan of a file has its own\n"
    with deadline():
        code, record = run_json(capsys, "compare", *RUN, "--schedulers", f"in_order,{path}", flag, value)
    assert record["arms"]
    assert code == 0 or (flag == "--split" and not vectors.WIDE), record
    assert reported(capsys, "train", *RUN, "--scheduler", path, flag, "none")


def test_a_plan_of_ranks_says_so_where_none_are_asked_for(saved, tmp_path, capsys, monkeypatch):
    """It was said to be the plan of another network."""
    for ranks, kind in ((PIPELINE, "for a pipeline"), (DATA, "for data-parallel ranks")):
        path = saved(*ranks)
        assert refused(capsys, "train", *RUN, "--scheduler", path) == (
            f"minidl: scheduler {path} is {kind}, not for one device; give --parallel {ranks[1]}\n")
    assert reported(capsys, "check", path, *NETWORK, "--costs", "analytic")["valid"], "of one rank"
    path = saved(*PIPELINE)
    assert "the number of ranks is missing; give --ranks P" in refused(capsys, "check", path, *NETWORK)
    assert "number of micro-batches?" in refused(capsys, "check", path, *NETWORK, "--ranks", "2")
    assert "F, O, W, B without --model, none late" in refused(capsys, "simulate", *PIPELINE, "--scheduler", path)


def test_a_plan_with_another_suffix_is_named(saved, capsys):
    path = Path(saved("--scheduler", "in_order"))
    path.rename(path.with_suffix(".txt"))
    said = refused(capsys, "train", *RUN, "--scheduler", str(path.with_suffix(".txt")))
    assert "unknown scheduler" in said
    assert "; the name of a plan's file ends in .csv" in said


def test_the_cut_of_another_network_is_refused(tmp_path, capsys):
    path = str(tmp_path / "plan.csv")
    network = ["--batch-size", "16", *PIPELINE, "--costs", "analytic"]
    reported(capsys, "plan", "--model", "mlp", *network, "--scheduler", "joint", "--save", path)
    error = refused(capsys, "check", path, "--model", "mlp", "--model-arg", "layers=6", *network)
    assert "but the network has" in error
    text = Path(path).read_text()
    Path(path).write_text(text.replace(": 0", ": zero", 1))
    assert "'zero', which is not a number" in refused(capsys, "check", path, "--model", "mlp", *network)


def test_options_of_a_saved_plan_that_cannot_be_read(tmp_path, capsys):
    path = tmp_path / "plan.csv"
    network = [*NETWORK, *PIPELINE, "--costs", "analytic"]
    assert main(["plan", *network, "--scheduler", "pipedream", "--save", str(path)]) == 0
    text = path.read_text()
    for wrong, said in (("{", "it must be an object in JSON"), ('{"unknown": 1}', "unknown"),
                        ('{"mini_batches": 3}', "mini_batches"), ('{"chunks": 7}', "chunk")):
        path.write_text(text.replace('{"chunks": 1}', wrong))
        capsys.readouterr()
        assert said in refused(capsys, "train", *network, "--steps", "1", "--scheduler", str(path))


OWN = """
import numpy as np
from minidl.core.schedule import Lane, Schedule
from minidl.schedulers.pipeline.problem import RankOrder, schedule_of
from minidl.core.tasks import COLLECTIVE, Kind

def bfs(problem):
    m = problem.micro_batches
    return schedule_of([RankOrder([Kind.F] * m + [Kind.B] * m, [rank] * 2 * m, [*range(m)] * 2)
                        for rank in range(problem.ranks)])

def by_record(graph, cost, machine):
    talks = np.isin(graph.kind, [int(k) for k in COLLECTIVE])
    return Schedule.of(graph, {Lane(0): np.flatnonzero(~talks), Lane(0, "comm"): np.flatnonzero(talks)})

def wrong(problem):
    return problem.no_such_thing

def planned(problem):
    return 1, 2

def fewer(problem):
    from dataclasses import replace
    return bfs(replace(problem, micro_batches=problem.micro_batches - 1))

def loose(problem, *rest, size: "Unknown" = 2, **more):
    'All forwards, then all backwards.'
    return bfs(problem)

def failing(problem):
    return bfs(problem)[1:]
"""


def test_a_bare_function_orders_a_pipeline_or_data_parallel_ranks(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    for own, flags in (("own.py:bfs", PIPELINE), ("own.py:by_record", ["--parallel", "data", "--ranks", "2"])):
        alone = reported(capsys, "train", *RUN, *(PIPELINE[-2:] if own == "own.py:bfs" else []))
        made = reported(capsys, "train", *RUN, *flags, "--scheduler", own)
        if own == "own.py:bfs":
            assert made["params_sha256"] == alone["params_sha256"]
    for own, said in (("wrong", "'Problem' object has no attribute 'no_such_thing' (own.py, line 17)"),
                      ("planned", "planned returned a tuple, not a Schedule or an Ordered (own.py, line 19)")):
        assert said in refused(capsys, "plan", *NETWORK, *PIPELINE, "--scheduler", f"own.py:{own}")


TIMES = ["--ranks", "4", "--micro-batches", "8"]


def own_orders(capsys) -> None:
    Path("own.py").write_text(OWN + "from minidl.schedulers.pipeline import Policy\nBFS = Policy(bfs, 'contiguous')\n")
    reported(capsys, "plan", *TIMES, "--scheduler", "own.py:bfs", "--save", "own.csv")


@pytest.mark.parametrize("own", ["own.py:bfs", *(pytest.param(other, marks=pytest.mark.slow)
                                                 for other in ("own.py:BFS", "own.py:loose", "own.csv"))])
def test_an_order_of_ones_own_is_priced_beside_the_published_ones(own, tmp_path, capsys, monkeypatch):
    """On given times, as a function, a Policy or a file; `**more` takes nothing and is no error."""
    monkeypatch.chdir(tmp_path)
    own_orders(capsys)
    wanted = {**reported(capsys, "simulate", *TIMES, "--scheduler", "gpipe")}
    found = reported(capsys, "simulate", *TIMES, "--scheduler", own)
    beside = found.pop("beside")
    assert beside["equals"] == ["gpipe"]
    assert beside["slower"] == found["makespan"] / beside["makespan"] - 1 > 0
    assert main(["simulate", *TIMES, "--scheduler", own]) == 0
    assert not beside["same_placement"], "so that it may be below the bound"
    assert re.search("equals gpipe; 22% above the bound of this cut and placement, 27; (`optimal` 27; )?the fastest "
                     "published one is joint with another cut or placement, 24.75; this takes 33.3% more",
                     capsys.readouterr().out)  # optimal needs OR-tools and 2 s
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.slow
def test_an_order_of_ones_own_is_a_row_of_the_table(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own_orders(capsys)
    for own in ("own.py:bfs", "own.py:BFS", "own.py:loose", "own.csv"):
        rows = reported(capsys, "simulate", *TIMES, "--table", "--scheduler", own)["policies"]
        mine, theirs = (next(row for row in rows if row["scheduler"] == name) for name in (own, "gpipe"))
        assert {**mine, "scheduler": "gpipe"} == theirs


def test_an_order_of_ones_own_fails_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own_orders(capsys)
    for own, said in (("fewer", "fewer orders 7 micro-batches; there are 8"),
                      ("wrong", "'Problem' object has no attribute 'no_such_thing' (own.py, line 17)"),
                      ("failing", "'Schedule' object is not subscriptable (own.py, line 31)"),
                      ("loose --scheduler-arg more=1", "loose takes no argument 'more'; it takes size")):
        error = refused(capsys, "simulate", *TIMES, "--scheduler", *f"own.py:{own}".split())
        assert said in error
        assert len(error.splitlines()) == 1


def test_an_order_of_ones_own_says_how_it_differs(tmp_path, capsys, monkeypatch):
    """From the nearest policy with the same tasks on the same ranks; and nothing of the kind if none has them."""
    monkeypatch.chdir(tmp_path)
    reported(capsys, "plan", *TIMES, "--scheduler", "zb_h1", "--save", "own.csv")
    lines = Path("own.csv").read_text().splitlines()
    at = lines.index("0,main,0O1")
    lines[at - 1], lines[at] = lines[at], lines[at - 1]
    Path("own.csv").write_text("\n".join(lines) + "\n")
    found = reported(capsys, "simulate", *TIMES, "--scheduler", "own.csv")["beside"]
    assert found["nearest"] == {"scheduler": "zb_h1", "tasks": 2, "rank": 0, "here": "0O1", "there": lines[at][7:]}
    assert "differs from zb_h1 in the places of 2 tasks, first on rank 0: 0O1 instead of 0" in found["said"]
    assert (found["equals"], found["bound"]) == ([], 27.0)
    assert found["optimal"] in (27.0, None)  # it needs OR-tools, and 2 s
    Path("own.csv").write_text("\n".join(["rank,lane,task", *(f"{rank},main,{rank}{kind}{i}" for rank in range(4)
                                          for kind in "FOW" for i in range(8))]) + "\n")
    again = reported(capsys, "simulate", *TIMES, "--scheduler", "own.csv")["beside"]
    assert again["equals"] == ["fast_forward_strict"]


def test_each_kind_has_a_usual_policy(capsys):
    simulate = ["simulate", *TIMES]
    assert reported(capsys, *simulate) == reported(capsys, *simulate, "--scheduler", "one_f_one_b")
    for flags, usual in ((PIPELINE, "one_f_one_b"), (["--parallel", "data", "--ranks", "2"], "priority")):
        assert reported(capsys, "train", *RUN, *flags)["scheduler"] == usual


def test_one_scheduler_or_one_network_is_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    assert [s["scheduler"] for s in reported(capsys, "schedulers", "zb_h1")["schedulers"]] == ["zb_h1"]
    own = reported(capsys, "schedulers", "own.py:loose", "--parallel", "pipeline")["schedulers"][0]
    assert own["about"] == "All forwards, then all backwards."
    assert own["arguments"]["size"] == 2
    assert "more" not in own["arguments"]
    assert "unknown scheduler 'zb_h7'; similar names: zb_h" in refused(capsys, "schedulers", "zb_h7")
    assert [m["model"] for m in reported(capsys, "models", "gpt")["models"]] == ["gpt"]
    assert "unknown model 'gptt'" in refused(capsys, "models", "gptt")


def test_torch_s_grid_is_a_plan_of_a_network(tmp_path, capsys):
    """It names no updates; they come last."""
    path = tmp_path / "grid.csv"
    path.write_text("0F0,0F1,0F2,0F3,,0B0,0B1,0B2,0B3\n,1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3\n")
    for more in ([], ["--optimizer", "adam", "--clip", "0.5"]):
        alone = reported(capsys, "train", *RUN, "--micro-batches", "4", *more)
        assert reported(capsys, "train", *RUN, *PIPELINE, *more, "--scheduler",
                      str(path))["params_sha256"] == alone["params_sha256"]
    assert reported(capsys, "check", str(path), *NETWORK, *PIPELINE[2:])["valid"]
    path.write_text("0F0,0F1,0F2,0F3,,0B0,0B1,0B2\n,1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3\n")
    assert "0O3 is missing" in refused(capsys, "train", *RUN, *PIPELINE, "--scheduler", str(path))
