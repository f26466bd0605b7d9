"""docs/playground.html in a real browser: its simulator is ours, verdict by verdict and figure by figure, and the page
holds the policies' plans of today."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pipelines
import pytest
from browser import browser, opened
from helpers import PATIENCE, ROOT, drawn, need

from minidl.cli import main
from minidl.core.schedule import Schedule, ScheduleError
from minidl.passes.sweeps import BACKWARD
from minidl.schedulers import names, pipeline
from minidl.schedulers.ordered import Ordered
from minidl.schedulers.pipeline.optimal import optimal
from minidl.schedulers.pipeline.problem import Problem
from minidl.schedulers.pipeline.stages import stage_graph
from minidl.views.page import Shown

PAGE = ROOT / "docs" / "playground.html"
sys.path.insert(0, str(ROOT / "docs" / "playground"))
build = pytest.importorskip("build", reason="docs/playground is not part of this copy")
sys.path.pop(0)
NAMES = [name for name in pipelines.POLICIES if build.playable(name)]
FIGURES = ("makespan", "max_span", "period", "spans", "peak_activations", "bubble_rate")


@pytest.fixture(scope="module")
def chromium():
    with browser() as running:
        yield running


@pytest.fixture
def tab(chromium):
    with opened(chromium, PAGE, ready="window.playground") as found:
        yield found


# -------------------------------------------------------------------------------------------------------- the simulator
def legal(rng: random.Random) -> tuple[Schedule, int, int]:
    """A random order that the edges allow, of a random placement: O and W apart, joined, or some of each."""
    ranks, micro_batches, chunks = rng.randint(1, 4), rng.randint(1, 5), rng.choice([1, 1, 2, 3])
    table = rng.sample([stage % ranks for stage in range(ranks * chunks)], ranks * chunks)
    stages = ranks * chunks
    fused = np.array([[rng.random() < 0.3 for _ in range(micro_batches)] for _ in range(stages)])
    graph = stage_graph(stages, micro_batches, rng.choice([fused, True, False]))
    rows: list[list[str]] = [[] for _ in range(ranks)]
    missing, ready = np.diff(graph.preds.ptr).copy(), np.flatnonzero(np.diff(graph.preds.ptr) == 0).tolist()
    while ready:
        task = ready.pop(rng.randrange(len(ready)))
        rows[table[int(graph.unit[task])]].append(graph.name(task))
        missing[graph.succs[task]] -= 1
        ready += [int(s) for s in graph.succs[task] if missing[s] == 0]
    return written([[[name] for name in row] for row in rows]), ranks, micro_batches


def written(rows: list[list[list[str]]]) -> Schedule:
    lines = ["rank,lane,task", *(f"{rank},main,{'(' + ';'.join(a) + ')' if len(a) > 1 else a[0]}"
                                 for rank, row in enumerate(rows) for a in row)]
    return Schedule.from_csv("\n".join(lines))


def actions(schedule: Schedule) -> list[list[list[str]]]:
    rows: list[list[list[str]]] = [[] for _ in range(schedule.ranks)]
    for i, lane in enumerate(schedule.lanes):
        rows[lane.rank] = [name.strip("()").split(";") for name in schedule.names(i)]
    return rows


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
    """A third of policies, a third of random orders, a third of both after an edit, most of which are not valid."""
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


def ours(schedule: Schedule, ranks: int, micro_batches: int, times: tuple[float, ...]) -> dict[str, Any]:
    """The verdict of `minidl check` and the figures of `minidl simulate`."""
    try:
        plan = pipelines.read_plan(schedule, ranks, micro_batches)
    except ScheduleError as error:
        return {"error": error.message, "tasks": list(error.tasks)}
    return pipeline.price(plan, pipeline.costs(plan.placement, *times)).as_json()


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


@pytest.mark.hypothesis
def test_two_thousand_random_plans_have_equal_verdicts_and_figures(tab):
    """In the browser's engine; a quarter of them in the default run."""
    rng, count = random.Random(1), drawn(2000)
    cases = [(*plan, (rng.choice([1.0, 0.7, 2.5]), rng.choice([1.0, 1.3]), rng.choice([1.0, 0.4]),
                      rng.choice([0.0, 0.0, 0.25, 3.0]))) for plan in random_plans(count)]
    found = tab.evaluate(THEIRS, [[schedule.to_csv(), ranks, micros, *times]
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


def test_orders_that_follow_the_times_are_minidls(tab):
    """In the browser's engine: the whole order, task by task."""
    rng, found = random.Random(2), sorted(tab.evaluate("Object.keys(Policies.orders)"))
    cases = []
    for name in found:
        keys = [k for k in tab.evaluate("(name) => Object.keys(playground.plans[name])", name)
                if (numbers := [*map(int, k.split(","))])[0] <= 4 and numbers[1] <= 8]
        cases += [(name, *map(int, rng.choice(keys).split(",")), *some_times(rng)) for _ in range(24)]
    theirs, changed = tab.evaluate(ORDERED, cases), 0
    for (name, ranks, micros, chunks, *times), order in zip(cases, theirs, strict=True):
        assert order == ordered(name, ranks, micros, chunks, tuple(times)), (name, ranks, micros, chunks, times)
        changed += order != build.order(name, ranks, micros, chunks)
    assert changed > len(cases) / 3, "times matter"


def test_every_other_order_is_the_same_for_all_times_or_is_said_to_be_searched(tab):
    rng, follow = random.Random(3), tab.evaluate("Object.keys(Policies.orders)")
    assert tab.evaluate("DATA.searched") == list(build.SEARCHED)
    for name in set(NAMES) - {*follow, *build.SEARCHED}:
        for _ in range(6):
            key = rng.choice([k for k in tab.evaluate("(name) => Object.keys(playground.plans[name])", name)
                              if max(map(int, k.split(","))) <= 8])
            numbers = [*map(int, key.split(","))]
            assert ordered(name, *numbers, some_times(rng)) == build.order(name, *numbers), (name, key)


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
    tab.wait_for_function("document.getElementById('origin').textContent === 'A plan of your own.'")
    assert float(figure(tab, "makespan")) == pytest.approx(price, abs=1e-4)
    tab.fill("#W", "1")  # a plan of one's own keeps its order
    assert float(figure(tab, "makespan").split()[0]) < price


@pytest.mark.parametrize("text", ["", "rank,lane\n", "rank,lane,task\n0,main\n", "rank,lane,task\n0,main,0X0\n",
                                  "rank,lane,task\n0,main,0SF0>1\n", "rank,lane,task\n0,main,0F0\n0,sub,0O0\n"])
def test_files_that_are_no_plans_are_refused(text, tab):
    said = tab.evaluate("(text) => playground.imported(text) || document.getElementById('verdict').textContent", text)
    assert said.startswith("this file cannot be read: ")


# ------------------------------------------------------------------------------------------------------------- the page
def test_the_page_holds_the_plans_of_today(tab):
    """A sample of them; all are there. After a change to a policy: python docs/playground/build.py."""
    plans = tab.evaluate("playground.plans")
    assert sorted(plans) == sorted(NAMES)
    rng = random.Random(0)
    for name in NAMES:
        small = [key for key in plans[name] if max(map(int, key.split(","))) <= 8]
        for key in rng.sample(small, min(3, len(small))):
            assert plans[name][key] == build.order(name, *map(int, key.split(","))), (name, key)
    text = PAGE.read_text(encoding="utf-8")
    own = (build.HERE / name for name in (*build.PARTS, "page.css"))
    for part in (*own, build.ASSETS / "page.css"):
        assert part.read_text(encoding="utf-8") in text, f"{part} has changed; build the page again"


def test_the_gallery_shows_every_policy_with_its_figures(tab):
    cards = {c.get_attribute("data-policy"): c.inner_text() for c in tab.locator("#gallery .card").all()}
    assert list(cards) == list(pipelines.POLICIES)
    for entry in build.gallery():
        text = " ".join(cards[entry["name"]].split())
        assert entry["about"].replace("`", "") in text
        if entry["bubble"] is not None:
            assert f"bubble {100 * entry['bubble']:.1f} %, peak {round(entry['peak'], 4):g}" in text


def test_the_gallery_shows_all_other_methods_with_commands_that_run(tab, tmp_path):
    """Each that computes something else than the recorded step. After a change: python docs/playground/build.py."""
    own = {name.partition(",")[0] for name in build.METHODS}
    assert own == {*BACKWARD, *names("none"), *names("data")} - {"exact", *names("none", True), *names("data", True)}
    shown = tab.evaluate("DATA.methods")
    assert shown == build.methods()
    cards = {c.get_attribute("data-policy"): c for c in tab.locator("#methods .card").all()}
    assert list(cards) == list(build.METHODS)
    for entry in shown:
        card, rows = cards[entry["name"]], 1 + max(task[0] for task in entry["tasks"])
        assert entry["about"].replace("`", "") in " ".join(card.inner_text().split())
        assert card.locator("svg rect").count() == rows + len(entry["tasks"])
        command = shlex.split(card.locator("code").last.inner_text())
        assert main([*command[1:], "--svg", str(tmp_path / "picture.svg")]) == 0
        assert (tmp_path / "picture.svg").stat().st_size > 1000


def figure(tab: Any, name: str) -> str:
    return tab.inner_text(f"[data-figure={name}] b")


def middle(tab: Any, task: str) -> tuple[float, float]:
    box = tab.locator(f'[data-task="{task}"]').bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_dragging_changes_figures_or_marks_the_culprit(tab, tmp_path):
    assert figure(tab, "makespan") == "27"
    assert tab.locator("#board .task").count() == 96
    x, y = middle(tab, "0W0")  # behind the next forward, on which other ranks wait: valid, and shorter or longer
    tab.mouse.move(x, y)
    tab.mouse.down()
    tab.mouse.move(middle(tab, "0F4")[0] + 8, y, steps=5)
    tab.mouse.up()
    order = tab.evaluate("playground.state.plan[0].map((a) => a[0])")
    assert order.index("0W0") == order.index("0F4") + 1
    moved = Schedule.from_csv(tab.evaluate("Simulator.written(playground.state.plan)"))
    assert float(figure(tab, "makespan").split()[0]) == ours(moved, 4, 8, (1.0, 1.0, 1.0, 0.0))["makespan"]
    tab.click("#undo")
    assert figure(tab, "makespan") == "27"
    x, y = middle(tab, "1O2")  # before the forward that it needs
    tab.mouse.move(x, y)
    tab.mouse.down()
    tab.mouse.move(middle(tab, "1F0")[0] - 14, y, steps=5)
    tab.mouse.up()
    assert "not valid: 1O2 comes before 1F2 on lane 1/main but needs it" in tab.inner_text("#verdict")
    marked = tab.evaluate("""[...document.querySelectorAll('.culprit')].map((r) => r.parentNode.dataset.task)""")
    assert sorted(marked) == ["1F2", "1O2"]
    assert figure(tab, "makespan") == "-"
    tab.click("#undo")
    x, y = middle(tab, "2F3")  # to another rank, where its weights are not
    tab.mouse.move(x, y)
    tab.mouse.down()
    tab.mouse.move(x, y + 40, steps=5)
    tab.mouse.up()
    assert "2F3 is on rank 3, but stage 2 lives on rank 2" in tab.inner_text("#verdict")
    tab.click("#reset")
    assert tab.inner_text("#verdict") == "valid on 4 ranks"
    tab.fill("#W", "2")
    assert figure(tab, "makespan") == f"{ours_of('zb_h1', 4, 8, (1.0, 1.0, 2.0, 0.0))['makespan']:g}"


def ours_of(name: str, ranks: int, micro_batches: int, times: tuple[float, ...]) -> dict[str, Any]:
    return ours(replace(pipelines.plan(name, ranks, micro_batches).schedule, slots=None), ranks, micro_batches, times)


@pytest.mark.parametrize("name", ["chimera", "dualpipe", "interleaved", "hanayo"])
def test_what_is_exported_is_what_check_takes(name, tab, tmp_path, capsys):
    tab.select_option("#policy", name)
    tab.select_option("#ranks", "4")
    tab.select_option("#micros", "8")
    with tab.expect_download() as saved:
        tab.click("#export")
    path = tmp_path / "plan.csv"
    saved.value.save_as(path)
    command = tab.inner_text("#command").replace("plan.csv", str(path)).split()
    assert command[0] == "minidl"
    assert main(command[1:]) == 0
    assert "valid on 4 ranks" in capsys.readouterr().out
    price = ours_of(name, 4, 8, (1.0, 1.0, 1.0, 0.0))
    assert figure(tab, "makespan") == f"{price['makespan']:g}"
    tab.set_input_files("#file", path)
    tab.wait_for_function("document.getElementById('origin').textContent === 'A plan of your own.'")
    assert tab.inner_text("#verdict") == "valid on 4 ranks"
    assert figure(tab, "makespan") == f"{price['makespan']:g}"


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark(dark, chromium):
    with opened(chromium, PAGE, dark=dark, ready="window.playground") as tab:
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")


def test_the_keyboard_goes_from_task_to_task_and_moves_them(tab):
    tab.keyboard.press("Tab")
    tab.locator("#board .task[tabindex='0']").focus()
    active = "document.activeElement.dataset.task"
    assert tab.evaluate(active) == "0F0"
    for key, wanted in (("ArrowRight", "0F1"), ("ArrowLeft", "0F0"), ("ArrowLeft", "0F0"), ("ArrowUp", "0F0")):
        tab.keyboard.press(key)
        assert tab.evaluate(active) == wanted
    tab.keyboard.press("Shift+ArrowRight")
    assert tab.evaluate("playground.state.plan[0].slice(0, 2).flat()") == ["0F1", "0F0"]
    assert tab.evaluate(active) == "0F0", "the task keeps the focus"
    tab.keyboard.press("Shift+ArrowDown")
    assert "0F0 is on rank 1, but stage 0 lives on rank 0" in tab.inner_text("#verdict")
    assert tab.evaluate(active) == "0F0"
    tab.click("#undo")
    tab.click("#undo")
    assert figure(tab, "makespan") == "27"
    assert "`" not in tab.inner_text("#gallery")


def drag(tab: Any, task: str, to: tuple[float, float]) -> None:
    tab.mouse.move(*middle(tab, task))
    tab.mouse.down()
    tab.mouse.move(*to, steps=5)
    tab.mouse.up()


def beside(tab: Any, task: str, pixels: float) -> tuple[float, float]:
    x, y = middle(tab, task)
    return x + pixels, y


def typed(tab: Any, field: str, keys: str) -> list[str]:
    """Types into a field that is emptied first; returns the makespan after each key."""
    tab.focus(f"#{field}")
    tab.keyboard.press("Control+a")
    tab.keyboard.press("Backspace")
    found = [figure(tab, "makespan").split()[0]]
    for key in keys:
        tab.keyboard.press(key)
        found.append(figure(tab, "makespan").split()[0])
    return found


@pytest.mark.parametrize("field", ["F", "O", "W", "latency"])
def test_a_time_can_be_typed_key_by_key(field, tab):
    """A field that is empty or says 0 on the way to 0.5 keeps the time from before."""
    seen = typed(tab, field, "0.5")
    times = {"F": 1.0, "O": 1.0, "W": 1.0, "latency": 0.0} | {field: 0.5}
    assert seen[:-1] == ["27"] * 3
    assert float(seen[-1]) == ours_of("zb_h1", 4, 8, tuple(times.values()))["makespan"]
    assert tab.get_attribute(f"#{field}", "aria-invalid") == "false"
    assert set(typed(tab, field, "-3")) == {seen[-1]}
    assert tab.get_attribute(f"#{field}", "aria-invalid") == "true", "-3 is no time"
    tab.keyboard.press("Tab")
    assert tab.get_attribute(f"#{field}", "aria-invalid") == "false", "the last time comes back"
    typed(tab, field, "10000")
    assert tab.evaluate("document.querySelector('#board svg').width.baseVal.value") < 10000, "bounded"


def test_a_finger_drags_a_task_on_a_phone(chromium):
    with opened(chromium, PAGE, ready="window.playground", width=390) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "it fits the phone"
        tab.locator("#board").scroll_into_view_if_needed()
        finger = tab.context.new_cdp_session(tab)
        (x, y), (to, _) = middle(tab, "0F0"), middle(tab, "0F2")
        top = tab.evaluate("[scrollY, board.scrollLeft]")

        def touch(what: str, *points: tuple[float, float]) -> None:
            where = [{"x": a, "y": b} for a, b in points]
            finger.send("Input.dispatchTouchEvent", {"type": what, "touchPoints": where})

        touch("touchStart", (x, y))
        for k in range(1, 9):
            touch("touchMove", (x + (to + 12 - x) * k / 8, y + k))
        touch("touchEnd")
        assert tab.evaluate("playground.state.plan[0].slice(0, 4).flat()") == ["0F1", "0F2", "0F0", "0F3"]
        assert tab.evaluate("[scrollY, board.scrollLeft]") == top, "the page did not scroll"
        (x, _), (_, y2) = middle_of(tab, "1W0"), middle_of(tab, "1W0")
        touch("touchStart", (x, y2))
        touch("touchMove", (x + 78, y2 + 5))
        touch("touchEnd")
        assert tab.evaluate("playground.block.start.W") == [11, 12, 7, 5], "three ticks later"
        tab.locator("#board").scroll_into_view_if_needed()
        (x, y), top = middle(tab, "0F0"), tab.evaluate("[scrollY, board.scrollLeft]")
        y += 28  # on the memory line the finger moves the board
        touch("touchStart", (x + 100, y))
        touch("touchMove", (x + 40, y))
        touch("touchEnd")
        assert tab.evaluate("board.scrollLeft") == top[1] + 60


def test_a_refusal_says_why(tab):
    drag(tab, "0W0", beside(tab, "0W7", 15))
    assert tab.inner_text("#verdict").startswith("not valid: 0W1 runs before 0W0")
    assert "Why not? Gradients are added in micro-batch order: the sum of stage 0 after 0W1" in tab.inner_text("#why")
    tab.click("#undo")
    assert tab.inner_text("#why") == ""
    drag(tab, "1O2", beside(tab, "1F0", -14))
    assert "1O2 would start before there is a result of 1F2. Put 1O2 behind 1F2." in tab.inner_text("#why")


@pytest.mark.parametrize(("name", "ranks", "micros", "W"), [("zb_h1", "4", "8", "1"), ("interleaved", "8", "16", "1"),
                                                           ("dualpipe", "4", "12", "1"), ("zb_h1", "4", "16", "0.3")])
def test_names_have_one_form(name, ranks, micros, W, tab):
    tab.select_option("#policy", name)
    tab.select_option("#ranks", ranks)
    tab.select_option("#micros", micros)
    tab.fill("#W", W)
    shown = tab.evaluate("""[...document.querySelectorAll('#board .task')].map((g) => [g.dataset.task,
        [...g.querySelectorAll('text')].map((t) => t.textContent).join(';')])""")
    assert all(task == text for task, text in shown), "each task has its whole name"


def test_the_page_says_how_to_read_it(tab):
    assert "2F3 is the forward (F) of stage 2 for micro-batch 3." in tab.inner_text("header")


def test_uneven_stages_cost_as_in_python(tab):
    rng = random.Random(4)
    for _ in range(20):
        name, factors = rng.choice(["zb_h1", "gpipe", "interleaved"]), None
        plan = pipelines.plan(name, 4, 8)
        factors = [rng.choice([0.5, 1.0, 2.0, 3.0]) for _ in range(plan.placement.stages)]
        times = some_times(rng)
        each = ([t * plan.placement.share * f for f in factors] for t in times[:3])
        made = pipelines.read_plan(replace(plan.schedule, slots=None), 4, 8)
        wanted = pipeline.price(made, pipeline.costs(made.placement, *each, times[3])).as_json()
        found = tab.evaluate("""([csv, F, O, W, latency, stages]) => Simulator.price(
            Simulator.prove(Simulator.read(csv), 4, 8), {F, O, W, latency, stages})""",
                             [plan.schedule.to_csv(), *times, factors])
        for what in FIGURES:
            assert found[what] == pytest.approx(wanted[what], rel=1e-9, abs=1e-9), (name, factors, times)


def test_slower_stages_are_typed_one_for_each(tab):
    tab.focus("#stages")
    for keys, makespan in (("1 2 1", "27"), (" 1", "47")):
        tab.keyboard.type(keys)
        assert tab.get_attribute("#stages", "aria-invalid") == ("true" if makespan == "27" else "false")
        assert (figure(tab, "makespan").split()[0] == "27") == (makespan == "27")


def show(tab: Any, order: str) -> None:
    tab.evaluate("(order) => { playground.state.plan = playground.planOf(order); playground.update(); }", order)


def optimum(level: dict[str, Any]) -> Ordered:
    """The optimum of a challenge, with its proof in the notes."""
    need("ortools")
    placement = pipelines.place("optimal", level["ranks"], 1)
    slower = level.get("stages", [1] * level["ranks"])
    each = ([level.get(kind, 1) * times for times in slower] for kind in "FOW")
    cost = pipeline.costs(placement, *each, level.get("latency", 0))
    return optimal(Problem.of(placement, level["micros"], cost, level.get("peak")),
                   "span" if level["figure"] == "max_span" else level["figure"])


def test_every_challenge_begins_unsolved_and_its_goal_is_the_proved_optimum(tab):
    levels = tab.evaluate("CHALLENGES")
    assert len(levels) == 20
    for i, level in enumerate(levels):
        tab.select_option("#level", str(i))
        assert tab.inner_text("#verdict").startswith("valid"), level
        assert "Solved!" not in tab.inner_text("#challenge"), level
        found = optimum(level)
        assert found.notes["status"]["proved"]
        assert found.notes["status"]["value"] == pytest.approx(level["goal"]), level
        orders = [build.row(found.schedule)]
        if "by" in level:
            orders.append(tab.evaluate("([by, key]) => playground.plans[by][key]",
                                       [level["by"], f"{level['ranks']},{level['micros']},1"]))
        for order in orders:
            show(tab, order)
            assert "Solved! It is proved that no order is better" in tab.inner_text("#challenge"), (level, order)
        if "peak" in level:
            tab.evaluate("playground.state.level.peak = 0.5; playground.update()")
            assert "Solved!" not in tab.inner_text("#challenge"), "the cap counts"


def test_a_solved_challenge_leads_to_the_next_one(tab):
    tab.select_option("#level", "2")
    show(tab, build.order("zb_h1", 2, 4, 1))
    assert "zb_h1 gets there too" in tab.inner_text("#challenge")
    tab.click("#challenge button")
    assert tab.inner_text("#challenge").startswith("4. three ranks")
    tab.fill("#W", "2")
    assert not tab.is_visible("#challenge"), "a challenge has its own times"


def test_a_challenge_is_solved_by_hand(tab):
    tab.select_option("#level", "2")
    for task, behind in (("1W2", "1O3"), ("1W1", "1O2"), ("1W0", "1O1")):
        drag(tab, task, beside(tab, behind, 8))
        assert tab.inner_text("#verdict") == "valid on 2 ranks"
    order = tab.evaluate("playground.state.plan[1].flat().join(' ')")
    assert order == "1F0 1O0 1F1 1O1 1W0 1F2 1O2 1W1 1F3 1O3 1W2 1W3"
    assert "Solved!" in tab.inner_text("#challenge")
    assert figure(tab, "makespan") == "13 -1"


def test_memory_lines_show_what_each_rank_holds_and_move(tab):
    for name in ("zb_h1", "dualpipe", "interleaved"):
        tab.select_option("#policy", name)
        chunks = int(tab.input_value("#chunks"))
        live = tab.evaluate("playground.state.price.live")
        for curve, levels in zip(Shown.of(pipelines.plan(name, 4, 8, chunks=chunks)).curves, live, strict=True):
            assert max(levels) == pytest.approx(curve.peak)
    tab.select_option("#policy", "zb_h1")
    line = tab.get_attribute("[data-live='1']", "d")
    drag(tab, "1F3", beside(tab, "1O0", -12))
    assert tab.inner_text("#verdict") == "valid on 4 ranks"
    assert tab.get_attribute("[data-live='1']", "d") != line
    assert "peak 4" in tab.inner_text("#board")


def test_recompute_takes_a_forward_more_in_o_and_frees_activations_in_between(tab):
    tab.select_option("#policy", "one_f_one_b")
    kept = tab.evaluate("playground.state.price")
    assert kept["peak_activations"] == [4, 3, 2, 1]
    tab.select_option("#recompute", "all")
    price = tab.evaluate("playground.state.price")
    longer = ours_of("one_f_one_b", 4, 8, (1.0, 2.0, 1.0, 0.0))
    assert price["makespan"] == longer["makespan"] > kept["makespan"]
    assert price["peak_activations"] == [1, 1, 1, 1]
    assert tab.locator("#board rect.again").count() == 32
    assert "recompute=all" in tab.url
    tab.select_option("#policy", "zb_h1")
    line = tab.get_attribute("[data-live='3']", "d")
    drag(tab, "3W0", beside(tab, "3O2", 8))
    assert tab.inner_text("#verdict") == "valid on 4 ranks"
    assert tab.get_attribute("[data-live='3']", "d") != line
    tab.reload()
    assert tab.input_value("#recompute") == "all"


def test_two_plans_are_drawn_above_each_other(tab):
    tab.select_option("#other", "gpipe")
    price = ours_of("gpipe", 4, 8, (1.0, 1.0, 1.0, 0.0))
    assert f"gpipe: makespan {price['makespan']:g}, peak 8" in tab.text_content("#board")
    scale = "playground.state.scale"
    box = tab.locator("#board .track").first.bounding_box()
    assert box["width"] == pytest.approx(tab.evaluate(scale) * price["makespan"], abs=1), "on one scale"
    drag(tab, "0F1", middle(tab, "0F2"))  # the pointer's row is the plan's own, below
    assert tab.evaluate("playground.state.plan[0].slice(0, 3).flat()") in (["0F0", "0F2", "0F1"], ["0F0", "0F1", "0F2"])
    drag(tab, "2F3", (middle(tab, "3F3")[0], middle(tab, "3F3")[1]))
    assert "2F3 is on rank 3" in tab.inner_text("#verdict")
    assert "gpipe: makespan" in tab.text_content("#board"), "it stays while the plan is not valid"


@pytest.mark.parametrize("width", [1280, 390])
def test_the_address_brings_the_plan_back(width, chromium):
    def shown(tab: Any) -> list[Any]:
        return [tab.evaluate("[playground.state.plan, location.hash]"), figure(tab, "makespan"),
                tab.inner_text("#challenge"),
                *(tab.input_value(f"#{i}") for i in ("policy", "W", "latency", "stages", "other", "level"))]

    with opened(chromium, PAGE, ready="window.playground", width=width) as tab:
        assert tab.evaluate("location.hash") == "#policy=zb_h1&ranks=4&micros=8&chunks=1"
        tab.fill("#W", "0.5")
        tab.fill("#stages", "1 2 1 1")
        tab.select_option("#other", "gpipe")
        tab.locator("#board .task[data-task='0W2']").press("Shift+ArrowRight")
        wanted = [shown(tab)]
        tab.select_option("#policy", "dualpipe")  # with pairs
        wanted.append(shown(tab))
        tab.select_option("#level", "3")
        tab.locator("#board .task[data-task='0F1']").press("Shift+ArrowRight")
        wanted.append(shown(tab))
        tab.evaluate("(text) => playground.imported(text)", pipelines.plan("chimera", 2, 4).schedule.to_csv())
        wanted.append(shown(tab))
    for want in wanted:
        with opened(chromium, PAGE, ready="window.playground", width=width, fragment=want[0][1]) as tab:
            found = shown(tab)
            assert found[0] == want[0]
            assert found[1].split()[0] == want[1].split()[0]
            if tab.evaluate("playground.state.problem || playground.state.level"):
                assert found[2:] == want[2:]
    with opened(chromium, PAGE, ready="window.playground", fragment="#policy=zb_h1&plan=0F0.0X1") as tab:
        assert tab.inner_text("#verdict").startswith("this link cannot be read: 0X1: a task here is")
    with opened(chromium, PAGE, ready="window.playground", fragment="#policy=nothing&ranks=x&W=0&above=none") as tab:
        assert tab.inner_text("#verdict").startswith("valid")


# ---------------------------------------------------------------------------------------------------- coach and blocks
def said(tab: Any) -> str:
    return " ".join(tab.inner_text("#coach").split())


def test_the_coach_says_what_a_task_and_a_gap_wait_for(tab):
    """By pointer, by keyboard, and on a slow link."""
    gap = ("Rank 1 waits from 4 to 6: 1O0 needs the gradient of stage 2, micro-batch 0; 2O0 on rank 2 makes it and "
           "ends at 6.")
    tab.hover("[data-gap='1/3']")
    assert said(tab) == gap
    tab.locator("#board .task[data-task='0F1']").focus()
    assert said(tab) == "0F1 starts at 1: it needs no other task, only its rank."
    tab.locator("#board .task[data-task='1O0']").focus()
    assert said(tab) == gap
    tab.locator("#board .task[data-task='1W7']").focus()
    assert "as soon as rank 1 is free" in said(tab)
    tab.fill("#latency", "0.5")
    tab.hover("[data-gap='1/0']")
    assert said(tab) == ("Rank 1 waits from 0 to 1.5: 1F0 needs the activation of stage 0, micro-batch 0; 0F0 on rank "
                         "0 makes it and ends at 1, and the message takes 0.5.")


def test_gaps_are_the_idle_times_of_the_engine(tab):
    for name in ("zb_h1", "gpipe", "interleaved", "chimera"):
        tab.select_option("#policy", name)
        chunks = int(tab.input_value("#chunks"))
        plan = pipelines.plan(name, 4, 8, chunks=chunks)
        idle = sum(max(end for _, end in spans) - sum(end - start for start, end in spans) for spans in lanes(plan))
        shown = tab.evaluate("Coach.gaps(playground.state.proved, playground.state.price, 0)")
        assert sum(gap["to"] - gap["from"] for gap in shown) == pytest.approx(idle), name


def lanes(plan: Any) -> list[list[tuple[float, float]]]:
    """When each rank works."""
    t, found = plan.timeline, [list[tuple[float, float]]() for _ in range(plan.placement.ranks)]
    for r in t.tasks.tolist():
        found[t.lanes[t.lane[r]].rank].append((float(t.start[r]), float(t.end[r])))
    return [sorted(set(spans)) for spans in found]


def test_the_best_move_is_the_best_of_all_moves_along_a_rank(tab):
    """Against the engine, which tries them all."""
    tab.select_option("#level", "2")
    schedule = Schedule.from_csv(tab.evaluate("Simulator.written(playground.state.plan)"))
    best, rows = ours(schedule, 2, 4, (1.0, 1.0, 1.0, 0.0)), actions(schedule)
    peak, first = max(best["peak_activations"]), best["makespan"]
    least = first
    for rank, row in enumerate(rows):
        for a in range(len(row)):
            for b in range(len(row)):
                moved = [list(r) for r in rows]
                moved[rank].insert(b, moved[rank].pop(a))
                price = ours(written(moved), 2, 4, (1.0, 1.0, 1.0, 0.0))
                if "error" not in price and max(price["peak_activations"]) <= peak:
                    least = min(least, price["makespan"])
    assert least < first
    tab.click("#best")
    assert said(tab).endswith(f"that saves {first - least:g}. do it")
    tab.click("#doit")
    assert float(figure(tab, "makespan").split()[0]) == least
    while tab.locator("#best").click() or tab.locator("#doit").count():
        tab.click("#doit")
    assert said(tab) == "No single move along a rank makes the makespan smaller."
    tab.click("#undo")
    assert float(figure(tab, "makespan").split()[0]) > 13, "each move can be taken back"


def test_the_best_move_first_frees_memory_that_a_challenge_forbids(tab):
    tab.select_option("#level", "0")
    for _ in range(6):
        if "Solved!" not in tab.inner_text("#challenge"):
            tab.click("#best")
            assert "rank 0 then holds too much for a shorter time" in said(tab)
            tab.click("#doit")
    assert "Solved!" in tab.inner_text("#challenge")


def test_ready_tasks_are_marked_while_one_drags(tab):
    x, y = middle(tab, "3W7")
    tab.mouse.move(x, y)
    tab.mouse.down()
    tab.mouse.move(*beside(tab, "3F1", -2), steps=5)  # rank 3 has run 3F0 and 3O0, and 3F1 waits for nothing else
    marked = tab.evaluate("[...document.querySelectorAll('#board .ready')].map((r) => r.parentNode.dataset.task)")
    assert sorted(marked) == ["3F1", "3W0"]
    tab.mouse.up()
    assert tab.locator("#board .ready").count() == 0


def test_a_run_goes_on_until_something_strange(tab):
    tab.select_option("#level", "4")  # at most three activations, and GPipe holds six
    seen = []
    for _ in range(30):
        tab.click("#run")
        seen.append(said(tab))
        if seen[-1].startswith("The step ends"):
            break
    assert any("Rank 0 holds 4 activations from here on; 3 are allowed." in text for text in seen)
    assert any("Rank 2 waits from 0 to 2" in text for text in seen)
    assert seen[-1] == "The step ends at 22."
    assert tab.locator("#board .moment").count() == 1
    tab.click("#run")
    assert said(tab) == seen[0], "from the start again"


def test_a_known_order_is_recognised(tab):
    tab.select_option("#level", "2")
    assert not tab.inner_text("#built")
    show(tab, build.order("zb_h1", 2, 4, 1))
    assert tab.inner_text("#built") == "You built zb_h1."


def test_a_building_block_is_moved_repeated_and_named(tab):
    """By pointer and by keyboard: 1F1B, with the W of each rank three ticks later than of the rank before, is ZB-H1."""
    foretold = "8 of them: makespan {:g}, bubble rate {:g}, peak {:g} ({} on the ranks of a long run)."
    price = ours_of("zb_h1", 4, 8, (1.0, 1.0, 1.0, 0.0))
    assert "This is one_f_one_b." in tab.inner_text("#stamped")
    for s in (1, 2, 3):
        tab.locator(f"#block [data-block='{s}W0']").focus()
        for _ in range(3 * s):
            tab.keyboard.press("ArrowRight")
    wanted = foretold.format(price["makespan"], round(price["bubble_rate"], 4), 4, "4, 4, 4, 4")
    assert tab.inner_text("#stamped") == f"{wanted} This is zb_h1."
    assert "block=0.1.2.3-10.8.6.4-11.12.13.14" in tab.url
    tab.click("#stamp")
    assert tab.inner_text("#built") == "You built zb_h1."
    assert figure(tab, "makespan") == f"{price['makespan']:g}"
    x, y = middle_of(tab, "0W0")
    tab.mouse.move(x, y)
    tab.mouse.down()
    tab.mouse.move(x + 26, y, steps=3)
    tab.mouse.up()
    assert tab.inner_text("#stamped") == ("This block cannot be repeated: 0F and 0W would meet: they start at 0 and "
                                          "12, and every 3 ticks another one starts.")
    assert tab.is_disabled("#stamp")


def middle_of(tab: Any, task: str) -> tuple[float, float]:
    tab.locator("#block").scroll_into_view_if_needed()
    box = tab.locator(f"#block [data-block='{task}']").bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
