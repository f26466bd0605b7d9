"""Orders that are made here run in torch's runtime with the gradients of one process, and come back from it."""

import csv
import io
from importlib.util import find_spec

import numpy as np
import pipelines
import pytest
from helpers import need
from test_torch_grids import as_csv
from torch_launcher import on_torch_ranks

from minidl.cli import main
from minidl.core.placement import Refused
from minidl.core.schedule import Lane, Schedule
from minidl.core.tasks import Kind, unpack
from minidl.schedulers import pipeline

ABSENT = {"chimera": "two ranks hold each stage", "dualpipe": "two ranks hold each stage",
          "seq1f1b": "slices of micro-batches", "pipedream": "older weights", "pipedream_2bw": "older weights",
          "paci": "older weights", "layerpipe": "older weights", "layerpipe2": "older weights",
          "adl": "older weights", "petra": "older weights",
          "roundpipe": "forwards and backwards of a stage are on two ranks"}
HELD = [name for name in sorted(pipelines.POLICIES) if name not in ABSENT]
LONG = {"optimal": {"time_limit": 5.0}}  # the search for a proof; any order that it finds may run
MEASURED = {2: ([93.1, 151.7], [88.2, 140.3], [71.9, 160.4]),  # of a small GPT in torch, in microseconds
            4: ([93.1, 71.2, 74.0, 151.7], [1.2, 70.4, 80.1, 140.3], [171.9, 64.5, 60.2, 160.4])}


def computes(schedule):
    """The forwards and backwards, without bubbles."""
    return schedule.keep(np.isin(unpack(schedule.keys).kind, [Kind.F, Kind.O, Kind.W, Kind.B]))


def planned(name, p, m, times=None, **more):
    placement = pipelines.place(name, p)
    cost = None
    if times is not None:
        cost = pipeline.costs(placement, *(np.repeat(t, placement.chunks) / placement.chunks for t in times))
    return pipelines.plan(name, p, m, cost, **LONG.get(name, {}), **more)


@pytest.mark.wide
@pytest.mark.parametrize("p", [2, 4])
def test_gradients_of_torchs_runtime_have_the_bits_of_one_process(tmp_path, p):
    need("torch.distributed.pipelining")
    m, written = 2 * p, 0
    for name in HELD:
        if name == "optimal" and (p > 2 or not find_spec("ortools")):
            continue
        times = MEASURED[p] if p > 2 or name in ("joint", "optimal") else None
        plan = planned(name, p, m, times)
        (tmp_path / f"{plan.placement.stages}-{m}-{name}.csv").write_text(pipeline.for_torch(plan))
        written += 1
    for lines in on_torch_ranks("torch_ranks.py", p, tmp_path, written, str(p)):
        assert [name for name, equal in lines if not equal] == []


@pytest.mark.wide
def test_batch_norm_needs_examples_or_its_buffers_back(tmp_path):
    """What the page says of torch's runtime: one forward too many, and gradients that are divided again."""
    need("torch.distributed.pipelining")
    for lines in on_torch_ranks("torch_norms.py", 2, tmp_path, 3):
        (_, *bare), *cured = lines
        assert bare == [5, False, True, 10, 1.25, 2.0]
        assert [rest for _, *rest in cured] == [[4, True, True, 8, 1.25, 2.0]] * 2


@pytest.mark.wide
def test_200_random_plans_go_to_torch_and_come_back(tmp_path):
    torch = need("torch.distributed.pipelining.schedules")
    draw = np.random.default_rng(0)
    quick = [name for name in HELD if name not in ("joint", "optimal", "zb_auto", "zb_v", "v_half", "v_min")]
    done = 0
    while done < 200:
        name = quick[draw.integers(len(quick))]
        p, m = int(draw.integers(1, 6)), int(draw.integers(1, 13))
        chunks = None if pipelines.policy(name).chunks_fixed else int(draw.integers(1, 4))
        try:
            placement = pipelines.place(name, p, chunks)
            cost = pipeline.costs(placement, *draw.uniform(0.5, 4, (3, placement.stages)))
            plan = pipelines.plan(name, p, m, cost, chunks)
        except pipeline.PipelineError:
            continue
        text = pipeline.for_torch(plan)
        theirs = {rank: [torch._Action.from_str(cell) for cell in row]
                  for rank, row in enumerate(csv.reader(io.StringIO(text)))}
        mapping = torch._validate_schedule(theirs, p, placement.stages, m)
        assert [mapping[stage] for stage in range(placement.stages)] == plan.placement.table[0].tolist(), name
        again = pipeline.from_torch(as_csv(theirs))
        assert again.to_csv() == computes(plan.schedule).to_csv(), name
        sharded = {rank: torch._add_reduce_grad(torch._add_unshard_reshard(actions), m)
                   for rank, actions in theirs.items()}
        lowered = pipeline.from_torch(as_csv(torch._add_send_recv(sharded, mapping.get, placement.stages)))
        assert computes(lowered).to_csv() == again.to_csv(), name
        pipelines.read_plan(lowered, p, m, plan.placement.chunks)  # proves it with torch's messages
        done += 1


@pytest.mark.parametrize("name", ABSENT)
def test_what_the_runtime_cannot_hold_is_refused_with_the_reason(name, tmp_path, capsys):
    with pytest.raises(Refused, match=ABSENT[name]):
        pipeline.for_torch(pipelines.plan(name, 2, 4))
    file = tmp_path / "grid.csv"
    assert main(["plan", "--ranks", "2", "--micro-batches", "4", "--scheduler", name, "--save", str(file),
                 "--format", "torch"]) == 2
    err = capsys.readouterr().err
    assert ABSENT[name] in err
    assert len(err.splitlines()) == 1
    assert not file.exists()


def test_losses_are_numbered_in_the_order_of_the_last_stage():
    order = {Lane(0): ["0F0", "0F1", "0B0", "0B1"], Lane(1): ["1F1", "1F0", "1B0", "1B1"]}
    plan = pipelines.read_plan(Schedule.from_names(order), 2, 2)
    with pytest.raises(Refused, match="another order than 0, 1, 2, and torch's runtime numbers losses"):
        pipeline.for_torch(plan)


def test_updates_and_messages_stay_here_and_a_backward_of_one_part_is_a_full_one(tmp_path):
    """A first stage of one layer has no input gradient, so its backward is a weight gradient alone."""
    file = tmp_path / "grid.csv"
    asked = ["plan", "--model", "mlp", "--micro-batches", "4", "--costs", "analytic", "--save", str(file),
             "--scheduler", "zb_h1", "--format", "torch", "--ranks"]
    for ranks in (2, 4):
        assert main([*asked, str(ranks)]) == 0
        rows = file.read_text().splitlines()
        assert len(rows) == ranks
        assert "U" not in file.read_text()
        pipelines.read_plan(pipeline.from_torch(file.read_text()), ranks, 4)
    assert [cell[:2] for cell in rows[0].split(",") if cell] == ["0F"] * 4 + ["0B"] * 4
    plan = pipelines.plan("one_f_one_b", 2, 4)
    _, lowered = pipeline.add_communication(plan.graph, plan.schedule)
    assert pipeline.for_torch(pipelines.read_plan(lowered, 2, 4)) == pipeline.for_torch(plan)
