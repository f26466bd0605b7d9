"""Plans of every kind, changed at random, are judged as a brute-force checker judges them (`brute_force`).

    python -m pytest tests/fuzz/test_judged_plans.py -q            some hundred plans
    SEED=7 PLANS=20000 python -m pytest tests/fuzz/test_judged_plans.py -q -m campaign -s

Both sides must be met: plans that hold after a change, and plans that do not. Seeds are printed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import brute_force
import numpy as np
import pipelines
import pytest
from helpers import Case, adam, recorded, replicas, sgd

import minidl as ml
from minidl import nn, optim, schedulers
from minidl.autograd.tape import micro_batch
from minidl.core.graph import GraphBuilder, TaskGraph
from minidl.core.schedule import Lane, Schedule, ScheduleError
from minidl.core.tasks import GraphError, Kind, unpack
from minidl.passes.boundary import cross_boundary, must_stay
from minidl.plans.memory import MemoryLimitError
from minidl.plans.program import Program, check_limit, lower
from minidl.pricing.cost import CostModel
from minidl.runtime.checking import random_schedule
from minidl.schedulers import pipeline
from minidl.schedulers.pipeline import PipelineError, proof
from minidl.schedulers.pipeline.proof import prove

COST = CostModel.analytic()
POLICIES = [n for n in sorted(pipelines.POLICIES) if n != "optimal" and not pipelines.policy(n).stale
            and not pipelines.policy(n).sliced]
MUTATIONS = 20  #: of each plan


@pytest.fixture(autouse=True)
def little_effort(monkeypatch):
    pipelines.little_effort(monkeypatch)


@dataclass
class Judged:
    """A plan's CSV, what minidl says of such a text (nothing, or what is wrong), and what the checker says."""

    what: str
    text: str
    ours: Callable[[str], Any]
    judge: Callable[[str], str]
    also: Callable[[Any], None] = lambda found: None  #: what else must agree where both hold it for valid


# ------------------------------------------------------------------------------------------------------------ mutations
Rows = list[list[str]]


def mutated(text: str, rng: np.random.Generator) -> str:
    """The plan with one change, or a few, each at one row or at two."""
    notes, header, table = text.partition("rank,lane,task\n")
    rows = [row.split(",", 2) for row in table.splitlines()]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        i, j = rng.integers(len(rows), size=2).tolist()
        rows = CHANGES[rng.integers(len(CHANGES))](rows, i, j, rng)
    return notes + header + "".join(f"{','.join(row)}\n" for row in rows)


def neighbours(rows: Rows, i: int, j: int, rng: np.random.Generator) -> Rows:
    """Two that follow each other on a lane change places."""
    near = next((k for k in range(i + 1, len(rows)) if rows[k][:2] == rows[i][:2]), i)
    rows[i], rows[near] = rows[near], rows[i]
    return rows


def places(rows: Rows, i: int, j: int, rng: np.random.Generator) -> Rows:
    """Two tasks, of any lanes, change places."""
    rows[i][2], rows[j][2] = rows[j][2], rows[i][2]
    return rows


def moved(rows: Rows, i: int, j: int, rng: np.random.Generator) -> Rows:
    rows.insert(max(0, i + int(rng.integers(-6, 7))), rows.pop(i))
    return rows


def other_lane(rows: Rows, i: int, j: int, rng: np.random.Generator) -> Rows:
    rows[i] = [*rows[j][:2], rows[i][2]]
    return rows


def other_rank(rows: Rows, i: int, j: int, rng: np.random.Generator) -> Rows:
    rows[i][0] = str(rng.integers(9))
    return rows


def permuted_ranks(rows: Rows, i: int, j: int, rng: np.random.Generator) -> Rows:
    """All ranks, their messages' lanes too, have other numbers."""
    to = rng.permutation(max(int(row[0]) for row in rows) + 1)
    return [[str(to[int(rank)]), *rest] for rank, *rest in rows]


def other_name(rows: Rows, i: int, j: int, rng: np.random.Generator) -> Rows:
    """A lane, or one task of it, has a lane of another name."""
    mine, whole = rows[i][:2], rng.random() < 0.5
    return [[row[0], "other", row[2]] if (row[:2] == mine if whole else k == i) else row for k, row in enumerate(rows)]


def dropped(rows: Rows, i: int, j: int, rng: np.random.Generator) -> Rows:
    return [row for k, row in enumerate(rows) if k != i] or rows


def doubled(rows: Rows, i: int, j: int, rng: np.random.Generator) -> Rows:
    return [*rows[:i], list(rows[j]), *rows[i:]]


def renamed(rows: Rows, i: int, j: int, rng: np.random.Generator) -> Rows:
    """A unit, a kind, a micro-batch, a part or destination, or being late becomes another."""
    unit, kind, number, late = brute_force.name_of(rows[i][2])
    match rng.integers(5):
        case 0:
            unit = max(0, unit + int(rng.choice([-1, 1])))
        case 1:
            kind = str(rng.choice(["F", "O", "W", "B", "U", "A", "A/1", "O/1", "SF>0", "RF>1", "SO>1", "RO>0"]))
        case 2:
            number = max(0, number + int(rng.choice([-1, 1])))
        case 3 if kind[-1].isdigit():
            kind = kind[:-1] + str(rng.integers(3))
        case _:
            late = 1 - late
    rows[i][2] = brute_force.text_of((unit, kind, 0 if kind[0] == "A" else number, late))
    return rows


def split_or_joined(rows: Rows, i: int, j: int, rng: np.random.Generator) -> Rows:
    """A backward in two, or two as one."""
    *lane, name = rows[i]
    if "B" in name:
        rows[i : i + 1] = [[*lane, name.replace("B", "O")], [*lane, name.replace("B", "W")]]
    elif "O" in name and (other := [*lane, name.replace("O", "W")]) in rows:
        rows[i] = [*lane, name.replace("O", "B")]
        rows.remove(other)
    return rows


def paired(rows: Rows, i: int, j: int, rng: np.random.Generator) -> Rows:
    """Two that follow each other as one action, or the other way round."""
    if rows[i][2].startswith("("):
        rows[i : i + 1] = [[*rows[i][:2], part] for part in rows[i][2].strip("()").split(";")]
    elif i + 1 < len(rows) and rows[i + 1][:2] == rows[i][:2] and "(" not in rows[i + 1][2]:
        rows[i : i + 2] = [[*rows[i][:2], f"({rows[i][2]};{rows[i + 1][2]})"]]
    return rows


def late_with_all_after(rows: Rows, i: int, j: int, rng: np.random.Generator) -> Rows:
    """A unit's W and U become late, or on time."""
    unit, *_ = brute_force.name_of(rows[i][2])
    for row in rows:
        if "(" not in row[2]:
            own, kind, number, late = brute_force.name_of(row[2])
            if own == unit and kind in "WU":
                row[2] = brute_force.text_of((own, kind, number, 1 - late))
    return rows


def of_one_task(change: Callable[..., Rows]) -> Callable[..., Rows]:
    """The change, but not of a row that is an action of two tasks."""
    return lambda rows, i, j, rng: rows if "(" in rows[i][2] else change(rows, i, j, rng)


CHANGES = [neighbours, neighbours, neighbours, places, moved, moved, other_lane, other_rank, permuted_ranks, other_name,
           dropped, doubled, paired, *map(of_one_task, (renamed, split_or_joined, late_with_all_after))]


# ---------------------------------------------------------------------------------------------------------------- kinds
def said(prove: Callable[[], Any]) -> tuple[str, Any]:
    """(what is wrong, what was proved)."""
    try:
        return "", prove()
    except ScheduleError as error:
        return error.message, None


def pipeline_of(rng: np.random.Generator) -> Judged | None:
    """Any synchronous policy, half of them with a cap about as large as they need, some with their
    messages as tasks."""
    name = str(rng.choice(POLICIES))
    p, m = int(rng.integers(1, 5)), int(rng.integers(1, 7))
    made = planned(name, p, m, rng)
    if made is None:
        return None
    schedule = pipeline.add_communication(made.graph, made.schedule)[1] if rng.random() < 0.4 else made.schedule
    cap, told = cap_near(made, rng), made.placement.chunks if rng.random() < 0.7 else None
    return judge_of(name, made, brute_force.Pipeline(p, m, told, cap), p, m, told, cap, schedule)


def judge_of(name: str, made: pipeline.PipelinePlan, checker: Any, p: int, m: int, chunks: int | None,
             cap: float | None, schedule: Schedule | None = None, **more: Any) -> Judged:
    """A plan for ranks, whose activations at the peak are compared too, and its waits if the checker counts them."""
    def agree(found: pipeline.PipelinePlan) -> None:
        np.testing.assert_allclose(found.peaks, checker.peaks)
        assert found.waits == getattr(checker, "waits", found.waits)

    return Judged(f"{name} p={p} m={m} chunks={chunks} cap={cap}", (schedule or made.schedule).to_csv(),
                  lambda text: pipelines.read_plan(pipeline.read_schedule(text), p, m, chunks, cap, **more),
                  checker.judge, agree)


def planned(name: str, p: int, m: int, rng: np.random.Generator, **options: Any) -> pipeline.PipelinePlan | None:
    chunks = None if pipelines.policy(name).chunks_fixed else int(rng.integers(1, 4))
    placement = pipelines.place(name, p, chunks)
    forward, output_grad, weight_grad = rng.integers(1, 5, (3, placement.stages)).astype(float)
    try:
        return pipelines.plan(name, p, m, pipeline.costs(placement, forward, output_grad, weight_grad,
                                                        float(rng.integers(0, 3))), chunks, **options)
    except PipelineError:
        return None


def cap_near(made: pipeline.PipelinePlan, rng: np.random.Generator) -> float | None:
    cap = max(made.peaks) - float(rng.choice([0, 0, 0.5, 1]))
    return cap if rng.random() < 0.5 and cap > 0 else None


def stale_of(rng: np.random.Generator) -> Judged | None:
    """Weights of older versions, or activations of which a part goes early: as plans of the policy that is named."""
    name = str(rng.choice(["pipedream", "pipedream_2bw", "paci", "layerpipe2", "zb_auto"]))
    p, m = int(rng.integers(1, 4)), int(rng.integers(1, 6))
    mini_batches = {"mini_batches": int(rng.integers(1, 4))}
    options = {"pipedream_2bw": mini_batches, "paci": mini_batches, "zb_auto": {"kept": 0.5}}.get(name, {})
    made = planned(name, p, m, rng, **options)
    if made is None:
        return None
    chunks, cap = made.placement.chunks, cap_near(made, rng)
    version = {"pipedream": lambda s, i: max(0, i - (p - s) + 1), "pipedream_2bw": lambda s, i: max(0, i // m - 1),
               "paci": lambda s, i: max(0, i - (p - s) + 1) // m,
               "layerpipe2": lambda s, i: max(0, i - 2 * (p - 1 - s // chunks)), "zb_auto": lambda s, i: 0}[name]
    checker = brute_force.Stale(p, made.micro_batches, chunks, cap, made.kept, m if "mini_batches" in options else 1,
                                version, lambda s: s // chunks, (lambda s, i: i // m) if name == "paci" else None)
    return judge_of(name, made, checker, p, m, chunks, cap, like=made)


def layerpipe_of(rng: np.random.Generator) -> Judged | None:
    p, m = int(rng.integers(1, 4)), int(rng.integers(1, 6))
    made = planned("layerpipe", p, m, rng, method=str(rng.choice(["intra", "inter"])))
    assert made is not None
    layers, cap = made.placement.stages, cap_near(made, rng)
    own = unpack(made.schedule.keys)
    unit, kind, batch, part = (c.tolist() for c in (own.unit, own.kind, own.micro_batch, own.part))
    rank = {(u, Kind(k).name + "/1" * h): int(made.placement.parts[k, h, u])
            for u, k, h in zip(unit, kind, part, strict=True)}
    delay = [m] * layers  # more than anything reads, where nothing tells it
    for u, k, i, version in zip(unit, kind, batch, made.versions.read.tolist(), strict=True):
        if version and k != Kind.W:
            delay[u] = i - version
    ring = [sum(b.startswith(f"weights {layer},") for b in made.graph.buffer_names) for layer in range(layers)]
    checker = brute_force.Parts(p, m, layers, rank, delay, ring, cap)
    return judge_of("layerpipe", made, checker, p, m, made.placement.chunks, cap, like=made)


def tasks_of(graph: TaskGraph) -> list[tuple[brute_force.Name, set[int], set[int]]]:
    return [(brute_force.name_of(graph.name(t)), set(graph.reads[t].tolist()), set(graph.writes[t].tolist()))
            for t in range(len(graph))]


def launches_of(graph: TaskGraph) -> dict[brute_force.Name, list[set[int]]]:
    """The storages that each launch of each task touches; those that none names count for all of them."""
    found = {}
    for (name, reads, writes), launches in zip(tasks_of(graph), graph.launches, strict=True):
        each = [{view.storage for view in launch.views} for launch in launches] or [set()]
        unnamed = {int(graph.buffer_storage[b]) for b in reads | writes}.difference(*each)
        found[name] = [own | unnamed for own in each]
    return found


def read_stages(schedule: ml.Schedule, graph: ml.TaskGraph, ranks: int, micro_batches: int, chunks: int,
                cap: float | None = None) -> pipeline.PipelinePlan:
    """The plan of a given order of the stages of a recorded network, proved."""
    machine = ml.Machine(ranks, activation_cap=cap)
    return prove(replace(proof.read_plan(schedule, machine, micro_batches, chunks, graph), cap=cap))


def network_of(rng: np.random.Generator) -> Judged | None:
    """A recorded network's stages, with their updates."""
    m, p, adam, tied = int(rng.integers(1, 4)), int(rng.integers(1, 4)), bool(rng.integers(2)), bool(rng.random() < 0.2)
    ml.seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    if tied:
        layers[3] = layers[0]
    parameters = list({id(q): q for layer in layers for q in layer.parameters()}.values())
    opt = optim.Adam(parameters, 0.1) if adam else optim.SGD(parameters, 0.1)

    def step(x: Any, y: Any) -> Any:
        for i in range(m):
            with micro_batch(i, 2 * i):
                h = x
                for layer in layers:
                    h = nn.relu(layer(h))
                loss = nn.cross_entropy(h, y)
                loss.backward()
        opt.step()
        return loss

    graph = ml.record(step, rng.standard_normal((2, 4)).astype("f"), np.array([0, 3]))
    name = str(rng.choice(["gpipe", "one_f_one_b", "zb_h1", "interleaved", "modulo_greedy", "fast_forward"]))
    chunks = None if pipelines.policy(name).chunks_fixed else int(rng.integers(1, 3))
    stages = pipelines.place(name, p, chunks).stages
    units = int(graph.unit.max()) + 1
    of = np.minimum(np.sort(rng.integers(0, stages, units)), stages - 1)
    of[: min(stages, units)] = np.arange(min(stages, units))
    of.sort()
    cut = pipeline.cut(graph, COST, stages, of)
    cap = float(rng.integers(1, 4)) if rng.random() < 0.3 else None
    try:
        text = ml.plan(graph, name, COST, ml.Machine(p),
                       **schedulers.find(name).known(chunks=chunks, stage_of_unit=of)).schedule.to_csv()
    except (PipelineError, GraphError) as error:
        # no plan of it holds: its tasks in the order of the graph, each on its stage's rank
        if "multiples" in str(error) or "has no task" in str(error):
            return None
        assert tied
        home = pipelines.place(name, p, chunks).table[0]
        text = Schedule.of(cut.graph,
                           {Lane(r): np.flatnonzero(home[cut.graph.unit] == r).tolist() for r in range(p)}).to_csv()
    checker = brute_force.Network(p, stages, tasks_of(cut.graph), cap)
    return Judged(f"network, {name} p={p} m={m} stages={stages} adam={adam} tied={tied} cap={cap}", text,
                  lambda text: read_stages(pipeline.read_schedule(text), cut.graph, p, m, stages // p, cap),
                  checker.judge, lambda found: np.testing.assert_allclose(found.peaks, checker.peaks))


def device_of(rng: np.random.Generator) -> Judged | None:
    """A recorded step on one device, in any legal order on some lanes; in half of them tasks are one step late."""
    plan = rng.choice(["linear", "relu", "tied", "residual", "norm", "gain"], int(rng.integers(0, 4))).tolist()
    graph = recorded(Case(plan, width=3, micro_batches=int(rng.integers(1, 3)), optimizer=sgd,
                          seed=int(rng.integers(99))))
    if len(set(graph.buffer_storage.tolist())) < len(graph.buffer_storage):
        return None
    crossing = np.zeros(len(graph), bool)
    if rng.random() < 0.6:
        stays = must_stay(graph)
        for task in np.flatnonzero(~stays & (rng.random(len(graph)) < 0.4)).tolist():
            more = [task]
            while more:
                crossing[more[-1]] = True
                more += [s for s in graph.succs[more.pop()].tolist() if not crossing[s]]
    schedule = random_schedule(cross_boundary(graph, np.flatnonzero(crossing)).body[0] if crossing.any() else graph,
                               int(rng.integers(1, 4)), rng)
    return Judged(f"one device, {plan}, {int(crossing.sum())} late", schedule.to_csv(),
                  lambda text: lower(graph, Schedule.from_csv(text)), device_checker(graph).judge,
                  lambda found: memory_holds(graph, found) if rng.random() < 0.2 else None)


def memory_holds(graph: TaskGraph, program: Program) -> None:
    """The peak is where the last storage ends, nothing alive is overwritten, and a limit below the peak is refused."""
    for part in program.parts:
        memory, own = part.memory, part.graph
        place = {s: (at, at + max(1, spec.bytes))
                 for s, (spec, at) in enumerate(zip(own.storages, memory.offset.tolist(), strict=True)) if at >= 0}
        assert max((end for _, end in place.values()), default=0) <= memory.arena_bytes
        given, kept = ({v.storage for v in views} for views in (own.inputs, own.outputs))
        lanes = brute_force.lanes_of(part.schedule.to_csv())
        assert not brute_force.overlap(lanes, tasks_of(own), launches_of(own), place, given, kept)
        assert memory.arena_bytes + sum(max(1, s.bytes) for s in own.storages if s.role.persistent) \
            <= program.peak_bytes
    names = [program.schedule.names(i) for i in range(len(program.schedule.lanes))]
    again = Schedule.from_names(dict(zip(program.schedule.lanes, names, strict=True)))
    check_limit(lower(graph, again), program.peak_bytes)
    with pytest.raises(MemoryLimitError):
        check_limit(lower(graph, again), program.peak_bytes - 1)


def device_checker(graph: TaskGraph) -> brute_force.Device:
    def buffers(views: Any) -> set[int]:
        storages = {v.storage for v in views}
        return {b for b, s in enumerate(graph.buffer_storage.tolist()) if s in storages}

    persistent = {b for b in range(len(graph.buffer_bytes)) if graph.buffer(b).role.persistent}
    return brute_force.Device(tasks_of(graph), persistent, buffers(graph.inputs), buffers(graph.outputs))


def data_parallel_of(rng: np.random.Generator) -> Judged | None:
    name = str(rng.choice(list(schedulers.names("data", exact=True))))
    layers = ("dropout", "linear", "relu", "linear", "relu", "linear", "relu")
    graph = recorded(Case(layers, optimizer=(sgd, adam)[rng.integers(2)]))
    plan = replicas(graph, name, None, lambda sizes: 1 + sum(sizes.values()) / 100, 1, buckets=2, part_bytes=60)
    return Judged(f"data-parallel, {name}", plan.schedule.to_csv(),
                  lambda text: lower(plan.graph, Schedule.from_csv(text)), device_checker(plan.graph).judge)


KINDS = {"pipeline": pipeline_of, "stale": stale_of, "layerpipe": layerpipe_of, "network": network_of,
         "device": device_of, "data_parallel": data_parallel_of}


# ---------------------------------------------------------------------------------------------------------------- tests
def judged(kind: str, plans: int, seed: int) -> Counter[bool]:
    """Judges as many changed plans of one kind; how many held, and how many did not."""
    print(f"{kind}: seed {seed}")
    rng = np.random.default_rng(seed)
    count: Counter[bool] = Counter()
    while count.total() < plans:
        case = KINDS[kind](rng)
        if case is None:
            continue
        for text in [case.text, *(mutated(case.text, rng) for _ in range(MUTATIONS))]:
            expected = case.judge(text)
            wrong, found = said(lambda text=text, case=case: case.ours(text))
            assert bool(wrong) == bool(expected), (
                f"seed {seed}, {case.what}: we say {wrong or 'valid'!r}, the checker {expected or 'valid'!r}\n{text}")
            if not wrong:
                case.also(found)
            count[not wrong] += 1
    print(f"{kind}: {count[True]} held, {count[False]} did not")
    return count


def races(plans: int, seed: int) -> Counter[bool]:
    """Waits left out, added or turned round, in small graphs on one or two ranks."""
    print(f"races: seed {seed}")
    rng = np.random.default_rng(seed)
    count: Counter[bool] = Counter()
    while count.total() < plans:
        builder = GraphBuilder()
        for b in range(4):
            builder.buffer(f"b{b}", 8)
        for unit in range(int(rng.integers(2, 9))):
            reads, writes = (rng.choice(4, int(rng.integers(0, 3)), replace=False).tolist() for _ in range(2))
            builder.task(unit, Kind.F, reads=reads, writes=writes)
        graph = builder.build()
        schedule = random_schedule(graph, int(rng.integers(1, 4)), rng)
        if rng.random() < 0.3:
            schedule = Schedule(tuple(Lane(int(rng.integers(2)), f"l{i}") for i in range(len(schedule.lanes))),
                                schedule.ptr, schedule.keys)
        lanes = brute_force.lanes_of(schedule.to_csv())
        for _ in range(MUTATIONS):
            waits = schedule.waits(graph).tolist()
            for _ in range(int(rng.integers(0, 3))):
                if waits and rng.random() < 0.6:
                    gone = waits.pop(int(rng.integers(len(waits))))
                    waits += [gone[::-1]] if rng.random() < 0.3 else []
                else:
                    waits.append(rng.choice(len(graph), 2, replace=False).tolist())
            expected = brute_force.race(lanes, tasks_of(graph), [
                (brute_force.name_of(graph.name(a)), brute_force.name_of(graph.name(b))) for a, b in waits])
            wrong, _ = said(lambda waits=waits, schedule=schedule, graph=graph: schedule.validate(
                graph, np.array(waits, np.int64).reshape(-1, 2)))
            assert bool(wrong) == bool(expected), (f"seed {seed}: we say {wrong or 'valid'!r}, the checker "
                                                   f"{expected or 'valid'!r}\n{schedule.to_csv()}\n{waits}")
            count[not wrong] += 1
    print(f"races: {count[True]} had none, {count[False]} did not hold")
    return count


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [*KINDS, "waits"])
def test_changed_plans_are_judged_as_by_brute_force(kind):
    count = judged(kind, 150, 1) if kind in KINDS else races(200, 1)
    assert min(count[True], count[False]) > 15


@pytest.mark.campaign
@pytest.mark.parametrize("kind", [*KINDS, "waits"])
def test_many_changed_plans_are_judged_as_by_brute_force(kind):
    seed, plans = (int(os.environ.get("SEED", np.random.SeedSequence().entropy % 2**32)),
                   int(os.environ.get("PLANS", "12000")) // 6)
    count = judged(kind, plans, seed) if kind in KINDS else races(plans, seed)
    assert min(count[True], count[False]) > 0.05 * count.total()
