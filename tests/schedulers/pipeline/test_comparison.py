"""A policy as a comparison of two tasks of a rank: kept exactly, or refused in one line."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pipelines
import pytest
from command_line import refusal, run_json
from helpers import ROOT, drawn
from hypothesis import given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl.core.placement import PipelineError
from minidl.core.tasks import unpack
from minidl.schedulers.pipeline import price
from minidl.schedulers.pipeline.comparison import RankTask, compared, needed
from minidl.system.loading import function_of

EXAMPLE = ROOT / "docs" / "extend" / "comparison.py"


def example(name: str) -> Any:
    return function_of(f"{EXAMPLE}:{name}")


def position(schedule: ml.Schedule) -> Any:
    """A comparison that reproduces an order: it compares the places of two tasks."""
    own = unpack(schedule.keys)
    at = {(kind, stage, micro_batch): i for i, (kind, stage, micro_batch) in enumerate(zip(
        own.kind.tolist(), own.unit.tolist(), own.micro_batch.tolist(), strict=True))}
    number = {"F": 0, "O": 1, "W": 2, "B": 3}

    def place(task: RankTask) -> int:
        return at[number[task.kind], task.stage, task.micro_batch]

    return lambda a, b: place(a) < place(b)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (1, 3), (2, 1), (2, 5), (3, 3), (4, 2), (4, 9), (5, 7)])
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_gpipe_and_1f1b_as_comparisons(name: str, ranks: int, micro_batches: int) -> None:
    cost = ml.CostModel.given(1.0, 1.5, 0.5, 0.3)
    mine, ours = (pipelines.plan(policy, ranks, micro_batches, cost) for policy in (example(name), name))
    assert mine.schedule.to_csv() == ours.schedule.to_csv()
    assert price(mine) == price(ours)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("latency", [0, 0.1, 0.25, 0.5, 0.7, 1])
def test_zb_h2_hides_a_link_of_this_latency(ranks: int, latency: float) -> None:
    cost, m = ml.CostModel.given(1.0, 1.0, 1.0, latency), 4 * ranks + 2
    mine = pipelines.plan(compared(example("zero_bubble")), ranks, m, cost)
    ours = pipelines.plan("zb_h2", ranks, m, cost, hop=latency)
    assert mine.schedule.to_csv() == ours.schedule.to_csv()
    found = price(ours)
    assert found.max_span == pytest.approx(3 * m)  # no bubble
    assert max(found.peak_activations) == 1 + (ranks - 1) * np.ceil(2 * (1 + latency))
    published = price(pipelines.plan("zb_h2", ranks, m, cost))
    assert published.max_span == pytest.approx(3 * m + (ranks - 1) * 2 * latency)  # the formula of its docstring


@pytest.mark.parametrize(("hop", "says"), [
    (-1, "hop is -1"), (float("nan"), "hop is nan"), (1e9, "hop is"),
    (1.0, "needs at least 9 micro-batches for 3 ranks, not 8")])
def test_a_hop_that_cannot_be(hop: float, says: str) -> None:
    with pytest.raises(PipelineError, match=says):
        pipelines.plan("zb_h2", 3, 8, hop=hop)


@pytest.mark.parametrize(("name", "chunks"), [
    ("zb_h1", 1), ("zb_h2", 1), ("fast_forward", 1), ("interleaved", 2), ("looped_bfs", 2), ("interleaved_zb", 2)])
def test_any_order_can_be_said_as_a_comparison(name: str, chunks: int) -> None:
    ours = pipelines.plan(name, 3, 6, chunks=chunks)
    fused = name in ("interleaved", "looped_bfs")
    mine = pipelines.plan(compared(position(ours.schedule), fused=fused), 3, 6, chunks=chunks)
    assert mine.schedule.to_csv() == ours.schedule.to_csv()


@pytest.mark.parametrize(("placement", "chunks"), [("wave", 2), ("bidirectional", 2), ("contiguous", 2)])
def test_a_task_knows_its_rank_and_chunk(placement: str, chunks: int) -> None:
    seen = set()

    def before(a: RankTask, b: RankTask) -> bool:
        seen.update({(a.stage, a.micro_batch, a.rank, a.chunk), (b.stage, b.micro_batch, b.rank, b.chunk)})
        assert a.rank == b.rank
        return False

    plan = pipelines.plan(compared(before, placement, chunks, chunks_fixed=True), 2, 4)
    stages = plan.placement.stages
    assert len(seen) == 4 * stages
    for stage, micro_batch, rank, chunk in seen:
        assert rank == plan.placement.rank(stage, micro_batch, 4)
        assert 0 <= chunk < chunks
    by_chunk = {(rank, chunk): stage for stage, micro_batch, rank, chunk in seen if micro_batch == 0}
    assert all(by_chunk[rank, 0] < by_chunk[rank, 1] for rank in range(2) if (rank, 1) in by_chunk)


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_left_open_runs_as_soon_as_it_can(ranks: int) -> None:
    cost = ml.CostModel.given(1.0, 1.4, 0.7, 0.2)
    free = pipelines.plan(compared(lambda a, b: False), ranks, 5, cost)
    assert free.schedule.to_csv() == pipelines.plan("fast_forward_greedy", ranks, 5, cost).schedule.to_csv()


def test_it_need_not_be_transitive() -> None:
    """As in Shardy MPMD, 1F1B compares neighbours alone: B of i with F of i + p - s, and consecutive micro-batches."""
    def neighbours(a: RankTask, b: RankTask) -> bool:
        ahead = a.problem.ranks - a.rank
        if a.kind == b.kind:
            return b.micro_batch == a.micro_batch + 1
        first, other, gap = (a, b, ahead) if a.kind == "B" else (b, a, ahead - 1)
        return other.micro_batch == first.micro_batch + gap

    mine = pipelines.plan(compared(neighbours, fused=True), 4, 9)
    assert mine.schedule.to_csv() == pipelines.plan("one_f_one_b", 4, 9).schedule.to_csv()


@settings(max_examples=drawn(30))
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), st.integers(0, 2**32 - 1), st.booleans(),
       st.floats(0, 1))
def test_random_answers_are_kept_or_refused(ranks: int, micro_batches: int, chunks: int, seed: int, fused: bool,
                                            share: float) -> None:
    """The result is a legal plan that keeps all answers, or a circle whose edges are answers or data."""
    rng = np.random.default_rng(seed)
    rank_of, said = {}, {}

    def before(a: RankTask, b: RankTask) -> bool:
        for task in (a, b):
            kind = {"F": 0, "O": 1, "B": 1, "W": 2}[task.kind]
            likely = task.micro_batch + 2 * kind + rng.random() * 3 * share  # mostly legal
            rank_of.setdefault(str(task), likely)
        return said.setdefault((str(a), str(b)), bool(rank_of[str(a)] < rank_of[str(b)] and rng.random() < 0.8))

    try:
        plan = pipelines.plan(compared(before, fused=fused), ranks, micro_batches, chunks=chunks)
    except PipelineError as error:
        text = str(error)
        assert "a circle: " in text
        edges = text.partition("a circle: ")[2].split(", ")
        ends = []
        graph = ml.schedulers.pipeline.stage_graph(ranks * chunks, micro_batches, fused)
        for edge in edges:
            first, word, second = edge.split()
            if word == "before":
                assert said[first, second]
                ends.append((first, second))
            else:
                assert graph.index(second) in graph.preds[graph.index(first)]
                ends.append((second, first))
        assert all(one[1] == two[0] for one, two in zip(ends, ends[1:] + ends[:1], strict=True))
        return
    for lane in range(len(plan.schedule.lanes)):
        place = {name: i for i, name in enumerate(plan.schedule.names(lane))}
        for a, b in permutations(place, 2):
            if said[a, b]:
                assert place[a] < place[b]


BAD = """
def circle(a, b):  # 0 before 1 before 2 before 0
    return a.kind == b.kind == "F" and a.micro_batch < 3 and b.micro_batch == (a.micro_batch + 1) % 3

def both(a, b):
    return True

def data(a, b):
    return (a.kind, b.kind) == ("O", "F")

def nothing(a, b):
    pass

def number(a, b):
    return a.micro_batch - b.micro_batch

def failing(a, b):
    return a.device == b.device

def dividing(a, b):
    return 1 / 0 > 1

def raising(a, b):
    raise ValueError("I do not know")

def wide(a, b, width: int = 1):
    return False

def three(graph, cost, machine):
    return None

def needed(a, b, *, depth):
    return a.micro_batch + depth < b.micro_batch
"""


@pytest.mark.parametrize(("name", "says"), [
    ("circle", "circle: the comparison makes a circle: 0F0 before 0F1, 0F1 before 0F2, 0F2 before 0F0"),
    ("both", "both: it says both that 0F0 is before 0O0 and that 0O0 is before 0F0"),
    ("data", "data: the comparison and the data make a circle: 0O0 needs 0F0, 0O0 before 0F0"),
    ("nothing", "nothing: of 0F0 and 0O0 it says None; a comparison of two tasks says True or False"),
    ("number", "number: of 0F0 and 0O0 it says 0;"),
    ("failing", "own.py:failing failed: AttributeError: 'RankTask' object has no attribute 'device' (own.py, line "),
    ("dividing", "own.py:dividing failed: ZeroDivisionError: division by zero (own.py, line "),
    ("raising", "own.py:raising failed: ValueError: I do not know (own.py, line "),
    ("wide --scheduler-arg width=x", "width is 'x'; it must be a whole number"),
    ("wide --scheduler-arg depth=1", "wide takes no argument 'depth'; it takes fused, width, lag, cap"),
    ("wide --activation-cap 1", "activations"),
    ("three", "three has 3 arguments; for a pipeline give a function of the problem, or of two tasks"),
    ("needed", "missing 1 required keyword-only argument: 'depth'")])
def test_what_cannot_be_kept_is_one_line(name: str, says: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(BAD)
    assert says in refusal(capsys, "simulate", "--ranks", "2", "--micro-batches", "4", "--scheduler",
                           *f"own.py:{name}".split())


def test_a_circle_may_go_through_several_ranks() -> None:
    def crossed(a: RankTask, b: RankTask) -> bool:  # each rank alone is possible
        asked = (a.kind, a.micro_batch), (b.kind, b.micro_batch)
        return asked == ((("O", 0), ("F", 1)) if a.rank == 0 else (("F", 1), ("O", 0)))

    with pytest.raises(PipelineError, match="crossed: the comparison and the data make a circle: 0O0 needs 1O0, "
                                            "0O0 before 0F1, 1F1 needs 0F1, 1F1 before 1O0"):
        pipelines.plan(compared(crossed), 2, 2)


def test_its_options_and_its_kinds() -> None:
    assert [*map(needed, (lambda a, b: True, lambda a, b, c=1, *, d: True))] == [2, 2]
    assert [*map(needed, (lambda a: True, lambda a, b=1: True, lambda a, b, c: True, min))] == [1, 1, 3, 0]

    def late(a: RankTask, b: RankTask, by: int = 0) -> bool:
        return a.kind == "O" and b.kind == "W" and a.micro_batch == b.micro_batch + by

    free, kept = (pipelines.plan(compared(late), 1, 4, by=by).schedule.names(0) for by in (0, 2))
    assert free.index("0W0") > free.index("0O0")
    assert kept.index("0W0") > kept.index("0O2")
    with pytest.raises(ml.core.machine.PlanError, match="compares tasks of a pipeline: give --parallel pipeline"):
        ml.schedulers.registry.of_function("late", late, "none")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gpipe", "zero_bubble"])
def test_a_network_trains_under_it_with_the_same_bits(name: str, capsys: Any) -> None:
    code, found = run_json(capsys, "compare", "--model", "mlp", "--model-arg", "hidden=16", "--batch-size", "8",
                           "--costs", "analytic", "--parallel", "pipeline", "--ranks", "2", "--micro-batches", "8",
                           "--steps", "2", "--schedulers", f"one_f_one_b,{EXAMPLE}:{name}")
    assert (code, found["bit_identical"]) == (0, True)
