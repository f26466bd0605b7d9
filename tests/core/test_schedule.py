"""A schedule is proved, compared, drawn and saved; each way to be wrong is told with its task and place."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import closure, edge_pairs, lane_pairs, planned, scheduled_graphs
from hypothesis import given
from hypothesis import strategies as st

from minidl.core.schedule import Lane, Schedule, ScheduleError
from minidl.core.tasks import SUMS, Kind, parse_task, unpack
from minidl.core.timeline import Timeline
from minidl.pricing.cost import CostModel

MAIN, SUB = Lane(0), Lane(0, "sub")


def two_layers():
    """0F -> 1F -> 1O -> 0W; 1W after 1F; each W before its U.

        0F0 -x-> 1F0 -y-> 1O0 -d-> 0W0 -g-> 0U0
                     y -> 1W0 -h-> 1U0
    """
    return planned(("0F0", "w", "x"), ("1F0", "x v", "y"), ("1W0", "x y", "h"), ("1O0", "v y", "d"), ("0W0", "d", "g"),
                   ("0U0", "w g", "w"), ("1U0", "v h", "v"))


def names(main, sub=""):
    return Schedule.from_names({MAIN: main.split(), SUB: sub.split()})


GOOD = names("0F0 1F0 1O0 0W0 0U0", "1W0 1U0")


# --------------------------------------------------------------------------------------------------------------- proofs
def test_validate_returns_the_schedule_with_the_unit_time_of_each_entry():
    schedule = GOOD.validate(two_layers())
    assert schedule.slots.tolist() == [0, 1, 2, 3, 4, 2, 3]
    assert (schedule.keys == GOOD.keys).all()
    assert schedule.grid() == ("0/main  0F0 1F0 1O0 0W0 0U0\n"
                               "0/sub   ·   ·   1W0 1U0 ·")


@pytest.mark.parametrize(("schedule", "message", "culprits"), [
    (names("0F0 1F0 1O0 0W0 0U0", "1W0"), "task 1U0 is missing", ("1U0",)),
    (names("0F0 1F0 1O0 0W0 0U0 1W0", "1W0 1U0"), "task 1W0 appears twice on 0/main, 0/sub", ("1W0",)),
    (names("0F0 1F0 1O0 0W0 0U0", "1W0 1W0 1U0"), "task 1W0 appears twice on 0/sub", ("1W0",)),
    (names("0F0 1F0 1O0 0W0 0U0 9F0", "1W0 1U0"), r"unknown task 9F0 on lane 0/main: the graph \(7 tasks\)", ("9F0",)),
    (names("0F0 1F0 1O0 0W0 0U0", "1W0@1 1U0"), "unknown task 1W0@1 on lane 0/sub", ("1W0@1",)),
    (names("1F0 0F0 1O0 0W0 0U0", "1W0 1U0"), "1F0 comes before 0F0 on lane 0/main but needs it: it reads x",
     ("0F0", "1F0")),
    (names("0F0 1F0 0W0 0U0 1O0", "1W0 1U0"), "0W0 comes before 1O0 on lane 0/main", ("1O0", "0W0")),
    (names("0F0 1F0 0W0 0U0", "1U0 1W0 1O0"), "1U0 comes before 1W0 on lane 0/sub", ("1W0", "1U0")),
    (names("0U0 0F0 1F0 0W0", "1O0 1W0 1U0"), "0U0 comes before 0F0 .* it overwrites w, which 0F0 reads",
     ("0F0", "0U0")),
    (names("0F0 0W0 1F0 0U0", "1O0 1W0 1U0"), "deadlock: .* waits for ", ("0W0", "1O0", "1F0")),
])
def test_what_is_wrong_is_told_with_the_grid_marked(schedule, message, culprits):
    with pytest.raises(ScheduleError, match=message) as caught:
        schedule.validate(two_layers())
    error = caught.value
    assert set(error.tasks) == set(culprits)
    assert "\n" not in error.message
    assert str(error) == error.message + "\n" + error.grid
    for name in culprits:
        assert (f"[{name}]" in error.grid) == (name in schedule.to_csv().replace("\n", ",").split(","))


def test_a_missing_wait_is_a_race_that_names_the_buffer():
    graph = two_layers()
    waits = GOOD.waits(graph)
    assert [(graph.name(a), graph.name(b)) for a, b in waits] == [("1W0", "1F0"), ("1U0", "1O0")]
    assert GOOD.validate(graph, waits).slots is not None
    with pytest.raises(ScheduleError, match=r"race: nothing orders 1W0 after [01]F0: it reads [xy]; add a wait"):
        GOOD.validate(graph, waits[1:])
    with pytest.raises(ScheduleError, match=r"race: nothing orders 1U0 after 1O0: it overwrites v, which 1O0 reads"):
        GOOD.validate(graph, waits[:1])
    with pytest.raises(ScheduleError, match=r"deadlock"):
        GOOD.validate(graph, [*waits, (graph.index("1F0"), graph.index("1U0"))])


def test_waits_do_not_take_the_place_of_messages():
    """Two ranks that wait for each other: with or without waits nobody can start."""
    graph = planned(("0F0", "", "a"), ("1F0", "a", "b"), ("2F0", "", "c"), ("3F0", "c", "d"))
    schedule = Schedule.from_names({Lane(0): ["3F0", "0F0"], Lane(1): ["1F0", "2F0"]})
    for waits in (None, np.empty((0, 2), int)):
        with pytest.raises(ScheduleError, match=r"deadlock: .*3F0 waits for 2F0"):
            schedule.validate(graph, waits)


def test_a_pair_starts_when_all_it_needs_is_there_and_shows_its_results_at_its_end():
    graph = planned(("0F0", "", "a"), ("1F0", "a", "b"), ("2F0", "", "c"))
    paired = Schedule.from_names({MAIN: ["(0F0;2F0)", "1F0"]}).validate(graph)
    assert paired.slots.tolist() == [0, 0, 1]
    with pytest.raises(ScheduleError, match=r"1F0 needs 0F0, but they run as one action, .*: it reads a"):
        Schedule.from_names({MAIN: ["(0F0;1F0)", "2F0"]}).validate(graph)
    with pytest.raises(ScheduleError, match=r"deadlock: 2F0 waits for 1F0 waits for 2F0"):
        Schedule.from_names({MAIN: ["(0F0;2F0)"], SUB: ["1F0"]}).validate(planned(
            ("0F0", "", "a"), ("1F0", "a", "b"), ("2F0", "b", "c")))


def test_what_runs_in_one_action_has_not_surely_ended():
    """So a memory plan gives the two of a pair places of their own."""
    graph = planned(("0F0", "", "a"), ("1F0", "", "b"), ("2F0", "", "c"))
    order = {MAIN: ["0F0", "1F0", "2F0"]}
    assert Schedule.from_names(order).clocks(graph).ordered(0, 1)
    clocks = Schedule.from_names({MAIN: ["(0F0;1F0)", "2F0"]}).clocks(graph)
    assert not clocks.ordered(0, 1)
    assert clocks.ordered(0, 2)
    assert clocks.ordered(1, 2)


def test_half_of_a_pair_is_no_pair():
    schedule = Schedule.from_names({MAIN: ["0F0", "(1F0;2F0)", "(3F0;4F0)"]})
    kept = schedule.only(planned(("0F0", "", "a"), ("2F0", "", "b"), ("3F0", "", "c"), ("4F0", "", "d")))
    assert kept.names(0) == ["0F0", "2F0", "(3F0;4F0)"]


def test_an_error_in_a_long_schedule_shows_the_part_around_its_culprit():
    graph = planned(*((f"{i}F0", "", f"b{i}") for i in range(200)))
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_names({MAIN: [f"{i}F0" for i in range(200)] + ["150F0"]}).validate(graph)
    assert "[150F0]" in caught.value.grid
    assert max(map(len, caught.value.grid.splitlines())) <= 110
    assert len(caught.value.grid.splitlines()) == 1


@given(scheduled_graphs())
def test_a_legal_schedule_is_proved_and_any_exchange_against_an_edge_is_refused(pair):
    graph, schedule = pair
    schedule.validate(graph)
    reach = closure(len(graph), edge_pairs(graph))
    ids = schedule.ids(graph)
    lane = schedule.lane_of_each()
    for i in range(len(ids) - 1):
        if lane[i] != lane[i + 1]:
            continue
        keys = schedule.keys.copy()
        keys[[i, i + 1]] = keys[[i + 1, i]]
        swapped = Schedule(schedule.lanes, schedule.ptr, keys)
        # legal if and only if edges and lane order close no circle
        whole = closure(len(graph), [*edge_pairs(graph), *lane_pairs(graph, swapped)])
        if whole.diagonal().any():
            with pytest.raises(ScheduleError, match=r"comes before|deadlock"):
                swapped.validate(graph)
        else:
            swapped.validate(graph)
            assert not reach[ids[i], ids[i + 1]]


@given(scheduled_graphs())
def test_slots_are_the_longest_ways(pair):
    graph, schedule = pair
    ids = schedule.ids(graph)
    pairs = [*edge_pairs(graph), *lane_pairs(graph, schedule)]
    slot = dict.fromkeys(range(len(graph)), 0)
    for _ in range(len(graph)):
        for a, b in pairs:
            slot[b] = max(slot[b], slot[a] + 1)
    assert [slot[t] for t in ids.tolist()] == schedule.validate(graph).slots.tolist()


# ---------------------------------------------------------------------------------------------------------------- waits
@given(st.sampled_from([1, 3]).flatmap(lambda ranks: scheduled_graphs(tasks=14, lanes=5, ranks=ranks)))
def test_waits_are_enough_and_each_is_needed_and_they_are_the_fewest(pair):
    """Within a rank: messages carry what goes between ranks."""
    graph, schedule = pair
    waits = schedule.waits(graph)
    lane = np.empty(len(graph), int)
    lane[schedule.ids(graph)] = schedule.lane_of_each()
    rank = schedule.rank_of_lane[lane]
    assert all(lane[a] != lane[b] and rank[a] == rank[b] for a, b in waits)
    schedule.validate(graph, waits)
    for gone in range(len(waits)):
        with pytest.raises(ScheduleError, match=r"race"):
            schedule.validate(graph, np.delete(waits, gone, axis=0))
    if rank.any():
        return
    # among waits that order nothing else there is one smallest set: what the transitive reduction has between lanes
    order = closure(len(graph), [*edge_pairs(graph), *lane_pairs(graph, schedule)])
    covers = order & ~(order.astype(int) @ order.astype(int) > 0)
    assert sorted((int(b), int(a)) for a, b in waits) == [(a, b) for a, b in np.argwhere(covers).tolist()
                                                          if lane[a] != lane[b]]


@given(scheduled_graphs(tasks=14, lanes=5))
def test_clocks_know_exactly_what_has_surely_ended(pair):
    graph, schedule = pair
    clocks = schedule.clocks(graph)
    order = closure(len(graph), [*edge_pairs(graph), *lane_pairs(graph, schedule)])
    every = np.arange(len(graph))
    known = clocks.ordered(every[:, None].repeat(len(graph), 1), every[None, :].repeat(len(graph), 0))
    assert np.array_equal(known, order)


# ------------------------------------------------------------------------------------------------------- text and files
LANE = st.builds(Lane, st.integers(0, 12), st.sampled_from(["main", "sub", "send 1", "a,b", 'say "x"', "comm"]))
TASK = st.builds(
    lambda u, k, m, i, late, t: f"{u}{k.name}{m * (k not in SUMS)}"
    + (f">{i}" if k >= Kind.SF else f"/{i}" * (i > 0)) + "@1" * late + f"#{t}" * (t > 0), st.integers(0, 9999),
    st.sampled_from(list(Kind)), st.integers(0, 99), st.integers(0, 9), st.booleans(), st.integers(0, 3))
ACTION = st.one_of(TASK, st.builds(lambda a, b: f"({a};{b})", TASK, TASK))


@given(st.dictionaries(LANE, st.lists(ACTION, min_size=1, max_size=6), max_size=5))
def test_csv_round_trip(lanes):
    schedule = Schedule.from_names(lanes)
    text = schedule.to_csv()
    again = Schedule.from_csv(text)
    assert again.lanes == schedule.lanes
    assert again.to_csv() == text
    assert ([again.names(i) for i in range(len(lanes))] == [schedule.names(i) for i in range(len(lanes))]
            == list(lanes.values()))
    assert text.splitlines()[0] == "rank,lane,task"
    assert Schedule.from_csv(text.replace("\n", "\r\n")).to_csv() == text


@pytest.mark.parametrize(("name", "value"), [
    ("plan.csv", GOOD), ("costs.json", CostModel(kinds={"F": 1.0})),
    ("trace.json", Timeline.of_tasks([MAIN], [parse_task("0F0")], [0], [0.0], [1.0]))])
def test_an_old_file_stays_when_a_new_one_cannot_be_written(name, value, tmp_path, monkeypatch):
    path = tmp_path / name
    value.save(path)
    old = path.read_bytes()
    type(value).load(path).save(path)
    assert path.read_bytes() == old

    def full(*_):
        raise OSError(28, "No space left on device")

    path.write_bytes(b"precious")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left"):
        value.save(path)
    assert path.read_bytes() == b"precious"
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(("text", "message"), [
    ("", "line 1: expected the header rank,lane,task"),
    ("rank,lane\n", "line 1: expected the header"),
    ("0,main,0F0\n", "line 1: expected the header"),
    ("rank,lane,task\n0,main\n", "line 2: expected 3 cells, found 2"),
    ("rank,lane,task\n0,main,0F0,1\n", "line 2: expected 3 cells, found 4"),
    ("rank,lane,task\n0,main,0F0\n\nx,main,1F0\n", "line 4: rank 'x'"),
    ("rank,lane,task\n-1,main,0F0\n", "line 2: rank '-1'"),
    ("rank,lane,task\n65536,main,0F0\n", r"line 2: rank 65536 is too large \(at most 65535\)"),
    ("rank,lane,task\n0,,0F0\n", "line 2: rank '0' and lane ''"),
    ("rank,lane,task\n0,main,frank\n", "line 2: 'frank' is not a task name"),
    ("rank,lane,task\n0,comm,1A3\n", "line 2: task '1A3': a sum over ranks has no micro-batch"),
    ("rank,lane,task\n0,main,\n", "line 2: '' is not a task name"),
    ("rank,lane,task\n0,main,0F0\n0,main,(1F0;2Z0)\n", "line 3: '2Z0' is not a task name"),
    ("rank,lane,task\n0,main,(2F3\n", "line 2: "),
    ("rank,lane,task\n0,main,2F3)\n", "line 2: "),
    ("rank,lane,task\n0,main,2F3;2B3\n", "line 2: "),
    ("rank,lane,task\n0,main,()\n", "line 2: "),
    ("rank,lane,task\n0,main,99999999F0\n", "line 2: .*unit 99999999 is too large"),
    ("rank,lane,task\n0,main,0F0\r0,main,1F0\n", "the plan"),
    ("rank,lane,task\n0,main," + "0" * 200_000 + "\n", "the plan"),
])
def test_a_plan_that_cannot_be_read_is_told_in_one_line(text, message):
    with pytest.raises(ScheduleError, match=message) as caught:
        Schedule.from_csv(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_file_that_is_no_text_is_refused_by_name(tmp_path):
    path = tmp_path / "plan.csv"
    path.write_bytes(b"\xff\xfe\x00rank")
    with pytest.raises(ScheduleError, match=r"plan\.csv"):
        Schedule.load(path)


def test_diff_tells_rows():
    other = names("0F0 1F0 1O0 0U0 0W0", "1W0 1U0")
    assert GOOD.diff(GOOD) == ""
    changed = [line for line in GOOD.diff(other).splitlines() if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert sorted(changed) in (["+0,main,0U0", "-0,main,0U0"], ["+0,main,0W0", "-0,main,0W0"])


def test_pairs_are_pairs_in_each_iteration():
    schedule = Schedule.from_names({Lane(0): ["0F0", "(1F0;0B0)", "1B0"], Lane(1): ["0F1", "1F1"]})
    assert schedule.names(0)[1] == "(1F0;0B0)"
    assert "1F0&0B0" in schedule.grid(), "they share a cell"
    assert schedule.repeated(2).joined.tolist() == [False, False, True, False] * 2 + [False] * 4
    assert Schedule.from_names({Lane(0): ["0F0", "0B0"]}).repeated(2).joined is None


def test_the_grid_wraps_and_marks():
    schedule = Schedule.from_names({MAIN: [f"{i}F0" for i in range(30)]})
    assert all(len(line) <= 40 for line in schedule.grid(width=40).splitlines())
    joined = " ".join(line.removeprefix("0/main") for line in schedule.grid(width=40).splitlines())
    assert joined.split() == [f"{i}F0" for i in range(30)]
    assert "[7F0]" in schedule.grid(mark=[parse_task("7F0")])


def test_lanes():
    assert str(Lane(np.int64(2), "sub")) == "2/sub"
    assert Lane(0).priority < Lane(0, "sub").priority
    schedule = Schedule.from_names({Lane(3): ["0F0"], Lane(1): []})
    assert schedule.ranks == 4
    assert len(schedule) == 1
    assert [schedule.order(i).tolist() for i in range(2)] == [[parse_task("0F0")], []]


OLD = """rank,lane,task
0,main,0F0
0,main,1F0
0,main,(2F3;5B1)
0,sub,1W0@1
0,comm,1A0
0,main,1U0
"""


def test_older_files_mean_what_they_meant():
    schedule = Schedule.from_csv(OLD)
    assert schedule.to_csv() == OLD.replace("0,main,1U0\n", "").replace("0,sub", "0,main,1U0\n0,sub", 1)
    late = unpack(schedule.order(1)[0])
    assert (late.unit, late.kind, late.micro_batch, late.late, late.iteration) == (1, Kind.W, 0, 1, 0)


def test_lanes_and_names_of_a_wrong_type_are_named():
    with pytest.raises(ScheduleError, match=r"lanes are \['0F0'\]; give the names by lane, as in {Lane\(0, 'main'\)"):
        Schedule.from_names(["0F0"])
    with pytest.raises(ScheduleError, match=r"0/main are one text; give a list of names: \['0F0', '1F0'\]"):
        Schedule.from_names({Lane(0): "0F0 1F0"})
