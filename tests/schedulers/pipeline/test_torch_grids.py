"""Torch's own pipeline orders: ours are equal to them, and its lowered grids are read."""

import re
from types import SimpleNamespace

import numpy as np
import pipelines
import pytest
from helpers import need

from minidl.cli import main
from minidl.core.schedule import ScheduleError
from minidl.core.tasks import Kind, unpack
from minidl.schedulers import pipeline
from minidl.schedulers.pipeline import v_shape
from minidl.schedulers.pipeline.problem import Problem

LOOPED = {"ScheduleInterleaved1F1B": "interleaved", "ScheduleInterleavedZeroBubble": "interleaved_zb",
          "ScheduleLoopedBFS": "looped_bfs"}


@pytest.fixture(scope="module")
def torch_pipelines():
    return need("torch.distributed.pipelining.schedules")


def torch_order(module, name, p, m, chunks=1):
    """The actions of each rank in one of torch's schedules, made without a process group."""
    wave = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    held = [c * p if not wave or c % 2 == 0 else 2 * p - 1 for c in range(chunks)]
    stages = [SimpleNamespace(group_size=p, group_rank=0, num_stages=p * chunks, stage_index=i, has_backward=True,
                              is_first=i == 0, is_last=i == p * chunks - 1, stage_index_to_group_rank={}, group=None,
                              submod=None) for i in held]
    if chunks == 1:
        made = getattr(module, name)(stages[0], m, loss_fn=lambda output, target: 0)
        return made._get_pipeline_order()
    return getattr(module, name)(stages, m, loss_fn=lambda output, target: 0).pipeline_order


def as_csv(order):
    return "\n".join(",".join("" if action is None else str(action) for action in order[r]) for r in sorted(order))


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("times", [2, 3])
def test_our_orders_are_torchs(torch_pipelines, p, times):
    m = times * p
    for name, ours, chunks in (("ScheduleGPipe", "gpipe", 1), ("ScheduleInterleaved1F1B", "interleaved", 2),
                               ("ScheduleInterleaved1F1B", "interleaved", 3),
                               ("ScheduleInterleavedZeroBubble", "interleaved_zb", 2),
                               ("ScheduleDualPipeV", "dualpipe_v", 2)):
        theirs = pipeline.from_torch(as_csv(torch_order(torch_pipelines, name, p, m, chunks)))
        planned = pipelines.plan(ours, p, m, chunks=chunks)
        assert theirs.to_csv() == planned.schedule.to_csv(), name
    problem = Problem.of(placement := pipelines.place("zb_v", p), m, pipeline.costs(placement, 1.0, 1.0, 1.0))
    theirs = pipeline.from_torch(as_csv(torch_order(torch_pipelines, "ScheduleZBVZeroBubble", p, m, 2)))
    assert theirs.to_csv() == v_shape.handcrafted(problem).to_csv()


def test_torchs_1f1b_table_is_ours_but_for_the_numbers_on_the_last_rank(torch_pipelines):
    theirs = as_csv(torch_order(torch_pipelines, "Schedule1F1B", 4, 8)).splitlines()
    last = re.sub(r"F(\d+)", lambda found: f"F{int(found[1]) - 1}", theirs[-1])  # it counts forwards from 1 on
    assert (pipeline.from_torch("\n".join([*theirs[:-1], last])).to_csv()
            == pipelines.plan("one_f_one_b", 4, 8).schedule.to_csv())


def test_torchs_looped_bfs_adds_gradients_in_descending_order(torch_pipelines, tmp_path, capsys):
    p, m = 2, 3
    text = as_csv(torch_order(torch_pipelines, "ScheduleLoopedBFS", p, m, 2))
    with pytest.raises(ScheduleError, match="runs before .* ascending order, .*LoopedBFS.* number the") as no:
        pipelines.read_plan(pipeline.from_torch(text), p, m, 2)
    assert no.value.tasks == ("0B0", "0B1")
    (path := tmp_path / "bfs.csv").write_text(text)
    assert main(["check", str(path), "--ranks", "2", "--micro-batches", "3", "--chunks", "2"]) == 1
    assert "LoopedBFS" in capsys.readouterr().out
    ascending = re.sub(r"B(\d+)", lambda found: f"B{m - 1 - int(found[1])}", text)
    assert pipeline.from_torch(ascending).to_csv() == pipelines.plan("looped_bfs", p, m, chunks=2).schedule.to_csv()


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


@pytest.mark.parametrize("cell", ["UNSHARD", "1UNSHARD2", "1RESHAR", "xREDUCE_GRAD"])
def test_a_misspelt_fsdp_action_is_one_clear_line(cell):
    with pytest.raises(ScheduleError, match="row 1, cell 2: .* is not an action"):
        pipeline.from_torch(f"0F0,{cell},0B0")


def test_interleaving_names_the_rounds_that_fit():
    for name in ("interleaved", "interleaved_zb"):
        with pytest.raises(pipeline.PipelineError, match=r"use 8 or 12, or rounds of 5 \(.* round_size=5\)"):
            pipelines.plan(name, 4, 10)
        assert pipelines.plan(name, 4, 10, round_size=5).micro_batches == 10
        with pytest.raises(pipeline.PipelineError, match="not 3; use 4$"):
            pipelines.plan(name, 4, 3)
