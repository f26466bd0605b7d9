"""The page of --html, in a real browser: it says what `explain` says, and holds a hundred thousand tasks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pipelines
import pytest
from browser import browser, opened, until

from minidl import schedulers
from minidl.cli import main
from minidl.core.draw import curve_svg, schedule_svg, timeline_svg
from minidl.core.report import critical_path, usage
from minidl.plans.plan import Plan
from minidl.pricing.cost import CostModel
from minidl.pricing.explain import explain
from minidl.schedulers import pipeline
from minidl.training.job import Job
from minidl.training.recorded import Recorded
from minidl.training.trainer import Trainer
from minidl.views.page import Shown, page

SCHEDULERS = ("in_order", "multi_stream")
TITLES = "page.layout().rows.filter((r) => r.kind === 'title').map((r) => r.text.split(':')[0])"
SMALL = ["--model", "mlp", "--model-arg", "hidden=16", "--costs", "analytic"]


@pytest.fixture(scope="module")
def chromium():
    with browser() as running:
        yield running


def pipelined(name: str, ranks: int = 4, micro_batches: int = 8, **options: Any) -> Plan:
    placement = pipelines.place(name, ranks)
    return pipelines.plan(name, ranks, micro_batches, pipeline.costs(placement, 1.0, 1.25, 0.5, 0.25), **options)


def recorded(**job: Any) -> Recorded:
    return Recorded(Job(model="mlp", model_args={"hidden": 16}, data="digits", **job))


def network(name: str, **job: Any) -> Plan:
    return recorded(scheduler=name, **job).plan(CostModel.analytic())


def written(tmp_path, *shown: Shown, **options: Any):
    path = tmp_path / "page.html"
    path.write_text(page("a page", {"makespan": 1.5}, shown, **options), encoding="utf-8")
    return path


PLANS = {"zb_h1": lambda: pipelined("zb_h1"), "dualpipe": lambda: pipelined("dualpipe"),  # pairs run as one action
         "multi_stream": lambda: network("multi_stream", streams=2, micro_batches=2),
         "in_order": lambda: network("in_order")}


def contrast(a: list[float], b: list[float]) -> float:
    """The contrast of two colours as WCAG 2 defines it."""
    def light(colour: list[float]) -> float:
        parts = [c / 255 for c in colour]
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    high, low = sorted((light(a), light(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.few(1)
@pytest.mark.parametrize("dark", [False, True])
def test_hover_click_find_zoom_and_contrast(dark, chromium, tmp_path):
    """Text has a contrast of at least 4.5 to 1, as WCAG AA asks for."""
    plan = PLANS["zb_h1"]()
    with opened(chromium, written(tmp_path, Shown.of(plan), task="2O3"), dark=dark, ready="window.page") as tab:
        assert tab.evaluate("page.chosen()") == "2O3", "the task of the command comes first"
        assert "2O3" in tab.inner_text("#explain h3")
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
        pixel = tab.evaluate("page.draw() || [...document.getElementById('canvas').getContext('2d')"
                             ".getImageData(2, 2, 1, 1).data].slice(0, 3)")
        assert pixel == ([13, 17, 23] if dark else [255, 255, 255]), "the canvas follows the mode too"
        colour = tab.evaluate("""() => {
            const rgb = (text) => { const c = document.createElement('canvas').getContext('2d'); c.fillStyle = text;
              c.fillRect(0, 0, 1, 1); return [...c.getImageData(0, 0, 1, 1).data].slice(0, 3); };
            const style = getComputedStyle(document.documentElement);
            return Object.fromEntries(['card', 'ink', 'soft', 'track', 'mark', 'path']
              .map((n) => [n, rgb(style.getPropertyValue('--' + n))])); }""")
        pairs = [(text, "card") for text in ("ink", "soft", "mark", "path")] + [("ink", "track")]
        assert all(contrast(colour[text], colour[below]) >= 4.5 for text, below in pairs), colour
        assert tab.evaluate("[page.share(-1e-9, 1), page.share(-0.01, 1)]") == ["0.0 %", "-1.0 %"], "0 has no sign"
        x, y = place(tab, "1W2")
        tab.mouse.move(x, y)
        found = explain(*plan.priced[:2], plan.cost, "1W2")
        tip = tab.inner_text("#tip")
        assert tip.startswith("1W2 on 1/main")
        assert f"slack {found.slack:g}" in tip
        assert "reads" in tip
        tab.mouse.click(x, y)
        assert tab.evaluate("page.chosen()") == "1W2"
        for name in found.needs:
            assert name in tab.inner_text("#explain")
        tab.locator("#explain a", has_text=re.compile(f"^{found.needs[0]}$")).first.click()
        assert tab.evaluate("page.chosen()") == found.needs[0], "a name in the explanation leads to its task"
        whole = tab.evaluate("page.view().to - page.view().from")
        tab.mouse.move(x, y)
        tab.mouse.wheel(0, -300)
        until(tab, f"page.view().to - page.view().from < {whole}")
        zoomed = tab.evaluate("page.view().from")
        tab.mouse.down()
        tab.mouse.move(x - 80, y, steps=4)
        tab.mouse.up()
        assert tab.evaluate("page.view().from") > zoomed, "dragging to the left shows what comes later"
        tab.keyboard.press("0")
        assert tab.evaluate("page.view().to - page.view().from") == whole
        tab.fill("#find", "3F5")
        tab.press("#find", "Enter")
        assert tab.evaluate("page.chosen()") == "3F5"
        assert tab.locator("#usage tbody tr").count() == 4


def place(tab: Any, name: str) -> tuple[float, float]:
    """Where the middle of a task is on the screen."""
    x, y = tab.evaluate("""(name) => {
        const t = page.plans[0].predicted, i = t.names.indexOf(name);
        const row = page.layout().rows.find((r) => r.t === t && r.lane === t.laneOf[i]);
        return [page.toX((t.start[i] + t.end[i]) / 2), row.y + row.h * (t.part[i] + 0.5) / t.of[i]]; }""", name)
    box = tab.locator("#canvas").bounding_box()
    return box["x"] + x, box["y"] + y


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 4), pytest.param(32, 1042, marks=pytest.mark.slow)])
def test_ten_tasks_and_a_hundred_thousand(ranks, micro_batches, chromium, tmp_path):
    plan = pipelined("zb_h1", ranks, micro_batches)
    assert len(plan.graph) in (12, 100_032)
    with opened(chromium, written(tmp_path, Shown.of(plan)), ready="window.page") as tab:
        assert tab.evaluate("page.plans[0].predicted.start.length") == len(plan.graph)
        for i in np.linspace(0, len(plan.graph) - 1, 20).astype(int).tolist():
            name = tab.evaluate(f"page.plans[0].predicted.names[{i}]")
            assert tab.evaluate(f"page.find('{name}') && page.chosen()") == name
            at = tab.evaluate("""(i) => { const p = page, t = p.plans[0].predicted;
                p.setView(t.start[i] - 5, t.end[i] + 5);
                const row = p.layout().rows.find((r) => r.t === t && r.lane === t.laneOf[i]);
                const y = row.y + row.h / 2 - document.getElementById('scroller').scrollTop;
                return [p.taskAt(p.toX((t.start[i] + t.end[i]) / 2), y).i, p.draw()]; }""", i)
            assert at[0] == i
        tab.evaluate("page.setView(0, page.plans[0].span) || page.draw()")


def test_a_run_lies_below_its_prediction(chromium, tmp_path):
    """Every measured task has its predicted one, and the tables say what the report says."""
    trainer = Trainer(recorded(scheduler="multi_stream", streams=2), CostModel.analytic(), trace=True)
    for _ in range(2):
        trainer.step()
    trainer.settle()
    measured = trainer.run.timeline
    shown = Shown.of(trainer.plan, measured)
    with opened(chromium, written(tmp_path, shown), ready="window.page") as tab:
        m = tab.evaluate("""() => { const p = page.plans[0], m = p.measured;
            return {names: m.names, of: [...m.entry].map((e) => p.predicted.names[e]), usage: m.usage,
                    path: [...m.path].map((i) => m.names[i]), took: m.names.map((n) => page.explained(n, 1))}; }""")
    assert m["names"] == m["of"]
    assert sorted(m["names"]) == sorted(measured.name(r) for r in measured.tasks)
    assert m["path"] == [measured.name(r) for r in critical_path(measured).records]
    assert [u["busy"] for u in m["usage"]] == [u.busy for u in usage(measured)]
    record = {measured.name(r): r for r in measured.tasks}
    for one in m["took"]:
        r = record[one["task"]]
        assert one["end"] - one["start"] == pytest.approx(measured.end[r] - measured.start[r])
        assert one["other"][0] == "predicted"


def test_the_diagnosis_stands_at_the_top(chromium, tmp_path):
    one = {"headline": "predicted 1.36x, measured 0.98x", "fits": False, "reasons": ["load 2.1 on 2 cores"],
           "advice": ["Measure again when nothing else runs."]}
    for diagnosis, name in ((one, ""), ({"multi_stream": one}, "multi_stream: ")):
        path = tmp_path / "page.html"
        path.write_text(page("a page", {"diagnosis": diagnosis}, [Shown.of(PLANS["in_order"]())]), encoding="utf-8")
        with opened(chromium, path, ready="window.page") as tab:
            assert tab.inner_text("#diagnosis") == (f"{name}predicted 1.36x, measured 0.98x: load 2.1 on 2 cores. "
                                                    f"Measure again when nothing else runs.")


def test_several_plans_on_one_page(chromium, tmp_path):
    shown = [Shown.of(PLANS[name]()) for name in ("in_order", "multi_stream")]
    with opened(chromium, written(tmp_path, *shown), ready="window.page") as tab:
        assert tab.locator("#plan option").all_inner_texts() == ["all", "in_order", "multi_stream"]
        assert tab.evaluate(TITLES) == ["in_order, predicted", "multi_stream, predicted"], "below each other"
        tab.select_option("#plan", "1")
        assert tab.evaluate(TITLES)[0] == "predicted"
        assert tab.evaluate("page.explained('1F0').task") == "1F0"
        assert "multi_stream" in tab.inner_text("#plan")


# ------------------------------------------------------------------------------------------------- without a browser
def content(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.mark.parametrize("name", PLANS)
def test_memory_over_time_stays_below_the_proof(name):
    plan = PLANS[name]()
    shown = Shown.of(plan)
    assert len(shown.curves) == plan.ranks
    for curve, peak in zip(shown.curves, plan.peaks if plan.synthetic else plan.peak_bytes, strict=True):
        assert curve.peak == peak
        assert 0 < max(curve.live) <= peak
        assert (np.diff(curve.time) >= 0).all()


def test_names_and_labels_cannot_end_the_script():
    plan = PLANS["in_order"]()
    evil = "</script><script>alert(1)</script>"
    shown = Shown.of(plan)
    shown = replace(shown, title=evil, timeline=replace(shown.timeline, labels=(evil,) * 9))
    text = page(evil, {evil: evil}, [shown], command=evil, task=evil)
    assert text.count("<script") == 2
    assert text.count("</script>") == 2
    assert content(text)["plans"][0]["labels"][0] == evil


STAGES = ["--parallel", "pipeline", "--ranks", "2", "--micro-batches", "2"]


def wide(*arguments):
    return pytest.param(list(arguments), marks=pytest.mark.wide)


@pytest.mark.few(3)
@pytest.mark.parametrize("arguments", [
    ["simulate", "--scheduler", "zb_h1", "--ranks", "2", "--micro-batches", "4"],
    ["plan", *SMALL, "--scheduler", "multi_stream", "--streams", "2"],
    wide("plan", *SMALL, *STAGES, "--scheduler", "gpipe"),
    ["plan", "--parallel", "data", "--scheduler", "fifo", "--forward", "1,1", "--output-grad", "1,1", "--weight-grad",
     "1,1", "--comm", "2,2"],
    ["explain", "3O0", *SMALL],
    ["train", *SMALL, "--steps", "2"],
    wide("train", *SMALL, "--steps", "2", "--parallel", "data", "--ranks", "2", "--scheduler", "fifo"),
    wide("train", *SMALL, "--steps", "2", *STAGES, "--scheduler", "zb_h1"),
    ["train", *SMALL, "--steps", "2", *STAGES, "--scheduler", "zb_h1", "--replicas", "2"],
    wide("compare", *SMALL, "--steps", "2", "--schedulers", "in_order,multi_stream"),
    wide("compare", *SMALL, "--steps", "2", *STAGES),
    ["compare", *SMALL, "--steps", "2", "--parallel", "data", "--ranks", "2"]],
    ids=lambda a: "-".join(a[:1] + a[-4:]))
def test_every_verb_writes_its_page(arguments, tmp_path, capsys):
    path = tmp_path / "out.html"
    assert main([*arguments, "--html", str(path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    text = path.read_text(encoding="utf-8")
    found = content(text)
    assert found["figures"] == record, "the page has the figures of --json"
    assert f"--html {path}" in text, "and the command that made it"
    verb = arguments[0]
    assert len(found["plans"]) == (2 if verb == "compare" else 1)
    assert found["task"] == ("3O0" if verb == "explain" else "")
    for plan in found["plans"]:
        assert (plan["measured"] is not None) == (verb in ("train", "compare"))
        if plan["measured"] is not None:
            entry = column(plan["measured"]["entry"])
            assert len(entry)
            assert (entry >= 0).all(), "every task that ran is one of the plan"


def column(packed: dict[str, str]) -> Any:
    import base64

    (kind, text), = packed.items()
    return np.frombuffer(base64.b64decode(text), "<" + kind)


def test_a_page_of_a_schedule_that_was_edited(tmp_path, capsys):
    """A plan from a file is shown like any other."""
    plan = schedulers.plan(recorded().graph, "in_order")
    plan.schedule.save(tmp_path / "mine.csv")
    path = tmp_path / "out.html"
    assert main(["plan", *SMALL, "--scheduler", str(tmp_path / "mine.csv"), "--html", str(path)]) == 0
    assert content(path.read_text(encoding="utf-8"))["plans"][0]["predicted"]["names"][0] == plan.schedule.names(0)[0]


def test_a_page_is_refused_where_it_would_show_nothing(capsys):
    assert main(["train", *SMALL, "--steps", "2", "--dry-run", "--html", "x.html"]) == 2
    assert "--html has no effect here" in capsys.readouterr().err


def test_the_keyboard_reaches_every_task(chromium, tmp_path):
    """In the timeline from task to task, and the names in the explanation with Tab."""
    plan = PLANS["zb_h1"]()
    with opened(chromium, written(tmp_path, Shown.of(plan)), ready="window.page") as tab:
        tab.focus("#canvas")
        names = tab.evaluate("page.plans[0].predicted.names")
        for key, wanted in (("n", names[0]), ("n", names[1]), ("n", names[2]), ("p", names[1]), ("p", names[0]),
                            ("p", names[0])):
            tab.keyboard.press(key)
            assert tab.evaluate("page.chosen()") == wanted
        tab.keyboard.press("ArrowDown")
        first = tab.evaluate("(() => { const t = page.plans[0].predicted; return t.names[t.ptr[1]]; })()")
        assert tab.evaluate("page.chosen()") == first
        tab.keyboard.press("ArrowUp")
        assert tab.evaluate("page.chosen()") == names[1], "the one at the same time"
        tab.keyboard.press("Tab")
        tab.keyboard.press("Tab")
        name = tab.evaluate("document.activeElement.textContent")
        assert tab.evaluate("document.activeElement.tagName") == "A"
        tab.keyboard.press("Enter")
        assert tab.evaluate("page.chosen()") == name
        assert tab.evaluate("page.plans[0].timelines[0].names.includes("
                            "document.getElementById('find').placeholder.split(' ').at(-1))"), "it is there"
        tab.fill("#find", "99W9")
        tab.press("#find", "Enter")
        assert "There is no task 99W9 here; names are like" in tab.inner_text("#explain")


def test_compare_opens_with_its_table_and_all_timelines(chromium, tmp_path, capsys):
    path = tmp_path / "out.html"
    assert main(["compare", *SMALL, "--steps", "3", "--schedulers", ",".join(SCHEDULERS), "--html", str(path),
                 "--json"]) == 0
    arms = json.loads(capsys.readouterr().out)["arms"]
    for width in (1280, 390):
        with opened(chromium, path, ready="window.page", width=width) as tab:
            assert tab.evaluate("document.querySelector('header > div').id") == "arms"
            rows = [row.locator("td").all_inner_texts() for row in tab.locator("#arms tbody tr").all()]
            median = [arm["step_ms"]["median"] for arm in arms]
            assert [row[0] for row in rows] == [arm["scheduler"] for arm in arms]
            assert [float(row[3]) for row in rows] == pytest.approx([median[0] / m for m in median], abs=0.006)
            assert tab.evaluate(TITLES) == [
                f"{name}, {what}" for what in ("measured", "predicted") for name in SCHEDULERS]
            said = tab.inner_text("body")
            assert not re.search(r"fits|\b(true|false)\b|-0\.0+ ?%|\[object", said)
            assert "yes\nbit identical" in said
            tab.evaluate("page.find('1W0')")
            assert "in_order, measured, lane 0/main" in tab.inner_text("#explain")
            assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_run_has_its_curves_on_top(chromium, tmp_path, capsys):
    path = tmp_path / "out.html"
    assert main(["train", *SMALL, "--epochs", "3", "--batch-size", "512", "--html", str(path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    curves = content(path.read_text(encoding="utf-8"))["curves"]
    assert list(curves) == ["loss", "accuracy"]
    (_, steps, losses), (name, at, _) = curves["loss"]
    assert column(steps).tolist() == list(range(1, record["steps"] + 1))
    assert [column(losses)[0], column(losses)[-1]] == pytest.approx([record["loss_first"], record["loss_last"]])
    assert (name, len(column(at)), column(at)[-1]) == ("test", 3, record["steps"])
    assert column(curves["accuracy"][0][2])[-1] == record["accuracy"]
    for width in (1280, 390):
        with opened(chromium, path, ready="window.page", width=width) as tab:
            box = tab.locator("#curves svg").first.bounding_box()
            assert box["y"] < tab.locator("#canvas").bounding_box()["y"]
            assert box["x"] + box["width"] <= width
            tab.mouse.move(box["x"] + box["width"] - 3, box["y"] + 60)
            assert f"training {record['loss_last']:.4g} at step {record['steps']}" in tab.inner_text("#tip")


def test_a_long_curve_is_shown_as_means():
    points = [(k, float(k % 2)) for k in range(2000)]
    text = page("", {}, [Shown.of(PLANS["in_order"]())], curves={"loss": {"training": points}})
    (_, steps, values), = content(text)["curves"]["loss"]
    assert len(column(steps)) == 1000
    assert set(column(values)) == {0.5}


@pytest.mark.few(1)
@pytest.mark.parametrize("width", [1280, 390])
def test_a_tip_covers_no_row(width, chromium, tmp_path):
    with opened(chromium, written(tmp_path, Shown.of(PLANS["zb_h1"]())), ready="window.page", width=width) as tab:
        canvas = tab.locator("#canvas").bounding_box()
        for name in ("0F0", "2O3", "3W7"):
            tab.mouse.move(*place(tab, name))
            tip = tab.locator("#tip").bounding_box()
            assert tab.inner_text("#tip").startswith(name)
            assert tip["y"] + tip["height"] <= canvas["y"] or tip["y"] >= canvas["y"] + canvas["height"]


def test_the_critical_path_is_one_chain_for_the_list_and_for_each_task(chromium, tmp_path):
    """Other tasks without slack are not on it; `explain` says of all of them that a delay costs."""
    plan = PLANS["zb_h1"]()
    with opened(chromium, written(tmp_path, Shown.of(plan)), ready="window.page") as tab:
        listed = tab.locator("#path a").all_inner_texts()
        said = {name: tab.evaluate(f"page.find('{name}') && document.getElementById('explain').innerText")
                for name in tab.evaluate("page.plans[0].predicted.names")}
    assert {name for name, text in said.items() if "on the critical path" in text} == set(listed)
    tight = {name for name in said if explain(*plan.priced[:2], plan.cost, name).slack <= 1e-9}
    assert tight - set(listed), "an example with other tasks that have no slack"
    for name, text in said.items():
        assert ("a delay would make the step longer" in text) == (name in tight - set(listed))
        found = str(explain(*plan.priced[:2], plan.cost, name))
        assert ("a delay would make the step longer" in found) == (name in tight)
        assert "critical path" not in found


@pytest.mark.few(2)
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PLANS)
def test_every_task_is_explained_as_explain_does_and_drawn_with_its_edges(name, width, chromium, tmp_path):
    plan = PLANS[name]()
    graph, schedule, _ = plan.priced
    names, begin = [graph.name(t) for t in range(len(graph))], plan.timeline.begin
    edges = {(graph.name(p), graph.name(t)) for t in range(len(graph)) for p in graph.preds[t]}
    with opened(chromium, written(tmp_path, Shown.of(plan)), ready="window.page", width=width) as tab:
        said = tab.evaluate("page.plans[0].predicted.names.map((name) => page.explained(name))")
        drawn = tab.evaluate("[...document.querySelectorAll('#graph path')].map((e) => [e.dataset.from, e.dataset.to])")
        assert sorted(map(tuple, drawn)) == sorted(edges)
        boxes = tab.evaluate("""[...document.querySelectorAll('#graph g')].map((g) => {
            const r = g.querySelector('rect').getBBox(); return [g.dataset.task, r.x, r.y]; })""")
        assert sorted(b[0] for b in boxes) == sorted(names) == sorted(one["task"] for one in said)
        assert len({(x, y) for _, x, y in boxes}) == len(boxes), "no task covers another"
        height = {task: y for task, _, y in boxes}
        assert max(height[t] for t in height if "F" in t) < min(height[t] for t in height if "F" not in t)
        task = boxes[-1][0]
        tab.locator(f"#graph g[data-task='{task}']").click()
        assert tab.evaluate("page.chosen()") == task
        assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    for one in said:
        found = explain(graph, schedule, plan.cost, one["task"])
        for what in ("lane", "lane_before", "lane_after"):
            assert one[what] == getattr(found, what)
        assert one["label"] == found.label.replace("(", "").replace(")", "")
        for what in ("may_start", "start", "end", "must_end"):
            assert one[what] == getattr(found, what) - begin
        assert one["slack"] == pytest.approx(found.slack, abs=1e-9)
        assert one["needs"] == list(found.needs)
        assert sorted(one["needed_by"]) == sorted(found.needed_by)
        if not plan.synthetic:
            own = graph[graph.index(one["task"])]
            for what, buffers in (("reads", own.reads), ("writes", own.writes)):
                assert sorted(map(tuple, one[what])) == sorted((b.name, b.bytes) for b in buffers)


@pytest.mark.slow
@pytest.mark.parametrize(("micro_batches", "drawn"), [(166, True), (170, False)])
def test_a_graph_is_drawn_up_to_two_thousand_tasks(micro_batches, drawn, chromium, tmp_path):
    plan = pipelined("zb_h1", 4, micro_batches)
    with opened(chromium, written(tmp_path, Shown.of(plan)), ready="window.page") as tab:
        assert tab.locator("#graph g").count() == (len(plan.graph) if drawn else 0)
        assert tab.is_visible("#network") == drawn


@pytest.mark.slow
def test_the_page_of_the_arena_takes_any_name_and_no_two_units_on_one_axis(chromium, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    problems = [{"name": name, "ranks": 2, "micro_batches": 2, "about": "a_b", "unit": unit}
                for name, unit in (("board", "ms"), ("diagnosis", "ms"), ("curve", "ms"), ("arms", "us"))]
    for some in (problems[:3], problems):
        (tmp_path / "own.json").write_text(json.dumps(some))
        assert main(["arena", "own.json", "zb_h1", "gpipe", "--alone", "--html", "board.html"]) == 0
        with opened(chromium, tmp_path / "board.html", ready="window.page") as tab:
            heads = tab.locator("#arms p").all_inner_texts()
            assert heads == ["board", *(f"{problem['name']}: a_b" for problem in some)]
            shown = tab.locator("#plan option").all_inner_texts()
            assert shown == ["all"] * (len(some) == 3) + [f"{problem['name']}: zb_h1" for problem in some]
            tab.select_option("#plan", str(len(some) - 1))
            took = "7,000 us" if len(some) == 3 else "7 us"
            assert tab.evaluate("page.layout().rows[0].text") == f"predicted: makespan {took}"


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["curve", "one point", "timeline", "schedule"])
def test_a_pictures_lines_enclose_nothing_and_its_texts_are_inside(name, chromium, tmp_path):
    plan = PLANS["zb_h1"]()
    points = [(0.94366, 1.8351, "a"), (1.2911, 1.2025, "b")][: 1 if name == "one point" else 2]
    drawn = (timeline_svg(plan.timeline) if name == "timeline" else schedule_svg(plan.schedule) if name == "schedule"
             else curve_svg(points, "planned peak, MB", "predicted step, ms"))
    path = tmp_path / "picture.svg"
    path.write_text(drawn, encoding="utf-8")
    with opened(chromium, path) as tab:
        wrong = tab.evaluate("""() => {
            const box = document.documentElement.viewBox.baseVal;
            const outside = [...document.querySelectorAll("text")].filter((t) => { const b = t.getBBox();
              return b.x < 0 || b.y < 0 || b.x + b.width > box.width || b.y + b.height > box.height; });
            const filled = [...document.querySelectorAll("path")].filter((p) => { const b = p.getBBox();
              return b.width && b.height && getComputedStyle(p).fill !== "none"; });
            return [...outside, ...filled].map((e) => e.outerHTML); }""")
    assert wrong == []
