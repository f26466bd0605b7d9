"""Shards over the replicas of a pipeline: plans, torch's names, checkpoints. Their bits are in test_same_bits."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import reported
from helpers import need
from rank_runs import Run, check, planned, recorded
from torch_launcher import on_torch_ranks

import minidl as ml
from minidl.core.tasks import Kind
from minidl.schedulers import pipeline

NAMES = ["one_f_one_b", "interleaved", "zb_v", "dualpipe_v", "chimera"]


@pytest.mark.parametrize("more", [{"tied": True}, {"scheduler": "chimera", "groups": 2}], ids=str)
def test_copies_of_parameters_are_shares_too(more: dict[str, Any]):
    """On level 3 no rank has a whole parameter from step to step, and the home sends shares."""
    settings, sent = {"replicas": 2, **more}, []
    for shard in ("2,prefetch=0", "3,prefetch=0,keep=none"):
        made = planned(Run(settings).recorded(), {**settings, "shard": shard})
        own = [made.program(rank).graph for rank in range(4)]
        assert any(s.role == ml.Role.PARAMETER for s in own[0].storages)
        assert shard[0] == "2" or all(s.share_of is not None for graph in own for s in graph.storages
                                      if s.role == ml.Role.PARAMETER)
        sent.append(sum(t.bytes for graph in own for t in graph if t.kind == Kind.SF))
    assert sent[1] < sent[0]


# ---------------------------------------------------------------------------------------------------------------- plans
def plan(policy: Any, shard: Any = 0, ranks: int = 2, **options: Any) -> Any:
    """On two replicas."""
    machine = ml.Machine(ranks, replicas=2, collective=lambda sizes: 5 + 1e-3 * sum(sizes.values()))
    return ml.plan(recorded(optimizer="adam")[1], policy, ml.CostModel.analytic(), machine, shard=shard, **options)


def gathers(made: Any, rank: int) -> list[str]:
    """The all-gathers of a rank, in order."""
    own = made.schedule
    return [name for i, lane in enumerate(own.lanes) if lane.rank == rank for name in own.names(i) if "AG" in name]


def test_states_of_a_rank_with_several_stages_are_offloaded_beside_shards():
    """Tasks that wait for copies of a state were taken for its gradient's makers."""
    made = plan("interleaved", "3,prefetch=1,keep=none", offload="states")
    assert {Kind.D, Kind.AS, Kind.AG} <= {*map(Kind, made.graph.kind.tolist())}


def test_shards_need_less_memory_level_by_level():
    peaks = [max(plan("interleaved", shard).peak_bytes)
             for shard in (0, "1", "2,prefetch=0", "3,prefetch=0,keep=none")]
    assert peaks[0] > peaks[1] >= peaks[2] > peaks[3]


def test_where_parameters_are_whole_is_an_argument():
    """A stage that stays whole is gathered once; others are before each run of their tasks."""
    stages = {shard: [re.match(r"\d+", name)[0] for name in gathers(plan("interleaved", shard), 0)]  # type: ignore[index]
              for shard in ("3,prefetch=0,keep=none", "3,prefetch=0,keep=0", "3,prefetch=0,keep=0+2")}
    none, first, both = stages.values()
    assert none.count("0") > 1
    assert none.count("2") > 1
    assert (first.count("0"), first.count("2")) == (1, none.count("2"))
    assert sorted(both) == ["0", "2"]


def prefetched(distance: str, ranks: int = 2, chunks: int = 4) -> Any:
    return plan("interleaved", f"3,prefetch={distance},keep=none", ranks=ranks, chunks=chunks)


def test_each_rank_gathers_at_its_own_distance():
    """Each rank gathers as in a plan that gives its distance to all ranks."""
    mixed, same = prefetched("2+0"), [prefetched("2"), prefetched("0")]
    assert [gathers(mixed, rank) for rank in (0, 1)] == [gathers(same[rank], rank) for rank in (0, 1)]
    assert gathers(same[0], 1) != gathers(same[1], 1)


def test_full_gathers_all_at_the_start_and_auto_more_on_later_ranks():
    """torch's rule: on rank r at most r + 2 stages are whole, including the one in use."""
    full = prefetched("full")
    for rank in (0, 1):
        own = full.program(rank).graph
        assert len(gathers(full, rank)) == 4
        assert not any(own.kind[own.preds[t]].size for t in range(len(own)) if own.kind[t] == Kind.AG)
    for ranks, told in ((2, "1+2"), (4, "1+1+1+1")):
        auto = prefetched("auto", ranks, 8 // ranks)
        assert auto.schedule.keys.tolist() == prefetched(told, ranks, 8 // ranks).schedule.keys.tolist()
        assert auto.schedule.notes["shards"] == "3,prefetch=auto,keep=none"


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "ranks", "shard"), [
    ("interleaved", 2, "3,prefetch=1+0,keep=none"), ("interleaved", 2, "3,prefetch=auto"),
    ("zb_v", 2, "3,prefetch=0+1,keep=3"), ("looped_bfs", 2, "2,prefetch=0+2"),
    ("interleaved", 4, "3,prefetch=full,keep=none"), ("zb_v", 4, "3,prefetch=1+0+0+1,keep=none"),
    ("hanayo", 4, "2,prefetch=auto")])
def test_any_distance_leaves_the_bits_of_one_process_in_the_planned_bytes(name: str, ranks: int, shard: str):
    check({"scheduler": name, "ranks": ranks, "replicas": 2, "shard": shard, "optimizer": "adam", "clip": 0.5})


def test_the_search_is_no_slower_than_what_is_told():
    free = plan("interleaved", 3)
    assert free.period <= min(plan("interleaved", f"3,prefetch={d},keep={keep}").period for d in (0, 1)
                              for keep in ("none", "0+1+2+3")) * (1 + 1e-8)
    assert free.remarks == (f"shards: {free.schedule.notes['shards']} is the fastest predicted",)


BASE = ["--model", "mlp", "--model-arg", "layers=4", "--costs", "analytic", "--parallel", "pipeline", "--ranks", "2",
        "--micro-batches", "4"]


# ---------------------------------------------------------------------------------------------------------------- torch
@pytest.mark.parametrize("shard", ["2,prefetch=0", "3,prefetch=0,keep=none"])
def test_torchs_grid_says_when_stages_are_whole_and_summed(capsys: Any, tmp_path: Path, shard: str):
    """The runtime's rules: a stage is gathered before it computes, freed once, and summed after its last backward."""
    file, more = tmp_path / "grid.csv", [*BASE, "--replicas", "2", "--chunks", "2", "--scheduler", "interleaved"]
    made = reported(capsys, "plan", *more, "--shard", shard, "--save", str(file), "--format", "torch")
    for row in csv.reader(io.StringIO(file.read_text())):
        whole, summed, gathered = set[str](), set[str](), 0
        for cell in row:
            stage, what = re.fullmatch(r"(\d+)([A-Z_]+)\d*", cell).groups()  # type: ignore[union-attr]
            if what == "UNSHARD":
                assert stage not in whole
                whole.add(stage)
                gathered += 1
            elif what == "RESHARD":
                whole.remove(stage)
            elif what == "REDUCE_GRAD":
                assert stage not in summed
                summed.add(stage)
            elif what in ("F", "I", "W", "B"):
                assert stage in whole
                assert stage not in summed
        assert not whole
        assert len(summed) == 2
        assert (gathered == 2) == (shard[0] == "2"), "of two stages"
    again = reported(capsys, "plan", *more[:-2], "--scheduler", str(file), "--shard", shard, "--save",
                     str(tmp_path / "plan.csv"))
    assert [again[key] for key in ("tasks", "peak_bytes", "period")] == [
        made[key] for key in ("tasks", "peak_bytes", "period")]


@pytest.mark.wide
def test_torchs_runtime_shards_as_the_grid_says(tmp_path: Path):
    """Two replicas of two ranks, whose stages FSDP shards; its mean over replicas may round otherwise."""
    need("torch.distributed.fsdp")
    written = 0
    for name in ("gpipe", *NAMES[:4], "zb_h1"):
        for shard in ("1", "3,prefetch=0,keep=none", "3,prefetch=1,keep=none"):
            made = plan(name, shard)
            stages = made.placement.stages
            (tmp_path / f"{stages}-4-{name}-{written}.csv").write_text(pipeline.for_torch(made))
            written += 1
    for lines in on_torch_ranks("torch_shards.py", 4, tmp_path, written):
        assert [name for name, apart in lines if not apart < 1e-6] == []


# ------------------------------------------------------------------------------------------------------------- training
