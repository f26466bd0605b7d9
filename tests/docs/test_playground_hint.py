"""The playground's hints: random plans run as in Python, and the page shows the draws."""

from __future__ import annotations

import json
import random
import shutil
import subprocess

import numpy as np
import pytest
from browser import opened, until
from helpers import PATIENCE, drawn
from playground import NAMES, PAGE, build

import minidl as ml
from minidl.core.machine import PlanError
from minidl.plans.ready import Picks
from minidl.pricing.cost import CostModel
from minidl.schedulers.pipeline import PipelineError

INVALID = "([field, is]) => document.querySelector(field).getAttribute('aria-invalid') === is"
FILES = [str(build.HERE / name) for name in ("simulator.js", "hint.js")]


def a_case(rng: random.Random) -> tuple[list, dict[str, float]] | None:
    """A plan as a hint with drawn times, and when each task ends; None if the policy does not take the numbers."""
    name, ranks, micros = rng.choice(NAMES), rng.choice([2, 3, 4]), rng.choice([4, 6, 8])
    times = rng.choice([1.0, 0.7]), rng.choice([1.0, 1.3]), rng.choice([1.0, 0.4])
    latency, cap = rng.choice([0.0, 0.25, 1.0]), rng.choice([None, None, 3, 5, "2p-s"])
    told = CostModel.given(*times, latency), ml.Machine(ranks)
    try:
        own = ml.plan(ml.Pipeline(micros), name, *told)
        hint = Picks.of(ml.plan(ml.Pipeline(micros), name, *told, order="hint", cap=cap))
    except (PlanError, PipelineError):
        return None
    duration = hint.drawn(0.5, rng.randrange(1000))
    ends = hint.play(duration).end
    each = {hint.graph.name(t): float(duration[t]) for t in range(len(ends))}
    return ([own.schedule.to_csv(), ranks, micros, *times, latency, cap, each],
            {hint.graph.name(t): float(end) for t, end in enumerate(ends)})


@pytest.mark.hypothesis
@pytest.mark.may_skip
def test_tasks_end_as_in_python(tmp_path):
    node = shutil.which("node") or pytest.skip("node is not installed")
    rng, found = random.Random(3), list[tuple]()
    while len(found) < drawn(68):
        if (case := a_case(rng)) is not None:
            found.append(case)
    script = tmp_path / "hint.js"
    script.write_text(f"""const [S, H] = {json.dumps(FILES)}.map(require);
    console.log(JSON.stringify({json.dumps([case for case, _ in found])}.map((
            [csv, p, m, F, O, W, latency, cap, each]) => {{
        const proved = S.prove(S.read(csv), p, m), k = proved.place.stages / p;
        const times = {{F: F * k, O: O * k, W: W * k, latency}};
        const all = H.capped(proved, times, cap === null ? null : cap === "2p-s" ? (s) => 2 * p - s : () => cap);
        const admitted = H.admissions(all.proved, all.caps), plain = H.durations(all.proved, times);
        const pairs = [...H.chains(all.proved, false), ...admitted, ...H.gaps(all.proved, plain, latency, admitted)];
        const own = H.play(all.proved, plain, latency, H.chains(all.proved, true));
        const same = H.play(all.proved, plain, latency, pairs);
        const drawn = Float64Array.from(all.proved.names, (name) => each[name]);
        const run = H.play(all.proved, drawn, latency, pairs);
        return [own.makespan, same.makespan, Object.fromEntries(all.proved.names.map((name, t) => [name, run.end[t]]))];
    }})));""")
    done = subprocess.run([node, str(script)], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    for (own, same, theirs), (case, ends) in zip(json.loads(done.stdout), found, strict=True):
        assert same == pytest.approx(own), "without spread a hint is the order"
        assert theirs.keys() == ends.keys()
        assert [theirs[name] for name in ends] == pytest.approx([*ends.values()], abs=1e-9), case[:8]


def numbers(tab) -> dict[str, list[float]]:
    tab.wait_for_selector("#varied tr[data-way=hint]")
    return {way: [float(cell) for cell in tab.locator(f"#varied tr[data-way={way}] td").all_inner_texts()[1:]]
            for way in ("own", "fixed", "hint")}


def test_the_page_draws_times(tab):
    """Without spread all rows are equal; with a larger cap the hint is faster than the fixed order at that cap."""
    tab.select_option("#policy", "gpipe")
    tab.focus("#sigma")
    tab.keyboard.press("Control+a")
    tab.keyboard.type("0")
    until(tab, "document.querySelector('#varied tr[data-way=hint] td:last-child')?.innerText === '1.000'")
    assert numbers(tab)["own"] == numbers(tab)["hint"]
    tab.select_option("#policy", "one_f_one_b")
    tab.fill("#sigma", "0.3")
    tab.select_option("#cap", "2p-s")
    until(tab, "+document.querySelector('#varied tr[data-way=hint] td:last-child')?.innerText < 0.97")
    found = numbers(tab)
    assert found["hint"][0] < found["fixed"][0]
    assert tab.locator("#drawn g").count() == 2 * sum(map(len, tab.evaluate("playground.state.plan"))) > 0
    first = tab.inner_html("#drawn")
    tab.focus("#draw")
    tab.keyboard.press("ArrowUp")
    until(tab, "(before) => document.getElementById('drawn').innerHTML !== before", arg=first)
    assert "draw=2" in tab.evaluate("location.hash")
    for field, value, says in (("#draw", "101", "a draw from 1 to 100"), ("#sigma", "-1", "a spread from 0 to 2")):
        before = tab.input_value(field)
        tab.fill(field, value)
        until(tab, "(says) => document.getElementById('varied').innerText.includes(says)", arg=says)
        until(tab, INVALID, arg=[field, "true"])
        tab.fill(field, before)
        until(tab, INVALID, arg=[field, "false"])
    tab.select_option("#policy", "dualpipe")
    until(tab, "document.getElementById('varied').innerText.includes('tasks in pairs')")


@pytest.mark.slow
def test_draws_on_a_phone_and_in_the_address(chromium):
    with opened(chromium, PAGE, ready="window.playground", width=390,
                fragment="#policy=one_f_one_b&ranks=4&micros=8&chunks=1&sigma=0.6&cap=2p-s&draw=7") as tab:
        there = numbers(tab)
        assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "it fits the phone"
        assert [tab.input_value(field) for field in ("#sigma", "#cap", "#draw")] == ["0.6", "2p-s", "7"]
    with opened(chromium, PAGE, ready="window.playground",
                fragment="#policy=one_f_one_b&ranks=4&micros=8&sigma=0.6&cap=2p-s") as tab:
        assert numbers(tab) == there, "equal draws on every machine"
        assert np.isfinite([*there.values()]).all()
