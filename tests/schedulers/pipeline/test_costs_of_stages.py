"""Costs of a network's layers, from a file, summed for the stages that a policy places."""

from dataclasses import replace

import numpy as np
import pipelines
import pytest
from command_line import run_json

import minidl as ml
from minidl.cli import main
from minidl.pricing.cost import CostError, CostModel, Link
from minidl.schedulers import pipeline

LAYERS = CostModel(kinds={"F": [1, 2, 1, 1, 2, 3, 1, 1], "O": [0.1, 2, 1, 1, 2, 3, 1, 1],
                          "W": [2, 2, 1, 1, 2, 3, 1, 2], "B": [2, 3, 1, 1, 3, 4, 1, 2], "U": [1] * 8},
                   link=Link(0.5, 100.0), source="measured", unit="us",
                   sizes={"layers": [1] * 8, "message_bytes": [10, 20, 30, 40, 50, 60, 70, 4], "saved_bytes": [5] * 8})


@pytest.fixture
def file(tmp_path):
    LAYERS.save(path := tmp_path / "net.json")
    return str(path)


def test_layers_are_summed_into_the_stages_of_a_placement():
    found = pipeline.in_stages(LAYERS, pipelines.place("interleaved", 2))
    layers = found.sizes["layers"]
    assert sum(layers) == 8
    ends = [sum(layers[: i + 1]) for i in range(4)]
    for kind in "FOWB":
        each = [sum(LAYERS.kinds[kind][end - n : end]) for n, end in zip(layers, ends, strict=True)]
        assert found.kinds[kind] == pytest.approx(each)
    assert found.sizes["message_bytes"] == [LAYERS.sizes["message_bytes"][end - 1] for end in ends]
    assert found.sizes["saved_bytes"] == [5 * n for n in layers]
    assert found.step == max(layers[0] + layers[2], layers[1] + layers[3])  # one update for each layer of a rank
    assert (found.link, found.unit, found.source) == (LAYERS.link, "us", "measured")
    largest = max(map(sum, zip(*(found.kinds[kind] for kind in "FOW"), strict=True)))
    assert largest < sum(sum(LAYERS.kinds[kind]) for kind in "FOW") / 4 * 1.5


def test_one_number_for_all_stages_stays_and_lists_must_fit():
    plain = CostModel.given(1.0, 2.0, 3.0)
    assert pipeline.in_stages(plain, pipelines.place("zb_h1", 4)) == plain
    with pytest.raises(pipeline.PipelineError, match="costs are of 8 stages, and 12 are needed: give as many or more"):
        pipeline.in_stages(LAYERS, pipelines.place("gpipe", 12))
    with pytest.raises(pipeline.PipelineError, match="of 8 and 9 stages"):
        pipeline.in_stages(replace(LAYERS, kinds={**LAYERS.kinds, "W": [1] * 9}), pipelines.place("gpipe", 2))
    with pytest.raises(CostError, match="a size of 'saved_bytes' is -1"):
        replace(LAYERS, sizes={"saved_bytes": [-1]})


def test_the_time_of_a_single_task_is_not_lost_in_a_sum():
    """Of 8 layers in 4 stages, 0F0 would be the whole first stage, and 7F0 nothing."""
    own = replace(LAYERS, tasks={"7F0": 100.0})
    with pytest.raises(pipeline.PipelineError, match="times of 8 stages, which are summed for 4, and one of task 7F0 "):
        pipeline.in_stages(own, pipelines.place("interleaved", 2))
    assert pipeline.in_stages(own, pipelines.place("gpipe", 8)).tasks == own.tasks


def test_each_message_has_the_bytes_of_its_stage():
    """One micro-batch goes up and down: each stage's activation, and a gradient of the same size."""
    time = sum(LAYERS.kinds["F"]) + sum(LAYERS.kinds["B"])
    moves = 14 * LAYERS.link.latency + 2 * sum(LAYERS.sizes["message_bytes"][:-1]) / LAYERS.link.bandwidth
    plan = pipelines.plan("gpipe", 8, 1, LAYERS)
    assert pipeline.price(plan).makespan == pytest.approx(time + moves)
    read = ml.plan(ml.Pipeline(1), plan.schedule, LAYERS, ml.Machine(8))
    assert pipeline.price(read).makespan == pytest.approx(time + moves)
    alike = pipelines.plan("gpipe", 8, 1, LAYERS, message_bytes=70)  # what is given counts
    assert pipeline.price(alike).makespan == pytest.approx(time + 14 * (LAYERS.link.latency + 70 / 100))


def test_messages_of_steps_with_tasks_of_their_own():
    """A slice takes its share of a stage's time and bytes; weights that come in no time change no message."""
    def makespan(policy, ranks, **options):
        return pipeline.price(ml.plan(ml.Pipeline(4), policy, LAYERS, ml.Machine(ranks), **options)).makespan

    assert makespan("seq1f1b", 8, slices=1) == makespan("one_f_one_b", 8)
    assert makespan("roundpipe", 2, fetch=1e-12) == pytest.approx(makespan("roundpipe", 2))
    sent = ml.Pipeline(1, bandwidth=10.0, message_bytes=20)  # two forwards of 0.5, two messages of 1, and so down
    halves = ml.plan(sent, "seq1f1b", machine=ml.Machine(2), slices=2)
    assert pipeline.price(halves).makespan == pytest.approx(0.5 + 2 * 1 + 0.5 + 2 * 1 + 1 + 1)


def test_messages_are_of_the_stages_that_joint_has_cut(monkeypatch):
    pipelines.little_effort(monkeypatch)
    made = pipelines.plan("joint", 2, 4, LAYERS)
    ends = np.cumsum(made.notes["joint"]["layers"])
    own = CostModel(kinds={kind: np.add.reduceat(LAYERS.kinds[kind], [0, *ends[:-1]]).tolist() for kind in "FOWB"},
                    link=LAYERS.link, sizes={"message_bytes": [LAYERS.sizes["message_bytes"][end - 1] for end in ends]})
    read = ml.plan(ml.Pipeline(4), made.schedule, own, ml.Machine(2))
    assert pipeline.price(made).makespan == pytest.approx(pipeline.price(read).makespan)
    assert pipeline.price(made).makespan < pipeline.price(pipelines.plan(
        "joint", 2, 4, LAYERS, message_bytes=max(LAYERS.sizes["message_bytes"]))).makespan


def test_a_fused_backward_has_a_time_of_its_own():
    """In torch it takes less than its two halves; `joint` chooses among policies with and without halves by that."""
    halves = CostModel.given(1.0, 2.0, 2.0)
    cost = replace(halves, kinds={**halves.kinds, "B": 2.5})
    plan = pipelines.plan("joint", 2, 8, cost)
    assert plan.notes["joint"]["makespan"] == pytest.approx(pipeline.price(plan).makespan)
    assert pipeline.price(plan).makespan <= pipeline.price(pipelines.plan("interleaved", 2, 8, cost, chunks=4)).makespan
    assert pipeline.price(plan).makespan < pipeline.price(pipelines.plan("joint", 2, 8, halves)).makespan
    fused = pipelines.plan("one_f_one_b", 1, 3, cost)
    assert pipeline.price(fused).makespan == 3 * 3.5


def test_commands_on_given_times_take_them_from_a_file(file, capsys, monkeypatch):
    pipelines.little_effort(monkeypatch)
    for name, chunks in (("one_f_one_b", 1), ("interleaved", 2), ("joint", 4)):
        cost = pipeline.in_stages(LAYERS, pipelines.place(name, 2, chunks))
        made = pipelines.plan(name, 2, 4, cost, chunks)
        found = run_json(capsys, "simulate", "--scheduler", name, "--ranks", "2", "--chunks", str(chunks),
                        "--micro-batches", "4", "--costs", file)[1]
        assert found["makespan"] == pytest.approx(pipeline.price(made).makespan)
    table = run_json(capsys, "simulate", "--table", "--ranks", "2", "--micro-batches", "4", "--costs", file)[1]
    price = {row["scheduler"]: row["makespan"] for row in table["policies"]}
    assert {"one_f_one_b", "interleaved", "zb_h1", "zb_auto", "joint"} <= price.keys()
    plan = run_json(capsys, "plan", "--scheduler", "one_f_one_b", "--ranks", "2", "--micro-batches", "4", "--costs",
                    file)[1]
    updates = pipeline.in_stages(LAYERS, pipelines.place("one_f_one_b", 2)).step
    assert plan["predicted_step_ms"] == pytest.approx((plan["makespan"] + updates) / 1000, abs=1e-4)
    assert updates >= 4
    slow = run_json(capsys, "simulate", "--scheduler", "one_f_one_b", "--ranks", "2", "--micro-batches", "4", "--costs",
                    file, "--latency", "1", "--bandwidth", "1MB")[1]
    assert slow["makespan"] > price["one_f_one_b"] + 40  # 40 bytes take 40 us


@pytest.mark.parametrize(("unit", "factor"), [("ns", "0.001"), ("ms", "1000"), ("s", "1e+06")])
@pytest.mark.parametrize("command", [
    ["plan", "--ranks", "2", "--micro-batches", "4", "--scheduler", "zb_h1"],
    ["simulate", "--ranks", "2", "--micro-batches", "4", "--table", "--latency", "5"],
    ["plan", "--model", "mlp", "--model-arg", "preset=tiny"],
    ["plan", "--model", "mlp", "--model-arg", "preset=tiny", "--parallel", "pipeline", "--ranks", "2"],
])
def test_times_in_another_unit_than_that_of_links_are_refused(unit, factor, command, tmp_path, capsys):
    """They gave a step in milliseconds that was wrong by the factor."""
    replace(LAYERS, unit=unit).save(file := tmp_path / "net.json")
    assert main([*command, "--costs", str(file)]) == 2
    error = capsys.readouterr().err
    assert f" {file} has times in {unit}; " in error
    assert f"multiply its times by {factor}, " in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("unit", ["", "ticks"])
def test_times_in_a_unit_of_unknown_length_give_no_milliseconds(unit, tmp_path, capsys):
    replace(LAYERS, unit=unit).save(file := tmp_path / "net.json")
    plan = run_json(capsys, "plan", "--scheduler", "zb_h1", "--ranks", "2", "--micro-batches", "4", "--costs",
                    str(file))[1]
    assert plan["predicted_step_ms"] is None
    assert plan["makespan"] > 0
