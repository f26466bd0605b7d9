"""Checkpoints of ranks: a folder in Hugging Face's form has the same content as one file, and any ranks can read
it."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import reported
from helpers import bits, drawn, need, refuses, together, torch_or_skip
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import safetensors, text

import minidl as ml
from minidl import checkpoint, models
from minidl.autograd.tape import use
from minidl.pricing.cost import Link
from minidl.training import keeper, sharded, weights
from minidl.training.agreement import Disagreement
from minidl.training.checkpoint import CheckpointError
from minidl.training.job import Job
from minidl.training.keeper import Keeper
from minidl.training.pipeline_trainer import PipelineTrainer
from minidl.training.rank_trainer import RankTrainer
from minidl.training.recorded import Recorded

COST = ml.CostModel.analytic()
STEPS = 2
GPT = {"model": "gpt", "model_args": {"preset": "tiny"}, "batch_size": 8, "optimizer": "adamw"}
CONV = {"model": "resnet20", "model_args": {"width": 2}, "batch_size": 8, "optimizer": "sgd"}
#: layout -> ranks, replicas, job; together they share out, cut, tie, permute and drop
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "data": (3, 1, {**CONV, "parallel": "data", "batch_size": 6}),
    "states shared": (2, 1, {**GPT, "parallel": "data", "shard": 1}),
    "all shared": (4, 1, {**CONV, "parallel": "data", "shard": 3}),
    "experts": (2, 1, {**GPT, "model": "moe_gpt", "parallel": "data", "scheduler": "barrier", "experts_over": "data"}),
    "pipeline": (3, 1, {**GPT, "parallel": "pipeline", "scheduler": "one_f_one_b", "micro_batches": 4}),
    "both ways": (2, 1, {**GPT, "parallel": "pipeline", "scheduler": "chimera", "micro_batches": 4, "groups": 2}),
    "older weights": (2, 1, {**CONV, "parallel": "pipeline", "scheduler": "pipedream", "micro_batches": 2,
                             "update_every": 1}),
    "replicas": (2, 2, {**GPT, "parallel": "pipeline", "scheduler": "zb_h1", "micro_batches": 2}),
    "replicas, all shared": (2, 2, {**GPT, "parallel": "pipeline", "scheduler": "interleaved", "micro_batches": 2,
                                    "shard": 3}),
}


def trainer_of(recorded: Recorded, communicator: Any) -> Any:
    return (RankTrainer(recorded, COST, communicator, (1.0, 1e-3)) if recorded.job.parallel == "data" else
            PipelineTrainer(recorded, COST, communicator, Link(50.0, 1e3)))


def trained(layout: str, save: Any, steps: int = STEPS) -> list[Any]:
    """What `save(trainer)` returns on each rank, in the middle of a run."""
    ranks, replicas, job = LAYOUTS[layout]
    task = Job(**{"scheduler": "barrier", **job})
    own = [Recorded(task, rank if job["parallel"] == "data" else rank // ranks,
                    ranks if job["parallel"] == "data" else replicas) for rank in range(ranks * replicas)]

    def work(communicator: Any) -> Any:
        trainer = trainer_of(own[communicator.rank], communicator)
        for _ in range(steps):
            trainer.step()
        found = save(trainer)
        trainer.finish()
        return found

    return together(len(own), work)


def saved(trainer: Any, path: Path, step: int = STEPS, **more: Any) -> None:
    found = Keeper(path, schedules=False, **more)
    found.gather(trainer)
    found.save(trainer, step, {"loss": 1.0})


def state(path: Path, job: dict[str, Any]) -> tuple[Any, ...]:
    """Everything that one process loads."""
    run = Recorded(Job(**{k: v for k, v in job.items() if k in ("model", "model_args", "optimizer", "batch_size")}))
    with use(run.tape):
        found = checkpoint.load(path, run.model, run.optimizer, loader=run.train_data)
        counter = bytes(ml.autograd.random.dropout_counter().data[:8])
    tensors = [t for _, t in (*run.model.named_tensors(), *run.optimizer.named_tensors())]
    return bits(*tensors), counter, run.train_data.state(), found


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_of_ranks_has_what_one_file_has(layout: str, tmp_path: Path) -> None:
    def save(trainer: Any) -> None:
        saved(trainer, tmp_path / "folder")
        saved(trainer, tmp_path / "one.safetensors")

    trained(layout, save)
    (folder,) = (tmp_path / "folder").iterdir()
    ranks, replicas, job = LAYOUTS[layout]
    assert folder.name == f"step-{STEPS:08d}"
    assert state(tmp_path / "folder", job) == state(tmp_path / "one.safetensors", job)
    about = json.loads((folder / "model.safetensors.index.json").read_text())
    places = about["weight_map"], about["metadata"]["minidl"]["weight_map"]
    files = {file for each in places for file in each.values()}
    assert {f.name for f in folder.iterdir()} == {*files, "model.safetensors.index.json"}
    assert len(files) == 2 * ranks * replicas, "each rank writes a part"
    assert about["metadata"]["total_size"] == sum(
        (folder / f).stat().st_size - 8 - int.from_bytes((folder / f).read_bytes()[:8], "little")
        for f in {*places[0].values()})


@settings(max_examples=drawn(200), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 100), st.sets(st.integers(0, 3), min_size=1)), max_size=30))
def test_each_tensor_is_written_once_by_a_rank_that_holds_it(tensors: list[tuple[int, set[int]]]) -> None:
    sizes = {str(i): size for i, (size, _) in enumerate(tensors)}
    held = [{str(i) for i, (_, ranks) in enumerate(tensors) if r in ranks} for r in range(4)]
    found = sharded.writers(sizes, held)
    assert found.keys() == sizes.keys()
    assert all(name in held[rank] for name, rank in found.items())
    if all(len(ranks) == 4 for _, ranks in tensors) and tensors:
        load = [sum(sizes[n] for n, rank in found.items() if rank == r) for r in range(4)]
        assert max(load) - min(load) <= max(sizes.values())


#: layouts of equal bits -> flags; in a group, all add up gradients in one order
GROUPS = [
    {"one process": ["--micro-batches", "4"],
     "2 ranks": ["--micro-batches", "4", "--parallel", "pipeline", "--ranks", "2", "--scheduler", "zb_h1"],
     "4 ranks": ["--micro-batches", "4", "--parallel", "pipeline", "--ranks", "4", "--scheduler", "gpipe"],
     "4 data": ["--parallel", "data", "--ranks", "4", "--scheduler", "barrier"],
     "4 data, all shared": ["--parallel", "data", "--ranks", "4", "--scheduler", "barrier", "--shard", "3"]},
    {"2 data": ["--micro-batches", "2", "--parallel", "data", "--ranks", "2", "--scheduler", "priority"],
     "2 data, gradients shared": ["--micro-batches", "2", "--parallel", "data", "--ranks", "2", "--scheduler",
                                  "barrier", "--shard", "2"],
     "2 x 2": ["--micro-batches", "2", "--parallel", "pipeline", "--ranks", "2", "--replicas", "2", "--scheduler",
               "one_f_one_b"],
     "2 x 2, states shared": ["--micro-batches", "2", "--parallel", "pipeline", "--ranks", "2", "--replicas", "2",
                              "--scheduler", "one_f_one_b", "--shard", "1"],
     "2 x 2, all shared": ["--micro-batches", "2", "--parallel", "pipeline", "--ranks", "2", "--replicas", "2",
                           "--scheduler", "interleaved", "--shard", "3"]}]
RUN = ["--model", "mlp", "--batch-size", "16", "--optimizer", "adam", "--costs", "analytic"]


def run(capsys: Any, steps: int, *flags: str) -> dict[str, Any]:
    return reported(capsys, "train", *RUN, "--steps", str(steps), *flags)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.wide) for n in range(1, 4))])
@pytest.mark.parametrize("group", GROUPS, ids=["one order", "another order"])
def test_a_run_goes_on_on_any_ranks_with_the_bits_of_one_that_never_stopped(
        group: dict[str, list[str]], seed: int, capsys: Any, tmp_path: Path) -> None:
    """It goes through all layouts, in an order drawn from the seed."""
    names = random.Random(seed).sample(sorted(group), len(group))
    whole = run(capsys, len(names), *group[names[0]])
    for steps, name in enumerate(names, 1):
        found = run(capsys, steps, *group[name], "--checkpoint", str(tmp_path / "run"),
                    *(["--resume"] if steps > 1 else []))
        assert found["steps"] == 1
    assert found["params_sha256"] == whole["params_sha256"], names
    assert len([*(tmp_path / "run").iterdir()]) == 1


def test_a_rank_reads_what_it_trains_and_nothing_else(tmp_path: Path) -> None:
    """Tensors stay in their files until somebody asks for them."""
    trained("pipeline", lambda trainer: saved(trainer, tmp_path))
    ranks, _, job = LAYOUTS["pipeline"]
    own = [Recorded(Job(**job)) for _ in range(ranks)]
    for rank, mine in enumerate(own):
        with use(mine.tape):
            checkpoint.load(tmp_path, mine.model, mine.optimizer, loader=mine.train_data, part=(rank, ranks))
        assert all(t.storage.initial is not None for _, t in mine.model.named_tensors())

    def work(communicator: Any) -> set[str]:
        mine = own[communicator.rank]
        trainer = trainer_of(mine, communicator)
        trainer.step()
        read = {name for name, t in mine.model.named_tensors() if t.storage.initial is None}
        trainer.finish()
        return read

    read = together(ranks, work)
    every = {name for name, _ in own[0].model.named_tensors()}
    assert set().union(*read) == every
    assert all(len(names) < len(every) * 2 / 3 for names in read)


def test_transformers_reads_what_ranks_save(tmp_path: Path) -> None:
    torch, transformers = torch_or_skip(), need("transformers")
    trained("pipeline", lambda trainer: saved(trainer, tmp_path))
    (folder,) = tmp_path.iterdir()
    config = models.create("gpt", preset="tiny").config
    transformers.GPT2Config(**config, vocab_size=256, n_positions=16, n_embd=32, n_layer=2).save_pretrained(folder)
    theirs, about = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(about[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    mine = models.create("gpt", preset="tiny").eval()
    assert weights.load(folder, mine) == weights.Loaded((), ())
    ids = np.random.default_rng(0).integers(1, 256, (3, 16))
    with torch.no_grad(), ml.no_grad():
        np.testing.assert_allclose(mine(ids).numpy(), theirs.eval()(torch.from_numpy(ids)).logits.numpy(), rtol=0,
                                   atol=1e-5)


@pytest.mark.slow
def test_the_package_safetensors_reads_each_file(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    trained("all shared", lambda trainer: saved(trainer, tmp_path))
    (folder,) = tmp_path.iterdir()
    found = {name: value for file in folder.glob("model-*") for name, value in load_file(file).items()}
    mine = checkpoint.weights(tmp_path)
    assert found.keys() == mine.keys()
    assert all(bits(found[name]) == bits(mine[name]) for name in found)


# -------------------------------------------------------------------------------------------------- whole or not at all
@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["optimizer-00002", "model.safetensors.index", "the name"])
@pytest.mark.parametrize("layout", ["data", "replicas, all shared"])
def test_a_full_disk_of_one_rank_is_one_line_on_all_and_leaves_the_old_one(
        layout: str, where: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The disk is full at one rank's second file, at the index, which is the last file, or at the folder's name."""
    said: list[str] = []
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write_new, put_in_place = sharded.write_new, sharded.put_in_place

    def writes(path: Path, pieces: Any) -> None:
        if path.name.startswith(where) and path.parent.name == ".step-00000002.part":
            next(iter(pieces))
            raise full
        write_new(path, pieces)

    def names(part: Path, folder: Path) -> None:
        if where == "the name" and folder.name == "step-00000002":
            raise full
        put_in_place(part, folder)

    monkeypatch.setattr(sharded, "write_new", writes)
    monkeypatch.setattr(sharded, "put_in_place", names)

    def save(trainer: Any) -> None:
        saved(trainer, tmp_path, 1)
        with pytest.raises(Disagreement) as caught:
            saved(trainer, tmp_path, 2)
        said.append(str(caught.value))
        trainer.communicator.gather(None)

    trained(layout, save)
    assert len({*said}) == 1
    assert said[0].endswith(f"cannot save {tmp_path / 'step-00000002'}: No space left on device; an earlier checkpoint "
                            f"is unchanged")
    assert [f.name for f in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoint.peek(tmp_path).step == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", ["data", "replicas"])
def test_ranks_that_do_not_see_one_folder_save_nothing_and_say_so(layout: str, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a folder of this name, as on a machine's own disk."""
    monkeypatch.chdir(tmp_path)
    ranks, replicas, _ = LAYOUTS[layout]
    said = list[str]()

    def save(trainer: Any) -> None:
        here = Path(str(trainer.rank))
        here.mkdir()
        os.chdir(here)
        with checkpoint.claim("folder") if trainer.rank == 0 else nullcontext():
            trainer.gather(None)
            checkpoint.check_shared("folder.safetensors")  # which rank 0 writes alone
            if trainer.rank:
                refuses((lambda: checkpoint.check_shared("folder"), "cannot save to folder: .* that all ranks share"))
            else:
                checkpoint.check_shared("folder")
        with pytest.raises(Disagreement) as caught:
            saved(trainer, Path("folder"))
        said.append(str(caught.value))

    trained(layout, save)
    assert {*said} == {"rank 0: cannot save folder/step-00000002: model-00002-of-"
                       f"{ranks * replicas:05}.safetensors of another rank is not there; all ranks must share it"}
    assert not [f for f in tmp_path.rglob("*") if f.is_file() or "step" in f.name]


def test_what_a_killed_run_has_left_is_removed_and_the_old_one_counts(tmp_path: Path) -> None:
    trained("data", lambda trainer: saved(trainer, tmp_path))
    shutil.copytree(tmp_path / "step-00000002", tmp_path / ".step-00000003.part")
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000009")
    (tmp_path / "step-00000009" / weights.INDEX).unlink()
    assert checkpoint.peek(tmp_path).step == 2
    with checkpoint.claim(tmp_path):
        assert not (tmp_path / ".step-00000003.part").exists()


@pytest.mark.parametrize("relative", [pytest.param(False, marks=pytest.mark.wide), True])
def test_the_last_ones_and_the_best_stay(relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 99_999_999: 2.5, 100_000_000: 1.5}  # which are sorted as numbers, not as text

    def save(trainer: Any, **more: Any) -> None:
        keeps = Keeper("." if relative else tmp_path, last=2, schedules=False)
        for step, loss in losses.items():
            keeps.save(trainer, step, {"loss": loss, "accuracy": -loss})

    trained("data", save)
    names = {f.name for f in tmp_path.iterdir()}
    assert names == {"step-00000002", "step-99999999", "step-100000000", keeper.GOOD}
    assert checkpoint.peek(tmp_path).step == 100_000_000
    assert checkpoint.peek(tmp_path / keeper.GOOD).step == 2


def test_a_folder_without_its_index_is_damaged_and_no_run_begins_beside_it(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / folder.name)
    (tmp_path / folder.name / weights.INDEX).unlink()
    assert checkpoint.exists(tmp_path)
    with pytest.raises(checkpoint.CheckpointError, match=r"step-00000002 is damaged: it has no model.safetensors.ind"):
        checkpoint.peek(tmp_path)


def test_a_step_that_is_saved_is_not_saved_again(tmp_path: Path) -> None:
    def save(trainer: Any) -> None:
        saved(trainer, tmp_path)
        saved(trainer, tmp_path)

    trained("data", save)
    assert [f.name for f in tmp_path.iterdir()] == ["step-00000002"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    place = tmp_path_factory.mktemp("run")
    trained("states shared", lambda trainer: saved(trainer, place))
    return place / "step-00000002"


def edited(change: Any) -> Any:
    def edit(folder: Path) -> None:
        index = folder / weights.INDEX
        about = json.loads(index.read_text())
        change(about)
        index.write_text(json.dumps(about))

    return edit


def other_digest(about: Any) -> None:
    own = about["metadata"]["minidl"]
    del own["digest"]
    own["weight_map"]["optimizer.lr"] = "../x.safetensors"
    own["digest"] = sharded._digest(own, about["weight_map"])


def two_places(about: Any) -> None:
    """The index of the network and the index of all other tensors name the same tensor."""
    own = about["metadata"]["minidl"]
    del own["digest"]
    about["weight_map"]["optimizer.lr"], own["sha256"]["../x.safetensors"] = "../x.safetensors", ""
    own["digest"] = sharded._digest(own, about["weight_map"])


DAMAGES: dict[str, tuple[Any, str]] = {
    "a file is gone": (lambda f: (f / "optimizer-00002-of-00002.safetensors").unlink(), "there is no file"),
    "a file is cut": (lambda f: os.truncate(f / "model-00001-of-00002.safetensors", 1000), "damaged"),
    "a bit is flipped": (lambda f: flip(f / "model-00002-of-00002.safetensors"), "its digest is wrong"),
    "another step": (edited(lambda a: a["metadata"]["minidl"]["texts"].update(minidl="{}")), "its digest is wrong"),
    "no metadata": (edited(lambda a: a.pop("metadata")), "is not a checkpoint of minidl"),
    "no map": (edited(lambda a: a.update(weight_map=[])), "damaged or no index"),
    "a file outside": (edited(other_digest), "outside of its folder"),
    "two places": (edited(two_places), "its digest is wrong"),
}


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_one_line_and_changes_nothing(damage: str, folder: Path, tmp_path: Path) -> None:
    act, says = DAMAGES[damage]
    act(shutil.copytree(folder, tmp_path / "step-00000002"))
    mine = Recorded(Job(**GPT))
    before = mine.train_data.state()
    refuses((lambda: checkpoint.load(tmp_path / "step-00000002", mine.model, mine.optimizer, loader=mine.train_data),
             says), error=CheckpointError)
    assert mine.train_data.state() == before


@pytest.mark.parametrize(("name", "mutate"), [("model-00001-of-00002.safetensors", safetensors),
                                              (weights.INDEX, text)])
def test_a_mutated_folder_is_one_line_or_what_was_saved(name: str, mutate: Any, folder: Path, tmp_path: Path) -> None:
    place, mine = shutil.copytree(folder, tmp_path / "step-00000002"), Recorded(Job(**GPT))
    content = (folder / name).read_bytes()
    for seed in range(drawn(120)):
        (place / name).write_bytes(mutate(np.random.default_rng(seed), content))
        said = ""
        try:
            checkpoint.load(place, mine.model)
        except CheckpointError as error:
            said = str(error)
        assert "\n" not in said, seed
