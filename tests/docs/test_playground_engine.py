"""The playground's engine, in a real browser and under node: it is ours, verdict by verdict and figure by figure."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pipelines
import pytest
from browser import until
from helpers import PATIENCE, drawn
from playground import NAMES, actions, build, figure, ours, written

from minidl.cli import main
from minidl.core.schedule import Schedule
from minidl.runtime.checking import random_schedule
from minidl.schedulers import pipeline
from minidl.schedulers.pipeline.stages import stage_graph

FIGURES = ("makespan", "max_span", "period", "spans", "peak_activations", "bubble_rate")

THEIRS = """(cases) => cases.map(([csv, ranks, micros, F, O, W, latency]) => {
    const plan = Simulator.read(csv);
    if (Simulator.written(plan) !== csv) return {error: "the CSV does not come back"};
    while (plan.length < ranks) plan.push([]);
    try {
        const {start, end, ...figures} = Simulator.price(Simulator.prove(plan, ranks, micros), {F, O, W, latency});
        return figures;
    } catch (fault) { if (!(fault instanceof Simulator.Fault)) throw fault;
                      return {error: fault.message, tasks: fault.tasks, why: fault.why}; }
})"""


def legal(rng: random.Random) -> tuple[Schedule, int, int]:
    """A random order that the edges allow, of a random placement: O and W apart, joined, or some of each."""
    ranks, micro_batches, chunks = rng.randint(1, 4), rng.randint(1, 5), rng.choice([1, 1, 2, 3])
    table = rng.sample([stage % ranks for stage in range(ranks * chunks)], ranks * chunks)
    stages = ranks * chunks
    fused = np.array([[rng.random() < 0.3 for _ in range(micro_batches)] for _ in range(stages)])
    graph = stage_graph(stages, micro_batches, rng.choice([fused, True, False]))
    rows: list[list[str]] = [[] for _ in range(ranks)]
    for task in random_schedule(graph, 1, np.random.default_rng(rng.randrange(2**32))).ids(graph).tolist():
        rows[table[int(graph.unit[task])]].append(graph.name(task))
    return written([[[name] for name in row] for row in rows]), ranks, micro_batches


def edited(rng: random.Random, schedule: Schedule) -> Schedule:
    """The plan after one or two moves, swaps, losses, doublings or pairings."""
    rows = actions(schedule)
    for _ in range(rng.randint(1, 2)):
        row = rng.choice([r for r in rows if r])
        at = rng.randrange(len(row))
        match rng.choice(["move", "move", "stray", "swap", "lose", "double", "pair", "rename"]):
            case "move":
                row.insert(rng.randrange(len(row)), row.pop(at))
            case "stray":
                rng.choice(rows).append(row.pop(at))
            case "swap":
                other = rng.randrange(len(row))
                row[at], row[other] = row[other], row[at]
            case "lose":
                row.pop(at)
            case "double":
                row.insert(rng.randrange(len(row)), list(row[at]))
            case "pair" if at and len(row[at]) == len(row[at - 1]) == 1:
                row[at - 1 : at + 1] = [row[at - 1] + row[at]]
            case "rename":
                row[at] = [re.sub(r"[FOWB]", lambda found: rng.choice("FOWB"), row[at][0])]
        if not any(rows):
            return schedule
    while rows and not rows[-1]:
        rows.pop()
    return written(rows)


def random_plans(count: int, seed: int = 0) -> list[tuple[Schedule, int, int]]:
    """Plans of policies and random orders, half each; a third of them are edited, and then mostly not valid."""
    rng, found = random.Random(seed), list[tuple[Schedule, int, int]]()
    while len(found) < count:
        if rng.random() < 0.5:
            ranks, micro_batches = rng.choice([2, 4]), rng.choice([2, 4, 8])
            name = rng.choice([n for n in NAMES if n not in ("zb_v", "v_half", "v_min", "zb_auto")])  # these are slow
            try:
                plan = pipelines.plan(name, ranks, micro_batches)
            except pipeline.PipelineError:
                continue
            schedule = replace(plan.schedule, slots=None)
        else:
            schedule, ranks, micro_batches = legal(rng)
        found.append((edited(rng, schedule) if rng.random() < 0.33 else schedule, ranks, micro_batches))
    return found


@pytest.mark.hypothesis
def test_two_thousand_random_plans_have_equal_verdicts_and_figures(still):
    """In the browser's engine; a tenth of them in the default run."""
    rng, count = random.Random(1), drawn(2000)
    cases = [(*plan, (rng.choice([1.0, 0.7, 2.5]), rng.choice([1.0, 1.3]), rng.choice([1.0, 0.4]),
                      rng.choice([0.0, 0.0, 0.25, 3.0]))) for plan in random_plans(count)]
    found = still.evaluate(THEIRS, [[schedule.to_csv(), ranks, micros, *times]
                                  for schedule, ranks, micros, times in cases])
    verdicts: list[str] = []
    for theirs, (schedule, ranks, micros, times) in zip(found, cases, strict=True):
        mine = ours(schedule, ranks, micros, times)
        where = schedule.to_csv()
        if "error" in mine:
            assert theirs.get("error") == mine["error"], where
            assert sorted(theirs["tasks"]) == sorted(mine["tasks"]), where
            assert theirs["why"] or "out of range" in mine["error"] or "does not exist" in mine["error"], theirs
            verdicts.append(re.sub(r"\d+\w\d+|\d+", "", mine["error"])[:30])
            continue
        assert "error" not in theirs, (theirs, where)
        for name in FIGURES:
            assert theirs[name] == pytest.approx(mine[name], rel=1e-9, abs=1e-9), (name, where)
    assert count / 8 < len(verdicts) < count / 2
    assert len(set(verdicts)) >= 8, "many kinds of faults"


@pytest.mark.may_skip
def test_the_engine_and_the_coach_run_under_node_without_a_page():
    """Random plans have Python's figures; their gaps are the time in which ranks do nothing before their last task."""
    node = shutil.which("node") or pytest.skip("node is not installed")
    cases = random_plans(60, seed=5)
    code = f"""const S = require({str(build.HERE / "simulator.js")!r}), C = require({str(build.HERE / "coach.js")!r});
    const cases = {json.dumps([[schedule.to_csv(), ranks, micros] for schedule, ranks, micros in cases])};
    const found = cases.map(([csv, ranks, m]) => {{
        const plan = S.read(csv);
        while (plan.length < ranks) plan.push([]);
        try {{
            const proved = S.prove(plan, ranks, m), price = S.price(proved, {{F: 1, O: 1.3, W: 0.4, latency: 0.25}});
            const idle = C.gaps(proved, price, 0.25).reduce((sum, gap) => sum + gap.to - gap.from, 0), last = {{}};
            price.end.forEach((end, t) => {{ last[proved.rank[t]] = Math.max(last[proved.rank[t]] || 0, end); }});
            const work = m * 2.7 * ranks, ended = Object.values(last).reduce((a, b) => a + b, 0);
            return {{...price, idle, other: ended - work}};
        }} catch (fault) {{ if (!(fault instanceof S.Fault)) throw fault; return {{error: fault.message}}; }}
    }});
    console.log(JSON.stringify(found));"""
    done = subprocess.run([node, "-e", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    for theirs, (schedule, ranks, micros) in zip(json.loads(done.stdout), cases, strict=True):
        mine = ours(schedule, ranks, micros, (1.0, 1.3, 0.4, 0.25))
        assert theirs.get("error") == mine.get("error")
        for name in ("makespan", "period", "bubble_rate") if "error" not in mine else ():
            assert theirs[name] == pytest.approx(mine[name], rel=1e-9, abs=1e-9), name
        if "error" not in mine:
            assert theirs["idle"] == pytest.approx(theirs["other"], abs=1e-9)


ORDERED = """(cases) => cases.map(([name, ranks, micros, chunks, F, O, W, latency]) => {
    const stored = (of) => playground.planOf(playground.plans[of][[ranks, micros, chunks]]);
    const problem = {ranks, micros, chunks, times: {F, O, W, latency}, stored};
    return Policies.orders[name](problem).map((actions) => actions.map((tasks) => tasks.join(";")).join(" ")).join("|");
})"""


def some_times(rng: random.Random) -> tuple[float, float, float, float]:
    """Of F, O, W and a link: often equal or simple, so that much starts at the same time."""
    each = [rng.choice([1.0, 1.0, 0.5, 2.0, 3.0, 0.7, round(rng.uniform(0.1, 4), 2)]) for _ in range(3)]
    return (*each, rng.choice([0.0, 0.0, 0.25, 1.0, round(rng.uniform(0, 3), 2)]))


def ordered(name: str, ranks: int, micros: int, chunks: int, times: tuple[float, ...]) -> str:
    placement = pipelines.place(name, ranks, chunks)
    return build.row(pipelines.plan(name, ranks, micros, pipeline.costs(placement, *times), chunks).schedule)


def test_orders_that_follow_the_times_are_minidls(still):
    """In the browser's engine: the whole order, task by task."""
    rng, found = random.Random(2), sorted(still.evaluate("Object.keys(Policies.orders)"))
    cases = []
    for name in found:
        keys = [k for k in still.evaluate("(name) => Object.keys(playground.plans[name])", name)
                if (numbers := [*map(int, k.split(","))])[0] <= 4 and numbers[1] <= 8]
        cases += [(name, *map(int, rng.choice(keys).split(",")), *some_times(rng)) for _ in range(24)]
    theirs, changed = still.evaluate(ORDERED, cases), 0
    for (name, ranks, micros, chunks, *times), order in zip(cases, theirs, strict=True):
        assert order == ordered(name, ranks, micros, chunks, tuple(times)), (name, ranks, micros, chunks, times)
        changed += order != build.order(name, ranks, micros, chunks)
    assert changed > len(cases) / 3, "times matter"


def test_every_other_order_is_the_same_for_all_times_or_is_said_to_be_searched(still):
    rng, follow = random.Random(3), still.evaluate("Object.keys(Policies.orders)")
    assert still.evaluate("DATA.searched") == list(build.SEARCHED)
    for name in set(NAMES) - {*follow, *build.SEARCHED}:
        for _ in range(6):
            key = rng.choice([k for k in still.evaluate("(name) => Object.keys(playground.plans[name])", name)
                              if max(map(int, k.split(","))) <= 8])
            numbers = [*map(int, key.split(","))]
            assert ordered(name, *numbers, some_times(rng)) == build.order(name, *numbers), (name, key)


@pytest.mark.slow
def test_the_page_orders_for_the_times_and_says_for_which(tab, tmp_path, capsys):
    for name in ("fast_forward_greedy", "modulo_greedy"):
        tab.select_option("#policy", name)
        tab.fill("#W", "2.5")
        tab.fill("#latency", "0.5")
        chunks = int(tab.input_value("#chunks"))
        assert "The order is the one for these times." in tab.inner_text("#origin")
        made = pipelines.plan(name, 4, 8, pipeline.costs(pipelines.place(name, 4, chunks), 1, 1, 2.5, 0.5), chunks)
        assert float(figure(tab, "makespan").split()[0]) == pytest.approx(pipeline.price(made).makespan, abs=1e-4)
    tab.select_option("#policy", "gpipe")
    assert "The order is the same for all times." in tab.inner_text("#origin")
    tab.select_option("#policy", "zb_v")
    said = tab.inner_text("#origin")
    assert "comes from a search for F = O = W = 1 without latency" in said
    command = tab.inner_text("#origin code").replace("plan.csv", str(tmp_path / "plan.csv")).split()
    assert main(command[1:]) == 0
    price = float(re.search(r"makespan +([\d.]+)", capsys.readouterr().out)[1])
    tab.set_input_files("#file", tmp_path / "plan.csv")
    until(tab, "document.getElementById('origin').textContent === 'A plan of your own.'")
    assert float(figure(tab, "makespan")) == pytest.approx(price, abs=1e-4)
    tab.fill("#W", "1")  # a plan of one's own keeps its order
    assert float(figure(tab, "makespan").split()[0]) < price


def test_files_that_are_no_plans_are_refused(tab):
    for text in ("", "rank,lane\n", "rank,lane,task\n0,main\n", "rank,lane,task\n0,main,0Z0\n",
                 "rank,lane,task\n0,main,0SF0>1\n", "rank,lane,task\n0,main,0F0\n0,sub,0O0\n"):
        said = tab.evaluate("(text) => playground.imported(text) || document.getElementById('verdict').textContent",
                            text)
        assert said.startswith("this file cannot be read: "), text


@pytest.mark.few(1)
@pytest.mark.parametrize("flags", [["--scheduler", "pipedream"], ["--order", "hint"]])
def test_the_notes_of_a_saved_plan_are_no_tasks(flags, still, tmp_path):
    path = tmp_path / "plan.csv"
    assert main(["plan", "--ranks", "2", "--micro-batches", "4", *flags, "--save", str(path), "--json"]) == 0
    text = path.read_text()
    assert text.startswith("# ")
    plain = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    first, second = (still.evaluate("(csv) => Simulator.read(csv)", each) for each in (text, plain))
    assert first == second
    wrong = text.replace("0F1", "0Z1")
    said = still.evaluate("(csv) => { try { Simulator.read(csv) } catch (fault) { return fault.message } }", wrong)
    assert said.startswith(f"line {1 + wrong.splitlines().index(next(x for x in wrong.splitlines() if '0Z1' in x))}: ")


def test_uneven_stages_cost_as_in_python(still):
    rng = random.Random(4)
    for _ in range(20):
        name, factors = rng.choice(["zb_h1", "gpipe", "interleaved"]), None
        plan = pipelines.plan(name, 4, 8)
        factors = [rng.choice([0.5, 1.0, 2.0, 3.0]) for _ in range(plan.placement.stages)]
        times = some_times(rng)
        each = ([t * plan.placement.share * f for f in factors] for t in times[:3])
        made = pipelines.read_plan(replace(plan.schedule, slots=None), 4, 8)
        wanted = pipeline.price(made, pipeline.costs(made.placement, *each, times[3])).as_json()
        found = still.evaluate("""([csv, F, O, W, latency, stages]) => Simulator.price(
            Simulator.prove(Simulator.read(csv), 4, 8), {F, O, W, latency, stages})""",
                             [plan.schedule.to_csv(), *times, factors])
        for what in FIGURES:
            assert found[what] == pytest.approx(wanted[what], rel=1e-9, abs=1e-9), (name, factors, times)
