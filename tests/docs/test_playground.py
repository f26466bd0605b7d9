"""docs/playground.html in a real browser: the plans of today, the gallery, dragging, typing, links."""

from __future__ import annotations

import json
import random
import shlex
from typing import Any

import pipelines
import pytest
from browser import opened, until
from playground import NAMES, PAGE, beside, build, drag, figure, middle, middle_of, ours, ours_of

from minidl.cli import main
from minidl.core.schedule import Schedule
from minidl.passes.sweeps import BACKWARD
from minidl.schedulers import find, names
from minidl.views.page import Shown


def test_the_page_holds_the_plans_of_today(still):
    """A sample of them; all are there. After a change to a policy: python docs/playground/build.py."""
    plans = still.evaluate("playground.plans")
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


def test_the_page_has_the_sentences_of_today():
    """Of every policy and method. After a change of one: python docs/playground/build.py."""
    line = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("const DATA = "))
    data, _ = json.JSONDecoder().raw_decode(line.removeprefix("const DATA = "))
    assert {entry["name"]: entry["about"] for entry in data["methods"]} == {
        name: build.about(name.partition(",")[0]) for name in build.METHODS}
    assert {entry["name"]: entry["about"] for entry in data["gallery"]} == {
        name: find(name).about for name in names("pipeline")}


def test_the_page_says_how_to_read_it_and_its_gallery_shows_every_policy_with_its_figures(still):
    assert "2F3 is the forward (F) of stage 2 for micro-batch 3." in still.inner_text("header")
    assert "`" not in still.inner_text("#gallery")
    cards = {c.get_attribute("data-policy"): c.inner_text() for c in still.locator("#gallery .card").all()}
    assert list(cards) == list(pipelines.POLICIES)
    for entry in build.gallery():
        text = " ".join(cards[entry["name"]].split())
        assert entry["about"].replace("`", "") in text
        if entry["bubble"] is not None:
            assert f"bubble {100 * entry['bubble']:.1f} %, peak {round(entry['peak'], 4):g}" in text


@pytest.mark.slow
def test_the_gallery_shows_all_other_methods_with_commands_that_run(still, tmp_path):
    """Each that computes something else than the recorded step, and what hides exchanges. After a change: python
    docs/playground/build.py."""
    own = {name.partition(",")[0] for name in build.METHODS} - {"hide"}
    assert own == {*BACKWARD, *names("none"), *names("data")} - {"exact", *names("none", True), *names("data", True)}
    shown = still.evaluate("DATA.methods")
    assert shown == build.methods()
    cards = {c.get_attribute("data-policy"): c for c in still.locator("#methods .card").all()}
    assert list(cards) == list(build.METHODS)
    for entry in shown:
        card, rows = cards[entry["name"]], 1 + max(task[0] for task in entry["tasks"])
        assert entry["about"].replace("`", "") in " ".join(card.inner_text().split())
        assert card.locator("svg rect").count() == rows + len(entry["tasks"])
        command = shlex.split(card.locator("code").last.inner_text())
        assert main([*command[1:], "--svg", str(tmp_path / "picture.svg")]) == 0
        assert (tmp_path / "picture.svg").stat().st_size > 1000


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


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["dualpipe", "hanayo"])
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
    until(tab, "document.getElementById('origin').textContent === 'A plan of your own.'")
    assert tab.inner_text("#verdict") == "valid on 4 ranks"
    assert figure(tab, "makespan") == f"{price['makespan']:g}"


@pytest.mark.few(1)
@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark(dark, chromium):
    with opened(chromium, PAGE, dark=dark, ready="window.playground") as tab:
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")


@pytest.mark.slow
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


def test_a_time_can_be_typed_key_by_key(tab):
    """A field that is empty or says 0 on the way to 0.5 keeps the time from before."""
    times = {"F": 1.0, "O": 1.0, "W": 1.0, "latency": 0.0}
    for field in ("O", "W", "latency"):
        tab.fill(f"#{field}", "0.7")
        wanted = ours_of("zb_h1", 4, 8, tuple((times | {field: 0.7}).values()))["makespan"]
        assert float(figure(tab, "makespan").split()[0]) == pytest.approx(wanted, abs=1e-4)
        tab.fill(f"#{field}", f"{times[field]:g}")
    seen = typed(tab, "F", "0.5")
    assert seen[:-1] == ["27"] * 3
    assert float(seen[-1]) == ours_of("zb_h1", 4, 8, (0.5, 1.0, 1.0, 0.0))["makespan"]
    assert tab.get_attribute("#F", "aria-invalid") == "false"
    assert set(typed(tab, "F", "-3")) == {seen[-1]}
    assert tab.get_attribute("#F", "aria-invalid") == "true", "-3 is no time"
    tab.keyboard.press("Tab")
    assert tab.get_attribute("#F", "aria-invalid") == "false", "the last time comes back"
    typed(tab, "F", "10000")
    assert tab.evaluate("document.querySelector('#board svg').width.baseVal.value") < 10000, "bounded"


@pytest.mark.slow
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


@pytest.mark.slow
def test_names_have_one_form(tab):
    for name, ranks, micros, W in (("interleaved", "4", "16", "1"), ("dualpipe", "4", "12", "1"),
                                   ("zb_h1", "4", "16", "0.3")):
        tab.select_option("#policy", name)
        tab.select_option("#ranks", ranks)
        tab.select_option("#micros", micros)
        tab.fill("#W", W)
        shown = tab.evaluate("""[...document.querySelectorAll('#board .task')].map((g) => [g.dataset.task,
            [...g.querySelectorAll('text')].map((t) => t.textContent).join(';')])""")
        assert len(shown) > 70
        assert all(task == text for task, text in shown), "each task has its whole name"


def test_slower_stages_are_typed_one_for_each(tab):
    tab.focus("#stages")
    for keys, makespan in (("1 2 1", "27"), (" 1", "47")):
        tab.keyboard.type(keys)
        assert tab.get_attribute("#stages", "aria-invalid") == ("true" if makespan == "27" else "false")
        assert (figure(tab, "makespan").split()[0] == "27") == (makespan == "27")


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_address_brings_the_plan_back(chromium):
    """Also on a phone."""
    def shown(tab: Any) -> list[Any]:
        return [tab.evaluate("[playground.state.plan, location.hash]"), figure(tab, "makespan"),
                tab.inner_text("#challenge"),
                *(tab.input_value(f"#{i}") for i in ("policy", "W", "latency", "stages", "other", "level"))]

    with opened(chromium, PAGE, ready="window.playground") as tab:
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
    for width, want in zip((390, 1280, 390, 1280), wanted, strict=True):
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
