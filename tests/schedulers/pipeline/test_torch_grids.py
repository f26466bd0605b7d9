"""Torch's own pipeline orders: ours are equal to them, and its lowered grids are read."""

import re
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pipelines
import pytest
from command_line import SMALL, refusal, run, run_json
from helpers import need

from minidl.core.schedule import ScheduleError
from minidl.core.tasks import Kind, unpack
from minidl.schedulers import pipeline
from minidl.schedulers.pipeline import v_shape
from minidl.schedulers.pipeline.problem import Problem

LOOPED = {"ScheduleInterleaved1F1B": "interleaved", "ScheduleInterleavedZeroBubble": "interleaved_zb",
          "ScheduleLoopedBFS": "looped_bfs"}
#: each of torch's classes with its numbers of chunks, and our policy if it has the same order; zb_v is a search
CLASSES = {"ScheduleGPipe": ([1], "gpipe"), "Schedule1F1B": ([1], None),
           "ScheduleInterleaved1F1B": ([1, 2, 3], "interleaved"),
           "ScheduleInterleavedZeroBubble": ([1, 2, 3], "interleaved_zb"), "ScheduleLoopedBFS": ([1, 2, 3], None),
           "ScheduleZBVZeroBubble": ([2], "zb_v"), "ScheduleDualPipeV": ([2], "dualpipe_v")}


@pytest.fixture(scope="module")
def torch_pipelines():
    return need("torch.distributed.pipelining.schedules")


def torch_schedule(module, name, p, m, chunks=1, **more):
    """One of torch's schedules, made without a process group. Raises its ValueError."""
    wave = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    held = [c * p if not wave or c % 2 == 0 else 2 * p - 1 for c in range(chunks)]
    stages = [SimpleNamespace(group_size=p, group_rank=0, num_stages=p * chunks, stage_index=i, has_backward=True,
                              is_first=i == 0, is_last=i == p * chunks - 1, stage_index_to_group_rank={}, group=None,
                              submod=None) for i in held]
    single = name in ("ScheduleGPipe", "Schedule1F1B")
    return getattr(module, name)(stages[0] if single else stages, m, loss_fn=lambda output, target: 0, **more)


def torch_order(module, name, p, m, chunks=1, deferred=False, lowered=False):
    """The actions of each rank in one of torch's schedules."""
    if name in ("ScheduleGPipe", "Schedule1F1B"):
        return torch_schedule(module, name, p, m)._get_pipeline_order()
    made = torch_schedule(module, name, p, m, chunks, defer_pp_recv=deferred)
    return made.pipeline_order_with_comms if lowered else made.pipeline_order


def as_csv(order):
    return "\n".join(",".join("" if action is None else str(action) for action in order[r]) for r in sorted(order))


def test_torchs_1f1b_table_is_ours_but_for_the_numbers_on_the_last_rank(torch_pipelines):
    theirs = as_csv(torch_order(torch_pipelines, "Schedule1F1B", 4, 8)).splitlines()
    last = re.sub(r"F(\d+)", lambda found: f"F{int(found[1]) - 1}", theirs[-1])  # it counts forwards from 1 on
    assert (pipeline.from_torch("\n".join([*theirs[:-1], last])).to_csv()
            == pipelines.plan("one_f_one_b", 4, 8).schedule.to_csv())


def test_torchs_looped_bfs_adds_gradients_in_descending_order(torch_pipelines, tmp_path, capsys):
    """On given times its order is what it is; a network's backward tasks are numbered as their gradients are added."""
    p, m, flags = 2, 3, ["--ranks", "2", "--micro-batches", "3", "--chunks", "2"]
    text = as_csv(torch_order(torch_pipelines, "ScheduleLoopedBFS", p, m, 2))
    read = pipelines.read_plan(pipeline.from_torch(text), p, m, 2)
    assert re.match("the grid has 0B1 before 0B0, but a network adds", read.remarks[0])
    assert cells(pipeline.for_torch(read)) == cells(text)
    (path := tmp_path / "bfs.csv").write_text(text)
    assert run_json(capsys, "check", str(path), *flags)[1]["remarks"] == [*read.remarks]
    assert run(capsys, "plan", *flags, "--scheduler", str(path), "--save", str(tmp_path / "again.csv"))[0] == 0
    again = pipelines.read_plan(pipeline.read_file(str(tmp_path / "again.csv")), p, m, 2)
    assert again.schedule.to_csv() == read.schedule.to_csv()
    ascending = re.sub(r"B(\d+)", lambda found: f"B{m - 1 - int(found[1])}", text)
    assert pipeline.from_torch(ascending).to_csv() == pipelines.plan("looped_bfs", p, m, chunks=2).schedule.to_csv()
    network = [*SMALL[:-2], "--costs", "analytic", "--batch-size", "6", "--parallel", "pipeline", *flags]
    for verb in ("plan", "simulate"):
        assert run(capsys, verb, *network, "--scheduler", str(path))[0] == 0
    file = tmp_path / "network.csv"
    run(capsys, "plan", *network, "--scheduler", str(path), "--format", "torch", "--save", str(file))
    assert cells(file.read_text()) == cells(ascending)


@pytest.mark.parametrize("name", LOOPED)
def test_torchs_lowered_grid_with_fsdp_actions_is_read(torch_pipelines, name):
    """Torch gathers, frees and sums a stage's weights among its replicas: actions without a micro-batch."""
    p, m = 2, 4
    plain = torch_order(torch_pipelines, name, p, m, 2)
    if name == "ScheduleLoopedBFS":
        m, plain = 1, torch_order(torch_pipelines, name, p, 1, 2)
    sharded = {rank: torch_pipelines._add_reduce_grad(torch_pipelines._add_unshard_reshard(actions), m)
               for rank, actions in plain.items()}
    lowered = torch_pipelines._add_send_recv(sharded, lambda stage: stage % p, 2 * p)
    text = as_csv(lowered)
    assert {"UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F"} <= set(re.findall("[A-Z]{3,}_?[A-Z]*", text))
    read = pipelines.read_plan(pipeline.from_torch(text), p, m, 2)
    computes = np.isin(unpack(read.schedule.keys).kind, [Kind.F, Kind.O, Kind.W, Kind.B])
    assert read.schedule.keep(computes).to_csv() == pipeline.from_torch(as_csv(plain)).to_csv()


@pytest.mark.few(1)
@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleDualPipeV"])
def test_a_grid_equals_the_policy_of_its_order_with_messages_too(torch_pipelines, tmp_path, capsys, name, lowered):
    (path := tmp_path / "grid.csv").write_text(as_csv(torch_order(torch_pipelines, name, 2, 4, 2, lowered=lowered)))
    found = run_json(capsys, "simulate", "--ranks", "2", "--micro-batches", "4", "--chunks", "2",
                     "--scheduler", str(path))[1]
    assert found["beside"]["equals"] == [CLASSES[name][1]]
    assert not found["beside"]["nearest"]


@pytest.mark.parametrize("form", [[], ["--format", "torch"]])
def test_replicas_on_given_times_need_a_policy(tmp_path, capsys, form):
    """The file of a policy's plan has its sums, torch's grid has none; a network's replicas take both."""
    own = ["--ranks", "2", "--micro-batches", "4", "--replicas", "2", "--topology", "nodes=1,inside=1:1MB",
           "--gradient-bytes", "5"]
    path = str(tmp_path / "plan.csv")
    assert run(capsys, "plan", *own, "--scheduler", "zb_h1", "--save", path, *form)[0] == 0
    assert "plan.csv: on given times replicas sum gradients under policies, not in an order that is read; name " in (
        refusal(capsys, "simulate", *own, "--scheduler", path))


@pytest.mark.parametrize("cell", ["UNSHARD", "1UNSHARD2", "1RESHAR", "xREDUCE_GRAD"])
def test_a_misspelt_fsdp_action_is_one_clear_line(cell):
    with pytest.raises(ScheduleError, match="row 1, cell 2: .* is not an action"):
        pipeline.from_torch(f"0F0,{cell},0B0")


# ----------------------------------------------------------------------------------- all classes, by the rules of torch
def cells(text):
    """The tasks of each rank that compute."""
    return [re.findall(r"\d+[FIWB]\d+", row) for row in text.splitlines()]


def accepts(module, order, p, stages, m):
    """Whether torch's runtime takes the order."""
    try:
        module._validate_schedule(order, p, stages, m)
    except (AssertionError, KeyError):
        return False
    return True


def links(order, home):
    """The messages of each pair of ranks as they are sent, and as they are received."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, actions in order.items():
        for action in actions:
            found = re.fullmatch(r"(\d+)(SEND|RECV)_([FB])(\d+)", str(action))
            if found and found[2] == "SEND":
                to = int(found[1]) + (1 if found[3] == "F" else -1)
                sent[rank, home[to]].append((to, found[3], found[4]))
            elif found:
                by = int(found[1]) - (1 if found[3] == "F" else -1)
                received[home[by], rank].append((int(found[1]), found[3], found[4]))
    return sent, received


def changed(order, draw):
    """The order with one of its computing actions left out, on another rank, or earlier."""
    order = {rank: [*actions] for rank, actions in order.items()}
    rank = int(draw.integers(len(order)))
    at = int(draw.choice([i for i, a in enumerate(order[rank]) if a and re.fullmatch(r"\d+[FIWB]\d+", str(a))]))
    action, way = order[rank].pop(at), draw.integers(3)
    if way == 1:
        order[(rank + 1) % len(order)].append(action)
    elif way == 2:
        order[rank].insert(int(draw.integers(at + 1)), action)
    return order


@pytest.mark.parametrize("count", [3, pytest.param(30, marks=pytest.mark.wide)])
@pytest.mark.parametrize("name", CLASSES)
def test_grids_are_accepted_as_torch_accepts_them_in_the_same_order(torch_pipelines, name, count):
    """Of 2 to 4 ranks and 2 to 12 micro-batches, lowered or not, with and without deferred receives; also changed."""
    draw, (chunks, ours) = np.random.default_rng(count), CLASSES[name]
    for _ in range(count):
        p, m, v, deferred, lowered = (int(draw.choice(some)) for some in (
            range(2, 5), range(2, 13), chunks, (0, 1), (0, 1)))
        try:
            order = torch_order(torch_pipelines, name, p, m, v, bool(deferred), bool(lowered))
        except ValueError:
            assert ours is None or not _planned(ours, p, m, v), (p, m, v)
            continue
        text, case = as_csv(order), (p, m, v, deferred, lowered)
        if not accepts(torch_pipelines, order, p, p * v, m):
            assert name == "Schedule1F1B", "whose table numbers forwards of the last rank from 1 on"
            with pytest.raises(ScheduleError):
                pipelines.read_plan(pipeline.from_torch(text), p, m, v)
            continue
        made = pipelines.read_plan(pipeline.from_torch(text), p, m, v)
        assert cells(pipeline.to_torch(made.schedule)) == cells(text), case
        assert ours is None or _planned(ours, p, m, v) == cells(text) == cells(pipeline.for_torch(made)), case
        home = torch_pipelines._validate_schedule(order, p, p * v, m)
        assert made.placement.table[0].tolist() == [home[stage] for stage in range(p * v)]
        said = [line for line in made.remarks if "rendezvous" in line]
        sent, received = links(order, home)
        assert len(said) == bool(sent)
        assert all("buffered: yes; rendezvous: " in line for line in said)
        assert deferred or all(line.endswith("rendezvous: yes") for line in said), case
        assert any("defer_pp_recv" in line for line in made.remarks) == (sent != received), case
        other = changed(order, draw)
        if not accepts(torch_pipelines, other, p, p * v, m):
            with pytest.raises(ScheduleError):
                pipelines.read_plan(pipeline.from_torch(as_csv(other)), p, m, v)


def _planned(name, p, m, v):
    """The tasks of each rank by our policy; none if it does not take these numbers."""
    try:
        if name != "zb_v":
            return cells(pipeline.to_torch(pipelines.plan(name, p, m, chunks=v).schedule))
    except pipeline.PipelineError:
        return []
    placement = pipelines.place("zb_v", p)
    return cells(pipeline.to_torch(v_shape.handcrafted(Problem.of(placement, m, pipeline.costs(placement, 1, 1, 1)))))


TWO = ["0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
       "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"]


@pytest.mark.parametrize(("row", "old", "new", "says"), [
    (0, "", "", "buffered: yes; rendezvous: no, 1SO0>0 waits for 0SF1>1 waits for 1SO0>0"),
    (1, "1SEND_B0,1RECV_F1", "1RECV_F1,1SEND_B0", "buffered: yes; rendezvous: yes"),
    (0, "0SEND_F0,0F1", "0F1,0RECV_B0,0SEND_F0", None),  # two receives of one message
    (0, "0RECV_B0,0B0", "0B0", "!1RO0>0 is missing, the receive of the gradient of stage or layer 1"),
    (0, "0SEND_F1,", "", "!0SF1>1 is missing, the send of the activation of stage or layer 0, micro-batch 1"),
    (0, "0F1,0SEND_F1", "0SEND_F1,0F1", "!deadlock: 0F1 waits for 0SF1>1 waits for 0F1"),
    (0, "0RECV_B1,0B1", "0B1,0RECV_B1", "!deadlock: "),
    (1, "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1", "1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0", "0RF1>1 is received before 0RF0>1"),
    (0, "0SEND_F0,0F1", "0F1,0RECV_B0,0B0,0SEND_F0", None)])
def test_messages_are_judged_as_torchs_runtime_has_them(row, old, new, says):
    """Each send is posted and each receive, and only the task that reads a message waits for it."""
    rows = [*TWO]
    assert old in rows[row]
    rows[row] = rows[row].replace(old, new)
    schedule = pipeline.from_torch("\n".join(rows))
    if says is None or says.startswith("!"):
        with pytest.raises(ScheduleError, match=says and re.escape(says[1:])):
            pipelines.read_plan(schedule, 2, 2)
    else:
        assert says in " ".join(pipelines.read_plan(schedule, 2, 2).remarks)


def test_a_receive_may_be_posted_long_before_its_message_can_come():
    """On a rank that waited for it there, rank 1 would wait for 0F1, which comes later."""
    rows = [TWO[0].replace("0F1,0SEND_F1,0RECV_B0", "0RECV_B0,0F1,0SEND_F1"),
            "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1"]
    read = pipelines.read_plan(pipeline.from_torch("\n".join(rows)), 2, 2)
    assert "sends are buffered: yes; rendezvous: no, " in read.remarks[0]
    own = replace(pipeline.from_torch("\n".join(rows)), notes={})  # an order of one's own, where a receive is a wait
    with pytest.raises(ScheduleError, match="deadlock"):
        pipelines.read_plan(own, 2, 2)
