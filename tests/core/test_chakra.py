"""Chakra's execution traces: protobuf's package reads them by the schema, and they come back as a timeline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import run_json
from helpers import drawn, need, recorded_classifier
from hypothesis import given, settings
from random_plans import Plan, plans

import minidl as ml
from minidl import models, optim
from minidl.cli import main
from minidl.core import chakra
from minidl.core.schedule import Lane
from minidl.core.tasks import parse_task
from minidl.core.timeline import Timeline
from minidl.measuring.work import by_rates, work_of
from minidl.pricing.cost import CostModel


def schema():
    """The messages of et_def.proto that are written here, by their numbers and types: (GlobalMetadata, Node)."""
    pb = need("google.protobuf.descriptor_pb2")
    from google.protobuf import descriptor_pool, message_factory

    file = pb.FileDescriptorProto(name="et.proto", package="ChakraProtoMsg", syntax="proto3")
    kinds = pb.FieldDescriptorProto
    messages = {
        "AttributeProto": [("name", 1, "STRING", 1), ("int32_val", 7, "INT32", 1), ("int64_val", 9, "INT64", 1),
                           ("uint64_val", 13, "UINT64", 1), ("bool_val", 27, "BOOL", 1),
                           ("string_val", 29, "STRING", 1)],
        "GlobalMetadata": [("version", 1, "STRING", 1), ("attr", 2, "AttributeProto", 3)],
        "Node": [("id", 1, "UINT64", 1), ("name", 2, "STRING", 1), ("type", 3, "INT32", 1),
                 ("ctrl_deps", 4, "UINT64", 3), ("data_deps", 5, "UINT64", 3), ("start_time_micros", 6, "UINT64", 1),
                 ("duration_micros", 7, "UINT64", 1), ("attr", 10, "AttributeProto", 3)]}
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field, number, kind, label in fields:
            own = message.field.add(name=field, number=number, label=label)
            if kind in messages:
                own.type, own.type_name = kinds.TYPE_MESSAGE, f".ChakraProtoMsg.{kind}"
            else:
                own.type = getattr(kinds, f"TYPE_{kind}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return [message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
            for name in ("GlobalMetadata", "Node")]


def nodes(path: Path) -> list:
    """The nodes of a file, read by protobuf's package."""
    metadata, node = schema()
    from google.protobuf.internal import decoder

    content, at, found = path.read_bytes(), 0, []
    while at < len(content):
        size, at = decoder._DecodeVarint32(content, at)
        found.append((node if found else metadata).FromString(content[at : at + size]))
        at += size
    assert found[0].version == chakra.VERSION
    return found[1:]


def attributes(node) -> dict:
    return {a.name: next(value for field, value in a.ListFields() if field.name != "name") for a in node.attr
            if len(a.ListFields()) > 1}


@settings(max_examples=drawn(40))
@given(plans(latency=True, pairs=True))
def test_a_timeline_comes_back(tmp_path_factory, plan: Plan):
    """Ranks, lanes, tasks, times and edges across lanes, of any plan."""
    folder, t = tmp_path_factory.mktemp("chakra"), plan.timeline
    chakra.save(t, folder / "t.et", 1000.0)
    ranks = sorted({lane.rank for lane in t.lanes})
    again = chakra.load([folder / f"t.{rank}.et" for rank in ranks])

    def told(t: Timeline, scale: float) -> set:
        first, _, size = t.actions
        pairs = np.concatenate([[], *(t.tasks[a : a + n] for a, n in zip(first, size, strict=True) if n > 1)])
        return {(t.lanes[t.lane[r]].rank, t.lanes[t.lane[r]].name, t.name(r),
                 None if r in pairs else round(float(t.start[r]) * scale)) for r in t.tasks.tolist()}

    alone = {x[2] for x in told(t, 1.0) if x[3] is not None}
    assert {(*x[:3], x[3] if x[2] in alone else None) for x in told(again, 1000.0)} == told(t, 1000.0)
    assert 1000 * again.makespan == pytest.approx(1000 * t.makespan, abs=2 * len(t.tasks))
    edges = {(t.name(a), t.name(b)) for a, b in t.edges.tolist()}
    assert {(again.name(a), again.name(b)) for a, b in again.edges.tolist()} == edges


def test_the_nodes_of_a_pipeline(tmp_path):
    """protobuf's package finds their numbers, order and waits, and a receive for each send."""
    plan = ml.plan(ml.Pipeline(4), "zb_h1", CostModel.given(2, 2, 2, 1.0), ml.Machine(3))
    chakra.save(plan.timeline, tmp_path / "plan.et")
    sends, receives, tasks = {}, {}, 0
    for rank in range(3):
        found = nodes(tmp_path / f"plan.{rank}.et")
        known = {node.id: node for node in found}
        assert len(known) == len(found)
        order = [node for node in found if node.type == chakra.COMPUTE]
        tasks += len(order)
        assert sum(not node.ctrl_deps for node in order) == 1, "only the first task of the lane waits for none"
        for node in found:
            about = attributes(node)
            assert all(before in known for before in (*node.ctrl_deps, *node.data_deps))
            if node.type == chakra.SEND:
                assert about["comm_src" if rank else "comm_dst"] == (rank or about["comm_dst"])
                sends[about.get("comm_tag")] = (about.get("comm_src", 0), about.get("comm_dst", 0))
                assert len(node.data_deps) == 1
            elif node.type == chakra.RECEIVE:
                receives[about["comm_tag"]] = (about.get("comm_src", 0), about.get("comm_dst", 0))
                assert about.get("comm_dst", 0) == rank
                assert any(node.id in other.data_deps for other in found)
            else:
                assert node.duration_micros == 2
    assert tasks == 3 * 4 * 3
    assert sends == receives
    assert len(sends) == 2 * 4 * 2, "an activation and a gradient, of each micro-batch, over each link"


def test_collectives_have_groups(tmp_path):
    lanes = (Lane(0), Lane(1), Lane(2), Lane(3))
    names = ["0A0", "0A0", "1AS0", "1AS0", "2AG0", "2AG0", "2AG0", "2AG0"]
    lane = [0, 1, 2, 3, 0, 1, 2, 3]
    t = Timeline.of_tasks(lanes, [parse_task(name) for name in names], lane, [0.0] * 4 + [5.0] * 4,
                          [5.0] * 4 + [7.0] * 4, bytes=[64] * 8)
    chakra.save(t, tmp_path / "t.et")
    found = [attributes(node) for rank in range(4) for node in nodes(tmp_path / f"t.{rank}.et")]
    assert [(about.get("comm_type", 0), about.get("pg_name"), about["comm_size"]) for about in found] == [
        (0, "1", 64), (2, None, 64)] * 2 + [(7, "2", 64), (2, None, 64)] * 2
    assert json.loads((tmp_path / "t.groups.json").read_text()) == {"1": [0, 1], "2": [2, 3]}


def test_the_work_of_tasks(tmp_path):
    model = models.mlp(8, 16, 4)
    graph = recorded_classifier(model, optim.SGD(model.parameters(), lr=0.1), 8, 8)
    plan = ml.plan(graph, "multi_stream", CostModel.analytic())
    t = replace(plan.timeline, work=work_of(graph, by_rates(2e4, 1e4)))
    chakra.save(t, tmp_path / "t.et")
    found = {attributes(node)["task"]: attributes(node) for node in nodes(tmp_path / "t.0.et")}
    for task in graph:
        if task.flops:
            assert found[task.name]["num_ops"] == task.flops
            assert found[task.name]["tensor_size"] > 0
    alike = chakra.on_all_ranks(t, 3)
    assert len(alike.tasks) == 3 * len(t.tasks)
    assert alike.of_rank(2).makespan == t.makespan


def test_times_that_are_too_short_or_too_long_are_refused_with_a_factor(tmp_path):
    t = Timeline.of_tasks((Lane(0),), [parse_task("0F0"), parse_task("1F0"), parse_task("2F0")], [0, 0, 0],
                          [0.0, 0.04, 0.04], [0.04, 0.04, 3.0])
    with pytest.raises(ValueError, match="0.04 us, .* whole microseconds; give --trace-factor 1000"):
        chakra.save(t, tmp_path / "t.et")
    with pytest.raises(ValueError, match="smaller --trace-factor"):
        chakra.save(t, tmp_path / "t.et", 1e30)
    assert not [*tmp_path.iterdir()]
    chakra.save(t, tmp_path / "t.et", 1000)
    assert [node.duration_micros for node in nodes(tmp_path / "t.0.et")] == [40, 0, 2960]
    chakra.save(replace(t, unit="ms"), tmp_path / "t.et")
    assert [node.duration_micros for node in nodes(tmp_path / "t.0.et")] == [40, 0, 2960]


def test_files_have_the_ranks_of_their_names(tmp_path):
    """A shell sorts t.10.et before t.2.et."""
    t = ml.plan(ml.Pipeline(3), "gpipe", machine=ml.Machine(12)).timeline
    chakra.save(t, tmp_path / "t.et", 1000.0)
    back = chakra.load(sorted(tmp_path.iterdir()))
    assert {lane.rank: lane for lane in back.lanes} == dict(enumerate(t.lanes))
    for rank in range(12):
        starts = [sorted(x.start[x.tasks][x.rank_of_each[x.tasks] == rank].tolist()) for x in (t, back)]
        assert starts[0] == pytest.approx(starts[1])
    assert {lane.rank for lane in chakra.load([tmp_path / "t.11.et", tmp_path / "t.3.et"]).lanes} == {3, 11}
    for name in ("a.et", "b.99999999999999999999.et"):
        (tmp_path / name).write_bytes((tmp_path / "t.7.et").read_bytes())
    assert [lane.rank for lane in chakra.load([tmp_path / "a.et", tmp_path / "t.7.et"]).lanes] == [0, 1]
    assert [lane.rank for lane in chakra.load([tmp_path / "b.99999999999999999999.et"]).lanes] == [0]


@pytest.mark.parametrize("names", [["a.0.et"] * 2, ["a.0.et", "a.1.et", "b.0.et"], ["plain.et", "a.1.et", "b.1.et"]])
def test_two_files_of_one_rank_are_refused(names, tmp_path, capsys):
    chakra.save(ml.plan(ml.Pipeline(2), "gpipe", machine=ml.Machine(2)).timeline, tmp_path / "x.et", 1000.0)
    for name in names:
        (tmp_path / name).write_bytes((tmp_path / "x.0.et").read_bytes())
    assert main(["report", *(str(tmp_path / name) for name in names)]) == 2
    assert "are of one rank, by their names; give one file of each rank" in capsys.readouterr().err


def test_other_files_are_one_line(tmp_path, capsys):
    plan = ml.plan(ml.Pipeline(2), "gpipe", CostModel.given(2, 2, 2), ml.Machine(2))
    chakra.save(plan.timeline, tmp_path / "t.et")
    whole = (tmp_path / "t.0.et").read_bytes()
    rng, bad = np.random.default_rng(0), tmp_path / "bad.et"
    for content in (b"", b"{}", whole[:-3], whole[:40], b"\xff" * 30, *(
            bytes(rng.integers(0, 256, 50, np.uint8)) for _ in range(50)), *(
            bytes(np.where(np.arange(len(whole)) == at, 255, np.frombuffer(whole, np.uint8)).astype(np.uint8))
            for at in rng.integers(0, len(whole), 50).tolist())):
        bad.write_bytes(content)
        code = main(["report", str(bad)])
        said = capsys.readouterr().err
        assert (code, said) == (0, "") or (code == 2 and len(said.splitlines()) == 1 and "bad.et is not" in said)


@pytest.mark.parametrize(("shortest", "factor", "fits"), [(3.0, None, None), (0.25, None, 100), (0.25, 3.0, 100),
                                                          (0.25, 4.0, 4.0), (1e-7, None, 10**8)])
def test_a_factor_makes_short_tasks_whole(shortest, factor, fits):
    timeline = ml.plan(ml.Pipeline(2), "gpipe", CostModel.given(shortest, 5.0, 5.0), ml.Machine(2)).timeline
    assert chakra.fitting(timeline, factor) == (pytest.approx(shortest * (factor or 1)), fits)


def test_on_the_command_line(tmp_path, capsys, monkeypatch):
    out = tmp_path / "traces"
    command = ["plan", "--ranks", "2", "--micro-batches", "3", "--scheduler", "zb_h1", "--format", "chakra", "--save"]
    assert main([*command, str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["plan.0.et", "plan.1.et"]
    capsys.readouterr()
    found = run_json(capsys, "report", *map(str, sorted(out.iterdir())))[1]
    assert (found["tasks"], found["makespan"], found["predicted"]) == (18, 10, True)
    assert main(["train", "--model", "mlp", "--steps", "1", "--trace", str(tmp_path / "run.et"),
                 "--trace-factor", "1000"]) == 0
    capsys.readouterr()
    ends = [node.start_time_micros + node.duration_micros for node in nodes(tmp_path / "run.0.et")]
    found = run_json(capsys, "report", str(tmp_path / "run.0.et"))[1]
    assert found["makespan"] == pytest.approx(max(ends) / 1000, 0.01)
    monkeypatch.setattr(chakra, "fitting", lambda timeline, factor: (0.25, 100000.0))
    assert main(["train", "--model", "mlp", "--steps", "1", "--trace", str(tmp_path / "run.et")]) == 0
    assert "a task took 0.25 us, and Chakra has whole ones, so times are multiplied by 1" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "run.0.et")]) == 0, "what ran once is written, with a factor"
    assert main(["plan", "--model", "mlp", "--format", "torch", "--save", str(tmp_path / "x")]) == 2
    assert main(["train", "--model", "mlp", "--steps", "1", "--trace", str(tmp_path / "no.txt")]) == 2
    capsys.readouterr()


def test_replicas_have_files_and_groups(tmp_path):
    """The ranks of both replicas have files; ranks 0 and 2 sum one stage, ranks 1 and 3 the other."""
    command = ["plan", "--model", "mlp", "--batch-size", "16", "--parallel", "pipeline", "--ranks", "2", "--replicas",
               "2", "--micro-batches", "2", "--format", "chakra", "--trace-factor", "1000000", "--save", str(tmp_path)]
    assert main(command) == 0
    assert json.loads((tmp_path / "plan.groups.json").read_text()) == {"1": [0, 2], "2": [1, 3]}
    for rank in range(4):
        found = [attributes(node) for node in nodes(tmp_path / f"plan.{rank}.et")]
        ends = {about.get(end, 0) for about in found if "comm_tag" in about for end in ("comm_src", "comm_dst")}
        assert ends == {rank // 2 * 2, rank // 2 * 2 + 1}
        assert {about["pg_name"] for about in found if "pg_name" in about} == {str(rank % 2 + 1)}
