"""Names, columns, and edges that follow from reads and writes alone."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from helpers import edge_pairs, planned, planned_graphs
from hypothesis import given
from hypothesis import strategies as st

from minidl.core.columns import LONG, Rows
from minidl.core.graph import GraphBuilder, Role, StorageSpec, TaskGraph
from minidl.core.schedule import Lane, Schedule
from minidl.core.tasks import (
    RECEIVES,
    SENDS,
    SUMS,
    GraphError,
    Kind,
    as_recorded,
    pack,
    parse_task,
    repack,
    task_name,
    unpack,
)


@st.composite
def identities(draw):
    """Any fields that a task can have."""
    kind = draw(st.sampled_from(list(Kind)))
    index = draw(st.integers(0, 2**10 - 1))
    return {"unit": draw(st.integers(0, 2**20 - 1)), "kind": kind,
            "micro_batch": 0 if kind in SUMS else draw(st.integers(0, 2**19 - 1)),
            "part": 0 if kind in SENDS + RECEIVES else index, "destination": index if kind in SENDS + RECEIVES else 0,
            "late": draw(st.integers(0, 1)), "iteration": draw(st.integers(0, 2**8 - 1))}


@given(identities())
def test_a_task_s_fields_its_key_and_its_name_are_one_and_the_same(fields):
    key = int(pack(**fields))
    assert key >= 0
    assert {name: getattr(unpack(key), name) for name in fields} == fields
    assert parse_task(task_name(key)) == key
    assert unpack(as_recorded(key)) == unpack(int(pack(**fields | {"late": 0, "iteration": 0})))
    assert int(repack(key, late=1, iteration=3)) == int(pack(**fields | {"late": 1, "iteration": 3}))


@given(identities(), identities())
def test_tasks_that_differ_have_names_that_differ(one, other):
    assert (task_name(pack(**one)) == task_name(pack(**other))) == (one == other)


def test_keys_pack_as_columns_too():
    columns = {"unit": [1, 2, 3, 4, 5], "kind": [Kind.F, Kind.RO, Kind.A, Kind.O, Kind.X],
               "micro_batch": [5, 0, 0, 1, 3], "part": [0, 0, 2, 1, 1],
               "destination": [0, 6, 0, 0, 0], "late": [1, 0, 0, 0, 0], "iteration": [0, 3, 0, 0, 0]}
    keys = pack(**columns)
    assert {name: getattr(unpack(keys), name).tolist() for name in columns} == columns
    assert [task_name(key) for key in keys] == ["1F5@1", "2RO0>6#3", "3A0/2", "4O1/1", "5X3/1"]


@pytest.mark.parametrize(("name", "says"), [
    ("4A2", "'4A2': a sum over ranks has no micro-batch; its part 2 is 4A0/2"),
    ("4AS1", "its part 1 is 4AS0/1"),
    ("2SF0", "'2SF0': the name of a message needs its destination, as in 2SF0>1"),
    ("3RO1", "as in 3RO1>1"),
    ("4W0@2", "'4W0@2': a task runs at most one step late, @1; iteration 2 is 4W0#2"),
    ("4W0>1", "only a message has a destination; part 1 is 4W0/1"),
    ("2SF0/1", "the name of a message needs its destination")])
def test_names_of_older_files_that_mean_nothing_now_say_what_to_write(name, says):
    with pytest.raises(GraphError) as error:
        parse_task(name)
    assert says in str(error.value)


@pytest.mark.parametrize("name",
                         ["", "F", "4", "4W", "W0", "4Z0", "4W0@", "4w0", "-1F0", "4W0 5F0", "4 W0", "4W-1",
                          "(2F3;5B1)", "4WU0", "4W0#1@1", "4W0#", "4A0/", "4A0/1/2", "2SF0>", "2SF0/0>1", "4W0@-1"])
def test_what_is_no_task_name_is_refused(name):
    with pytest.raises(GraphError, match=r"is not a task name; expected unit, kind, micro-batch"):
        parse_task(name)


@pytest.mark.parametrize(("name", "fields"), [
    (f"{2**20}F0", {"unit": 2**20}), (f"0F{2**19}", {"micro_batch": 2**19}), (f"0F0/{2**10}", {"part": 2**10}),
    (f"0SF0>{2**10}", {"kind": Kind.SF, "destination": 2**10}), (f"0F0#{2**8}", {"iteration": 2**8})])
def test_numbers_that_do_not_fit_a_key_are_refused(name, fields):
    what = max(fields, key=fields.get).replace("_", "-")
    with pytest.raises(GraphError, match=f"{what} .* is too large"):
        parse_task(name)
    with pytest.raises(GraphError, match=f"{what} .* is too large"):
        pack(**{"unit": 0, "kind": Kind.F} | fields)


@pytest.mark.parametrize(("fields", "says"), [
    ({"unit": -1, "kind": Kind.F}, "unit -1 is negative"),
    ({"unit": [0, 1], "kind": [Kind.A, Kind.SF], "part": [1, 1]}, "SF has no parts"),
    ({"unit": 0, "kind": [Kind.F, Kind.AS], "micro_batch": [3, 1]}, "AS has no micro-batch"),
    ({"unit": 0, "kind": [Kind.SF, Kind.F], "destination": 1}, "F has no destination")])
def test_fields_that_a_task_cannot_have_are_refused(fields, says):
    with pytest.raises(GraphError, match=says):
        pack(**fields)


def packed(**fields):
    """The keys, or what the error says."""
    try:
        return np.asarray(pack(**fields)).tolist()
    except GraphError as error:
        return str(error)


@pytest.mark.parametrize("kind", Kind)
def test_one_task_has_the_key_and_the_errors_of_an_array(kind):
    for name, values in (("micro_batch", (0, 3, 2**19)), ("part", (1, 2**10)), ("destination", (2, -1)),
                         ("late", (1, 2)), ("iteration", (5, 2**8)), ("unit", (2**20 - 1, 2**20))):
        for value in values:
            fields = {"unit": 7, "kind": kind, name: value}
            every = packed(**{key: np.array([number]) for key, number in fields.items()})
            assert packed(**fields) == (every[0] if isinstance(every, list) else every)
    assert type(pack(7, kind)) is np.int64


@given(planned_graphs(tasks=14, buffers=5))
def test_edges_are_those_that_the_last_write_of_a_buffer_and_the_reads_since_then_need(graph):
    """A read waits for the last write; a write for the reads since then, or, if there are none, for the last write."""
    wanted, writer, readers = set(), {}, defaultdict(set)
    for t in range(len(graph)):
        reads, writes = (set(rows[t].tolist()) for rows in (graph.reads, graph.writes))
        wanted |= {(writer[b], t) for b in reads | {b for b in writes if not readers[b]} if b in writer}
        wanted |= {(reader, t) for b in writes for reader in readers[b]}
        for b in reads:
            readers[b].add(t)
        for b in writes:
            writer[b], readers[b] = t, set()
    edges = edge_pairs(graph)
    assert edges == sorted(wanted, key=lambda edge: edge[::-1])
    assert graph.edges == len(edges)
    assert sorted((s, int(t)) for s in range(len(graph)) for t in graph.succs[s]) == sorted(edges)


def test_views_tell_what_their_rows_hold():
    builder = GraphBuilder()
    w, x = builder.buffer("w", 8, Role.PARAMETER), builder.buffer("x", 4)
    builder.unit_names[3] = "head"
    builder.task(3, Kind.W, 2, part=4, late=1, iteration=1, reads=[x, w, x], writes=[w], flops=5.0, nbytes=12)
    graph = builder.build()
    (task,) = graph
    assert (task.unit, task.kind, task.micro_batch, task.part, task.destination, task.late,
            task.iteration) == (3, Kind.W, 2, 4, 0, True, 1)
    assert (task.flops, task.bytes) == (5.0, 12)
    assert (task.name, str(task), task.label, task.launches) == ("3W2/4@1#1", "3W2/4@1#1", "3W2/4@1#1 (head)", ())
    assert [(b.name, b.bytes, b.role) for b in task.reads] == [("w", 8, Role.PARAMETER), ("x", 4, Role.ACTIVATION)]
    assert [b.shape for b in task.writes] == [(8,)]
    assert graph["3W2/4@1#1"] == task == graph[-1]
    assert [r for r in Role if r.persistent] == [Role.PARAMETER, Role.STATE, Role.SCALAR, Role.FAR]


def test_tasks_are_found_by_their_keys():
    known = ["0W0", "1W1", "0F1", "1F0", "0W1", "1W0", "0F0", "1F1"]
    absent = ["0O0", "2F0", "0F2", "0B0", "0F0@1", "0F0/1", "0F0#1"]
    graph = planned(*((name, "", "") for name in known))
    found = graph.find(np.array([parse_task(name) for name in [*known[::-1], *absent]]))
    assert found.tolist() == [*range(7, -1, -1), *[-1] * len(absent)]


def test_an_unknown_task_is_told_with_the_nearest():
    graph = planned(("4W0", "", ""), ("4W1", "", ""), ("7F0", "", ""))
    with pytest.raises(GraphError, match=r"no task 4W2 in this graph; similar names: 4W[01]"):
        graph.index("4W2")
    with pytest.raises(IndexError):
        graph[3]


def test_a_task_named_twice_is_refused_where_the_graph_is_built():
    with pytest.raises(GraphError, match=r"task 1F0 appears twice"):
        planned(("0F0", "", ""), ("1F0", "", ""), ("1F0", "", ""))


def test_a_graph_without_tasks():
    graph = planned()
    assert (len(graph), graph.edges, list(graph)) == (0, 0, [])
    assert planned(("0F0", "", ""), ("1F0", "", "")).edges == 0, "nor buffers"
    schedule = Schedule.of(graph, {Lane(0): []}).validate(graph)
    assert schedule.waits(graph).tolist() == []
    with pytest.raises(GraphError, match=r"similar names: none"):
        graph.index("0F0")


def chain(n: int) -> TaskGraph:
    """0F0 -> 1F0 -> ..., as columns."""
    each = np.arange(n)
    reads = Rows(np.concatenate([[0], np.arange(n)]), np.arange(n - 1, dtype=np.int32))
    return TaskGraph(pack(each, Kind.F), np.ones(n), np.ones(n, np.int64),
                     reads, Rows(np.arange(n + 1), np.arange(n, dtype=np.int32)), np.full(n, 8),
                     np.full(n, 4, np.int8), each)


def test_long_graphs_take_the_compiled_way_and_little_memory():
    n = LONG + 10
    graph = chain(n)
    assert graph.edges == n - 1
    schedule = Schedule.of(graph, {Lane(0): range(0, n, 2), Lane(0, "b"): range(1, n, 2)})
    slots = schedule.validate(graph).slots
    assert slots[: len(range(0, n, 2))].tolist() == list(range(0, n, 2))
    columns = sum(getattr(graph, c).nbytes
                  for c in ("keys", "unit", "kind", "micro_batch", "late", "iteration", "flops", "bytes"))
    rows = sum(r.ptr.nbytes + r.ids.nbytes for r in (graph.reads, graph.writes, graph.preds, graph.succs))
    assert (columns + rows) / n < 120, "bytes a task"


# -------------------------------------------------------------------------------------------------------------- algebra
@given(planned_graphs(tasks=8), st.data())
def test_inserted_tasks_stand_where_they_are_asked_for(graph, data):
    """As a list with further rows."""
    new = data.draw(st.integers(0, 4))
    after = [data.draw(st.integers(0, len(graph) - 1)) for _ in range(new)]
    touched = [sorted(data.draw(st.sets(st.integers(0, 4)))) for _ in range(new)]
    keys = pack(np.full(new, 99), Kind.A, part=np.arange(new))
    found = graph.insert(np.array(after, int), keys, Rows.of(touched), Rows.of(touched[::-1]), np.arange(new))
    rows = [(int(graph.keys[t]), graph.reads[t].tolist(), graph.writes[t].tolist(), float(graph.flops[t]),
             int(graph.bytes[t])) for t in range(len(graph))]
    further = [(int(keys[i]), touched[i], touched[::-1][i], 0.0, i) for i in range(new)]
    wanted = [row for t, own in enumerate(rows)
              for row in (own, *(f for f, at in zip(further, after, strict=True) if at == t))]
    assert [(int(found.keys[t]), found.reads[t].tolist(), found.writes[t].tolist(), float(found.flops[t]),
             int(found.bytes[t])) for t in range(len(found))] == (wanted)


def test_joined_tasks_read_what_they_do_not_make_themselves():
    graph = planned(("0F0", "x", "a"), ("1F0", "a w", "b"), ("2F0", "b a", "c"))
    joined = graph.join(Rows.of([[0, 2], [1]]), pack(np.array([7, 8]), Kind.B))
    assert [t.name for t in joined] == ["7B0", "8B0"]
    assert [[b.name for b in t.reads] for t in joined] == [["x", "b"], ["a", "w"]]
    assert [[b.name for b in t.writes] for t in joined] == [["a", "c"], ["b"]]
    assert joined.bytes.tolist() == [16, 8]


def test_further_storages_have_a_buffer_each():
    graph = planned(("0F0", "x", "a"))
    grown = graph.with_storages([StorageSpec("w", (2, 3), "float32", 24, Role.PARAMETER)])
    new = grown.buffer(2)
    assert (new.name, new.shape, new.bytes, new.role, new.dtype) == ("w", (2, 3), 24, Role.PARAMETER, "float32")
    assert [t.name for t in grown] == ["0F0"]
