"""A grid of torch's says where stages are gathered, let go and summed: its plan does this, with equal bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import refusal, reported, run, run_json
from helpers import need
from rank_runs import recorded
from test_same_bits import PLACED as TEXT
from test_shards_in_pipelines import BASE, NAMES, gathers, plan
from test_torch_grids import as_csv, torch_order

import minidl as ml
from minidl import schedulers
from minidl.core.machine import PlanError
from minidl.passes.shard import Shards
from minidl.schedulers import pipeline


def computed(text: str) -> list[list[str]]:
    """The rows without messages."""
    return [[cell for cell in row.split(",") if cell and "SEND" not in cell and "RECV" not in cell]
            for row in text.splitlines()]


def read(text: str, folder: Path, **options: Any) -> Any:
    """The plan of a grid on two replicas of two ranks."""
    (folder / "grid.csv").write_text(text)
    found = ml.schedulers.find(str(folder / "grid.csv"), "pipeline")
    return plan(found, **options)


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "shard"), [
    *zip(NAMES[:4], ("1", "2,prefetch=0", "3,prefetch=0,keep=none", "3,prefetch=1,keep=0"), strict=True),
    ("zb_h1", "3"), ("interleaved_zb", "3,prefetch=0,keep=none"), ("looped_bfs", "3,prefetch=1,keep=0")])
def test_a_grid_comes_back(name: str, shard: str, tmp_path: Path) -> None:
    """Also without --shard. The order that is saved then plans the same."""
    made = plan(name, shard)
    text = pipeline.for_torch(made)
    again = read(text, tmp_path, chunks=made.placement.chunks)
    assert pipeline.for_torch(again) == text
    (tmp_path / "plan.csv").write_text(again.schedule.to_csv())
    saved = plan(ml.schedulers.find(str(tmp_path / "plan.csv"), "pipeline"), chunks=made.placement.chunks)
    assert saved.schedule.to_csv() == again.schedule.to_csv()
    assert saved.peak_bytes == again.peak_bytes


MODELS = {"gpt": ["--model-arg", "preset=tiny"],  # whose first and last stage share a weight
          "lenet": [],  # some of whose stages have no parameters
          "rnn": ["--model-arg", "preset=tiny"], "mlp": ["--model-arg", "layers=9", "--model-arg", "hidden=16"]}
POLICIES = [name for name in schedulers.names("pipeline", exact=True)
            if name not in ("joint", "optimal", "zb_auto", "roundpipe")
            and (policy := schedulers.find(name).staged).groups == 1 and not policy.sliced]


SHARDS = ["0", "1", "2,prefetch=1", "3,prefetch=0,keep=none", "3,prefetch=2,keep=0", "3"]
MORE = [[], ["--optimizer", "adamw", "--clip", "1"], ["--recompute", "all"]]


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.wide] * (seed > 2)) for seed in range(40)])
def test_every_grid_that_is_written_comes_back(seed: int, capsys: Any, tmp_path: Path) -> None:
    """With equal order and places: with the same --shard, without, and without replicas."""
    draw = np.random.default_rng(seed)
    model, shard, ranks = [*MODELS][seed % len(MODELS)], SHARDS[seed % len(SHARDS)], int(draw.integers(2, 4))
    name, more = POLICIES[draw.integers(len(POLICIES))], MORE[draw.integers(len(MORE))]
    flags = ["--model", model, *MODELS[model], "--costs", "analytic", "--parallel", "pipeline", "--ranks", str(ranks),
             "--micro-batches", str(2 * ranks), "--chunks", str(schedulers.find(name).staged.chunks)]
    both = ["--replicas", "2", "--batch-size", str(4 * ranks)]
    told = both + ["--shard", shard] * (shard != "0")

    def grid(policy: str, *flags: str) -> str:
        code, _, err = run(capsys, "plan", *flags, "--scheduler", policy, "--format", "torch", "--save",
                           str(tmp_path / "again.csv"))
        assert code == 0, err
        return (tmp_path / "again.csv").read_text()

    text = grid(name, *flags, *more, *told)
    assert not re.search(r"(\d+RESHARD),\1", text)
    (file := tmp_path / "grid.csv").write_text(text)
    flags += more if "--recompute" not in more else []  # a grid says what is computed
    for again in (told, both):
        assert grid(str(file), *flags, *again) == text
    tasks = [re.findall(r"\d+[FIWB]\d+", row) for row in text.splitlines()]
    alone = grid(str(file), *flags, "--batch-size", str(2 * ranks))  # a replica's, so that stages are the same
    assert [re.findall(r"\d+[FIWB]\d+", row) for row in alone.splitlines()] == tasks


def test_stages_are_gathered_and_summed_where_a_grid_says(tmp_path: Path) -> None:
    made = read(TEXT, tmp_path)
    assert computed(pipeline.for_torch(made)) == computed(TEXT)
    assert gathers(made, 0) == ["0AG0", "0AG0/1"]
    graph = made.graph
    assert graph.index("1B3") in graph.succs[graph.index("1AG0/1")]
    assert graph.index("1F3") in graph.preds[graph.index("1AG0/1")]
    later = read(TEXT.replace(",1B3,1REDUCE_GRAD,1RESHARD", ",1B3,1RESHARD,1REDUCE_GRAD"), tmp_path)
    assert pipeline.for_torch(later) == pipeline.for_torch(made), "at one place, sums come first"


def test_a_stage_is_whole_for_as_long_as_a_grid_says(tmp_path: Path) -> None:
    """Also while tasks of another stage run."""
    text = pipeline.for_torch(plan("interleaved", "3,prefetch=1,keep=0+2"))
    made = read(text.replace("2B0,", "2B0,0RESHARD,0UNSHARD,"), tmp_path, chunks=2)
    first, second, task = map(made.graph.index, ("0AG0", "0AG0/1", "2B0"))
    assert task in made.graph.succs[first]
    assert task in made.graph.preds[second]
    assert len(gathers(read(text, tmp_path, chunks=2), 0)) == len(gathers(made, 0)) - 1
    early = read(TEXT.replace("0F0,", "0F0,0RESHARD,0UNSHARD,"), tmp_path)
    assert len(gathers(early, 0)) == 3, "also after the first task of all"


def test_gradients_may_be_summed_long_after_their_stage_was_let_go(tmp_path: Path) -> None:
    text = pipeline.for_torch(plan("interleaved", "3,prefetch=0,keep=none"))
    for late, last in (("2REDUCE_GRAD,", "0REDUCE_GRAD"), ("3REDUCE_GRAD,", "1REDUCE_GRAD")):
        text = text.replace(late, "").replace(last, late + last)
    made = read(text, tmp_path, chunks=2)
    assert computed(pipeline.for_torch(made)) == computed(text)
    (scattered,) = (t for t in range(len(made.graph)) if made.graph.name(t) == "2AS0")
    assert made.graph.index("0B3") in made.graph.preds[scattered]


@pytest.mark.few(2)
@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleDualPipeV"])
def test_torchs_own_places_are_kept(name: str, most: int, tmp_path: Path) -> None:
    """Torch gathers the stages that it needs next, at most `most`, and lets go of others."""
    torch = need("torch.distributed.pipelining.schedules")
    order = torch_order(torch, name, 2, 4, 2)
    made = as_csv({rank: torch._add_reduce_grad(torch._add_unshard_reshard(actions, most), 4)
                   for rank, actions in order.items()})
    assert computed(pipeline.for_torch(read(made, tmp_path, chunks=2))) == computed(made)


@pytest.mark.parametrize(("old", "new", "why"), [
    ("0F1,", "0UNSHARD,0F1,", "stage 0 is gathered while it is whole"),
    ("0F1,0F2,0F3,0RESHARD,", "0F1,0RESHARD,0F2,0F3,", "0F2 uses stage 0, which is not whole then"),
    ("0RESHARD,0UNSHARD,0B0", "0RESHARD,0RESHARD,0UNSHARD,0B0", "stage 0 is gathered while it is whole, or let go"),
    ("1B0,", "1B0,1REDUCE_GRAD,", "stage 1 is summed before its last weight gradient 1B3"),
    ("0REDUCE_GRAD,", "0REDUCE_GRAD,0REDUCE_GRAD,", "stage 0 is summed twice after its last weight gradient 0B3"),
    ("0F1,", "0F1,1UNSHARD,", "1UNSHARD@0F1 is of a stage or a task that its rank does not have"),
    ("0F1,", "0F1,9RESHARD,", "9RESHARD@0F1 is of a stage"),
    ("1UNSHARD,1F0", "1F0", "stage 1 is gathered while it is whole, or let go")])
def test_what_cannot_be_kept_is_one_line(capsys: Any, tmp_path: Path, old: str, new: str, why: str) -> None:
    assert old in TEXT
    (file := tmp_path / "grid.csv").write_text(TEXT.replace(old, new, 1))
    assert why in refusal(capsys, "plan", *BASE, "--replicas", "2", "--scheduler", str(file))


def test_what_is_told_goes_before_the_places_of_a_grid(capsys: Any, tmp_path: Path) -> None:
    (file := tmp_path / "grid.csv").write_text(TEXT)
    flags = ["plan", *BASE, "--scheduler", str(file), "--save", str(tmp_path / "plan.csv")]
    assert reported(capsys, *flags)["tasks"] == reported(capsys, *flags, "--replicas", "1")["tasks"]

    def noted(*more: str) -> str:
        run_json(capsys, *flags, "--replicas", "2", *more)
        return re.search("# shards: (.*)", (tmp_path / "plan.csv").read_text())[1]  # type: ignore[index]

    assert noted() == noted("--shard", "3") == str(Shards.of(noted()))
    assert noted().startswith("3,placed=0UNSHARD+0RESHARD@0F3+0UNSHARD@0F3+0REDUCE_GRAD@0B3+")
    assert noted("--shard", "3,prefetch=1,keep=none") == "3,prefetch=1,keep=none"
    assert noted("--shard", "2,prefetch=0") == "2,prefetch=0"


@pytest.mark.parametrize("told", ["2,placed=0UNSHARD", "3,placed=0UNSHARD,keep=0", "3,placed=", "3,placed=0GATHER",
                                  "3,placed=0UNSHARD@0X0"])
def test_places_that_are_none(told: str) -> None:
    with pytest.raises(PlanError, match="with places as in ,placed=0UNSHARD"):
        Shards.of(told)


def test_places_are_of_stages() -> None:
    with pytest.raises(ValueError, match="places are of a pipeline's stages"):
        ml.plan(recorded()[1], "no_overlap", machine=ml.Machine(2), shard="3,placed=0UNSHARD")
