"""The playground's challenges, coach, runs and building blocks, in a real browser."""

from __future__ import annotations

from typing import Any

import pipelines
import pytest
from helpers import need
from playground import actions, beside, build, drag, figure, middle, middle_of, ours, ours_of, show, written

from minidl.core.schedule import Schedule
from minidl.schedulers import pipeline
from minidl.schedulers.ordered import Ordered
from minidl.schedulers.pipeline.optimal import optimal
from minidl.schedulers.pipeline.problem import Problem


def optimum(level: dict[str, Any]) -> Ordered:
    """The optimum of a challenge, with its proof in the notes."""
    need("ortools")
    placement = pipelines.place("optimal", level["ranks"], 1)
    slower = level.get("stages", [1] * level["ranks"])
    each = ([level.get(kind, 1) * times for times in slower] for kind in "FOW")
    cost = pipeline.costs(placement, *each, level.get("latency", 0))
    return optimal(Problem.of(placement, level["micros"], cost, level.get("peak")),
                   "span" if level["figure"] == "max_span" else level["figure"])


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_best_move_first_frees_memory_that_a_challenge_forbids(tab):
    tab.select_option("#level", "0")
    for _ in range(6):
        if "Solved!" not in tab.inner_text("#challenge"):
            tab.click("#best")
            assert "rank 0 then holds too much for a shorter time" in said(tab)
            tab.click("#doit")
    assert "Solved!" in tab.inner_text("#challenge")


@pytest.mark.slow
def test_ready_tasks_are_marked_while_one_drags(tab):
    x, y = middle(tab, "3W7")
    tab.mouse.move(x, y)
    tab.mouse.down()
    tab.mouse.move(*beside(tab, "3F1", -2), steps=5)  # rank 3 has run 3F0 and 3O0, and 3F1 waits for nothing else
    marked = tab.evaluate("[...document.querySelectorAll('#board .ready')].map((r) => r.parentNode.dataset.task)")
    assert sorted(marked) == ["3F1", "3W0"]
    tab.mouse.up()
    assert tab.locator("#board .ready").count() == 0


@pytest.mark.slow
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


@pytest.mark.slow
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
