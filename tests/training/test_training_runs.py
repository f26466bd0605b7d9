"""Runs that can be watched: what is logged, judged and saved along the way; how they end, go on, and write text."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from command_line import refusal, reported, shown

from minidl import checkpoint, data, models
from minidl.autograd.tape import no_grad
from minidl.cli import main, runs
from minidl.data import tokens
from minidl.data.loader import permutation
from minidl.pricing.cost import CostModel
from minidl.runtime.comm.loopback import LoopBack
from minidl.system.files import Growing
from minidl.training import loop, sampling, trainer
from minidl.training.job import OPTIMIZERS, Job
from minidl.training.recorded import Recorded
from minidl.training.sampling import Writer
from minidl.training.trainer import Trainer, TrainingError

#: 1,438 samples, so epochs end with steps 12, 23, 34, 45
SMALL = ["--model", "mlp", "--model-arg", "hidden=16", "--batch-size", "128", "--costs", "analytic"]


RANKS = {"alone": [], "data": ["--parallel", "data", "--ranks", "2", "--scheduler", "priority"],
         **{name: ["--parallel", "pipeline", "--ranks", "2", "--micro-batches", "4", "--scheduler", name]
            for name in ("gpipe", "pipedream", "zb_h1")}}


def train(capsys, *argv, code=0):
    assert main(["train", *SMALL, *map(str, argv), "--json"]) == code
    caught = capsys.readouterr()
    return (json.loads(caught.out) if caught.out else None), caught.err


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_the_log_has_what_a_run_does(capsys, tmp_path):
    log = tmp_path / "log.jsonl"
    record, err = train(capsys, "--epochs", 2, "--log", log, "--log-every", 4)
    found = lines(log)
    assert [r["step"] for r in found if "loss" in r] == [4, 8, 12, 16, 20]
    assert [r["step"] for r in found if "test_accuracy" in r] == [12, 23]
    for r in found:
        if "loss" in r:
            assert r["lr"] == 0.05
            assert r["samples_per_s"] > 0
            assert r["eta_s"] >= 0
            assert r["epoch"] == pytest.approx(r["step"] * 128 / 1438, abs=1e-3)
    assert found[-1]["test_loss"] == record["test"]["loss"]
    assert len(err.splitlines()) == 6  # five records, and the epoch that was not the last
    assert re.match(r"step 4 of 23 \(0.4 epochs\): loss [\d.]+, lr 0.05, [\d,]+ samples/s, \d+:\d\d:\d\d left", err)
    assert "step 12 of 23 (1.1 epochs): test loss" in err
    train(capsys, "--steps", 3, "--log", log)
    assert [r["step"] for r in lines(log)] == [3]  # a new run begins a new log


def test_time_apart_from_steps_counts_once(monkeypatch):
    """A step takes a second; after the second one, judging takes 10 and saving 5."""
    clock = [0.0]
    monkeypatch.setattr(loop, "perf_counter", lambda: clock[0])
    trainer = SimpleNamespace(ended=0.0, waits=[0.0] * 3, seconds=[1.0] * 2, strange=[0], loads=list)
    trainer.job, trainer.recorded = SimpleNamespace(batch_size=4), SimpleNamespace(
        train_data=SimpleNamespace(position=12, batch_size=4, samples=8), optimizer=SimpleNamespace(lr=0.1))
    speed = loop._Speed(trainer, 6, 0)
    clock[0] = trainer.ended = 2.0
    for passed in (12.0, 17.0):
        clock[0] = passed
        speed.pause()
    clock[0] = trainer.ended = 18.0
    found = speed.record(3, 0.5)
    assert (found["samples_per_s"], found["eta_s"]) == (4.0, 3.0)


@pytest.mark.parametrize(("at", "value"), [(0, np.nan), (-1, np.inf)])
def test_metrics_that_are_not_finite_end_a_run(at, value):
    """And NumPy warns of nothing beside the line."""
    trainer = Trainer(Recorded(Job(model_args={"hidden": 4})), CostModel.analytic())
    trainer.recorded.model.parameters()[at].assign(value)
    with pytest.raises(TrainingError, match="the loss on test data is nan at step 0 of mlp"):
        trainer.evaluate()


def test_evaluations_and_logs_change_no_bit(capsys, tmp_path):
    plain, _ = train(capsys, "--steps", 23)
    watched, _ = train(capsys, "--epochs", 2, "--log", tmp_path / "l", "--log-every", 1, "--checkpoint", tmp_path / "c",
                       "--checkpoint-every", 3, "--keep", 2)
    assert plain["params_sha256"] == watched["params_sha256"]


def test_tensorboard_gets_the_same_numbers(capsys, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(capsys, "--epochs", 1, "--tensorboard", tmp_path / "t", "--log", tmp_path / "l", "--log-every", 5)
    events = EventAccumulator(str(tmp_path / "t"))
    events.Reload()
    for record in lines(tmp_path / "l"):
        for name, value in record.items():
            if name in ("loss", "lr"):
                (there,) = [e for e in events.Scalars(name) if e.step == record["step"]]
                assert value == pytest.approx(there.value)
    assert events.Scalars("test/accuracy")[-1].step == 12


def test_the_learning_rate_warms_up_and_falls_along_a_cosine(capsys, tmp_path):
    train(capsys, "--steps", 20, "--lr", 0.1, "--lr-schedule", "cosine", "--warmup", 4, "--log", tmp_path / "l",
          "--log-every", 1)
    rates = [r["lr"] for r in lines(tmp_path / "l") if "lr" in r]
    wanted = [0.1 * (n + 1) / 5 for n in range(4)] + [0.05 * (1 + np.cos(np.pi * n / 16)) for n in range(16)]
    np.testing.assert_allclose(rates, wanted, rtol=1e-5)
    _, err = train(capsys, "--steps", 4, "--warmup", 4, code=2)
    assert "--warmup 4 is not shorter" in err


def test_a_run_with_a_schedule_goes_on_as_if_it_had_not_ended(capsys, tmp_path, monkeypatch):
    flags = ["--lr-schedule", "cosine", "--warmup", 3, "--steps", 20]
    whole, _ = train(capsys, *flags, "--lr", 0.07)
    from minidl.training import trainer

    step, done = trainer.Trainer.step, [0]

    def broken(self):
        done[0] += 1
        if done[0] in (9, 14):
            raise trainer.data.DataError("picture 7 is damaged")
        step(self)

    monkeypatch.setattr(trainer.Trainer, "step", broken)
    _, err = train(capsys, *flags, "--lr", 0.07, "--checkpoint", tmp_path / "c", "--log", tmp_path / "l", "--log-every",
                   1, code=2)
    assert err.splitlines()[-1] == "minidl: picture 7 is damaged"
    assert checkpoint.peek(tmp_path / "c").step == 8  # nothing is lost
    resume = ["--checkpoint", tmp_path / "c", "--resume", "--log", tmp_path / "l", "--log-every", 1]
    for less, told in ((flags[2:], "--lr-schedule cosine"), ([*flags[:2], *flags[4:]], "--warmup 3")):
        _, err = train(capsys, *less, *resume, code=2)
        assert f"was made with {told}; give it again, or another value" in err
    train(capsys, *flags, *resume, code=2)  # its checkpoint has the rate that the run began with, too
    assert checkpoint.peek(tmp_path / "c").step == 12
    again, _ = train(capsys, *flags, *resume)
    assert again["params_sha256"] == whole["params_sha256"]
    assert [r["step"] for r in lines(tmp_path / "l") if "loss" in r] == list(range(1, 21))


def test_momentum_and_weight_decay_are_flags(capsys):
    shas = [train(capsys, "--steps", 3, *flags)[0]["params_sha256"] for flags in
            ([], ["--momentum", 0.9], ["--momentum", 0], ["--weight-decay", 0.1],
             ["--optimizer", "adamw"], ["--optimizer", "adamw", "--weight-decay", 0.01],
             ["--optimizer", "adamw", "--weight-decay", 0.2])]
    assert shas[0] == shas[1]
    assert shas[4] == shas[5]
    assert len(set(shas)) == 5
    _, err = train(capsys, "--steps", 1, "--optimizer", "adam", "--momentum", 0.5, code=2)
    assert "--momentum has no effect here; it goes with --optimizer sgd or rmsprop" in err


def test_the_last_checkpoints_and_the_best_are_kept(capsys, tmp_path):
    folder = tmp_path / "c"
    record, _ = train(capsys, "--epochs", 4, "--checkpoint", folder, "--keep", 2)
    assert sorted(p.name for p in folder.iterdir()) == [
        "best.safetensors", checkpoint.NAME, "step-00000034.safetensors", "step-00000045.safetensors"]
    newest, best = checkpoint.peek(folder), checkpoint.peek(folder / "best.safetensors")
    assert (newest.step, newest.test) == (45, record["test"])
    assert best.test["accuracy"] >= newest.test["accuracy"]
    more, _ = train(capsys, "--epochs", 5, "--checkpoint", folder, "--keep", 2, "--resume")
    assert checkpoint.peek(folder / "best.safetensors").test["accuracy"] == max(best.test["accuracy"],
                                                                                more["test"]["accuracy"])
    train(capsys, "--steps", 10, "--checkpoint", tmp_path / "d", "--checkpoint-every", 4, "--keep", 9)
    assert [p.name for p in sorted((tmp_path / "d").glob("step*"))] == [f"step-{n:08d}.safetensors" for n in (4, 8, 10)]
    train(capsys, "--steps", 3, "--checkpoint", tmp_path / "e", "--checkpoint-every", "0.000001min", "--keep", 9)
    assert len(list((tmp_path / "e").glob("step*"))) == 3
    for flags, says in ((["--keep", 2], "--keep has no effect here; it goes with --checkpoint"),
                        (["--checkpoint", tmp_path / "f", "--checkpoint-every", "soon"], "soon")):
        assert says in train(capsys, "--steps", 1, *flags, code=2)[1]


def test_a_run_goes_on_from_a_kept_checkpoint_by_a_copy_of_it(capsys, tmp_path):
    """It would write over the checkpoint, or save beside it, where nobody looks."""
    train(capsys, "--epochs", 2, "--checkpoint", tmp_path / "c", "--keep", 2)
    before = {file.name: file.read_bytes() for file in (tmp_path / "c").iterdir()}
    for kept in before.keys() - {checkpoint.NAME}:
        _, err = train(capsys, "--epochs", 3, "--checkpoint", tmp_path / "c" / kept, "--resume", code=2)
        assert f"{kept} is kept by a run, which also removes it; to go on from it, copy it to new/checkpoint.saf" in err
    assert {file.name: file.read_bytes() for file in (tmp_path / "c").iterdir()} == before
    (tmp_path / "new").mkdir()
    shutil.copy(tmp_path / "c" / min(before.keys() - {checkpoint.NAME, "best.safetensors"}),
                tmp_path / "new" / checkpoint.NAME)
    train(capsys, "--epochs", 3, "--checkpoint", tmp_path / "new", "--resume")
    folder = tmp_path / "ranks" / "step-00000004"
    folder.mkdir(parents=True)
    (tmp_path / "ranks" / "best").symlink_to(folder.name)
    for path in (folder, tmp_path / "ranks" / "best"):
        with pytest.raises(checkpoint.CheckpointError, match=f"{path.name} .* copy it to new/step-00000004 and give"):
            checkpoint.claim(path).__enter__()
    assert not any(folder.iterdir())


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["zb_h1", "data"])
def test_ranks_log_and_judge_as_one_device_does(capsys, tmp_path, kind):
    flags = ["--dtype", "float64", "--epochs", 2, "--log-every", 5, "--lr-schedule", "cosine", "--warmup", 2]
    micro = ["--micro-batches", "4"] if kind == "zb_h1" else []
    train(capsys, *flags, *micro, "--log", tmp_path / "one")
    train(capsys, *flags, *RANKS[kind], "--log", tmp_path / "two", "--checkpoint", tmp_path / "c", "--keep", 1)
    for one, two in zip(lines(tmp_path / "one"), lines(tmp_path / "two"), strict=True):
        assert one.keys() == two.keys()
        for key in ("step", "epoch", "loss", "lr", "test_loss", "test_accuracy"):
            if key in one:
                assert two[key] == pytest.approx(one[key], rel=1e-9)
    assert checkpoint.peek(tmp_path / "c" / "best").test


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["zb_h1", "data"])
def test_ranks_wait_for_an_evaluation_as_long_as_it_takes(capsys, monkeypatch, kind):
    """In a step they would wait ten times `wait_seconds` for a rank that is at work."""
    evaluate = Trainer.evaluate

    def slow(trainer, *progress):
        time.sleep(3.5)
        return evaluate(trainer, *progress)

    monkeypatch.setattr(Trainer, "evaluate", slow)
    monkeypatch.setattr(LoopBack, "wait_seconds", 0.25)
    train(capsys, *RANKS[kind], "--epochs", 2)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_data_that_come_too_late_are_told(capsys, tmp_path, monkeypatch, share):
    """Where the wait is above this share of a step with it: always, and never, however busy the machine is. Each read
    puts the trainer's clock forward, so nothing sleeps."""
    read: list[int] = []
    monkeypatch.setattr(runs, "WAITING", share)
    monkeypatch.setattr(trainer, "read", read, raising=False)
    monkeypatch.setattr(trainer, "perf_counter", lambda: time.perf_counter() + 0.05 * len(read))
    (tmp_path / "slow.py").write_text("""
import numpy as np
from minidl import data
from minidl.training import trainer

def late(split):
    def rows(i):
        trainer.read.append(len(i))
        return np.zeros((len(i), 8, 8, 1), np.float32), i % 10
    return data.Dataset("late", 64, (8, 8, 1), 10, rows, slow=True)
""")
    argv = ["train", "--model", "mlp", "--model-arg", "hidden=16", "--batch-size", "8", "--costs", "analytic", "--json"]
    assert main([*argv, "--data", f"{tmp_path / 'slow.py'}:late", "--steps", "1"]) == 0
    caught = capsys.readouterr()
    assert ("the data are the bottleneck" in caught.err) == (share == 0)
    assert json.loads(caught.out)["data_ms"] > 40


# ---- nothing is lost

FRAGILE = """
from pathlib import Path
import numpy as np
from minidl import data

def points(split):
    def rows(i):
        bad = Path(__file__).with_name(f"bad_{split}")
        if bad.exists() and int(bad.read_text()) in i:
            raise data.DataError(f"sample {bad.read_text()} of {split} is damaged")
        return np.random.default_rng(i[0]).standard_normal((len(i), 64)).astype(np.float32), i % 10
    return data.Dataset("points", 64, (64,), 10 + (split == "test" and Path(__file__).with_name("more").exists()), rows)
"""


@pytest.fixture
def fragile(tmp_path):
    """Flags of a run on data that break where a file says so."""
    (tmp_path / "own.py").write_text(FRAGILE)
    return ["--model-arg", "features=64", "--data", f"{tmp_path / 'own.py'}:points", "--batch-size"]


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", ["alone", "data", "gpipe"])
def test_test_data_that_cannot_be_read_lose_no_step(capsys, tmp_path, fragile, ranks):
    flags = [*fragile, "16", *RANKS[ranks]]
    whole, _ = train(capsys, *flags, "--steps", 12)
    (tmp_path / "bad_test").write_text("5")
    saves = [*flags, "--checkpoint", tmp_path / "c", "--checkpoint-every", 100]
    for steps, more, done in ((12, [], 4), (8, ["--resume"], 8)):  # after the first epoch; after the last step
        _, err = train(capsys, *saves, *more, "--steps", steps, code=2)
        assert err.splitlines()[-1] == "minidl: sample 5 of test is damaged"
        assert f"saved {tmp_path / 'c'}" in err
        assert checkpoint.peek(tmp_path / "c").step == done
    (tmp_path / "bad_test").unlink()
    resumed, _ = train(capsys, *saves, "--resume", "--steps", 12)
    assert resumed["params_sha256"] == whole["params_sha256"]


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", ["alone", "data", "gpipe", "pipedream"])
def test_training_data_that_a_rank_cannot_read_lose_no_step(capsys, tmp_path, fragile, ranks):
    """Of data-parallel ranks only one reads the sample; all ranks of a pipeline do."""
    flags, where = [*fragile, 4, *RANKS[ranks]], "rank 1: " if ranks == "data" else ""
    last = permutation(64, "order", 0, seed=0)[39]  # in the tenth batch, and on the last rank
    saves = [*flags, "--log-every", 3, "--checkpoint", tmp_path / "c", "--checkpoint-every", 100]
    (tmp_path / "bad_train").write_text(str(last))
    _, err = train(capsys, *flags, "--steps", 20, code=2)  # without a checkpoint
    assert err.endswith(f"minidl: {where}sample {last} of train is damaged\n")
    _, err = train(capsys, *saves, "--steps", 20, code=2)
    assert err.splitlines()[-2:] == [f"saved {tmp_path / 'c'} before the end; continue with --resume",
                                     f"minidl: {where}sample {last} of train is damaged"]
    assert checkpoint.peek(tmp_path / "c").step == 9
    (tmp_path / "bad_train").unlink()
    resumed, _ = train(capsys, *saves, "--resume", "--steps", 20)
    if ranks != "pipedream":  # which drains where it saves
        assert resumed["params_sha256"] == train(capsys, *flags, "--steps", 20)[0]["params_sha256"]


@pytest.mark.parametrize("ranks", ["alone", "data"])
def test_test_data_that_do_not_fit_are_told_before_the_first_step(capsys, tmp_path, fragile, ranks):
    (tmp_path / "more").touch()
    (tmp_path / "bad_train").write_text("0")  # a first epoch would end otherwise
    _, err = train(capsys, *fragile, 16, *RANKS[ranks], "--steps", 8, code=2)
    who = "rank 0: " if ranks == "data" else ""
    assert err == f"minidl: {who}{tmp_path / 'own.py'}:points: has 11 classes, the network 10\n"


def test_a_full_disk_costs_no_step_and_no_result(capsys, tmp_path):
    flags = ["--steps", 9, "--log-every", 4]
    _, err = train(capsys, *flags, "--log", "/dev/full", "--checkpoint", tmp_path / "c", code=2)
    assert err.splitlines()[-1] == "minidl: /dev/full: No space left on device"
    assert checkpoint.peek(tmp_path / "c").step == 4
    for steps, least in ((100_000, 4), (4, 4)):  # until ranks look at each other; in the last step
        folder = tmp_path / f"ranks{steps}"
        _, err = train(capsys, *RANKS["data"], "--log-every", 4, "--steps", steps, "--log", "/dev/full",
                       "--checkpoint", folder, code=2)
        assert err.splitlines()[-2:] == [f"saved {folder} before the end; continue with --resume",
                                         "minidl: /dev/full: No space left on device"]
        assert least <= checkpoint.peek(folder).step < 10_000
    for flag, name in (("--html", "page.html"), ("--trace", "trace.json")):
        (tmp_path / name).symlink_to("/dev/full")
        record, err = train(capsys, "--steps", 2, flag, tmp_path / name, code=2)
        assert record["steps"] == 2
        assert err.splitlines()[-1] == f"minidl: {tmp_path / name}: No space left on device"


def test_two_runs_do_not_write_to_one_log(capsys, tmp_path):
    log = Growing(tmp_path / "log", anew=True)
    log.write(b"{}\n")
    _, err = train(capsys, "--steps", 2, "--log", tmp_path / "log", code=2)
    assert err == f"minidl: {tmp_path / 'log'}: another run writes to it; wait until it ends, or use another file\n"
    assert lines(tmp_path / "log") == [{}]
    log.close()
    train(capsys, "--steps", 2, "--log", tmp_path / "log")
    assert [r["step"] for r in lines(tmp_path / "log")] == [2]


# ---- which samples a run sees

NUMBERED = """
import numpy as np
from minidl import data


def numbers(split):
    count = 50 if split == "train" else 7
    def rows(i):
        return np.repeat(i[:, None], 3, 1).astype(np.float32) / count, i % 2
    return data.Dataset("numbers", count, (3,), 2, rows)
"""


def test_a_run_that_resumes_in_mid_epoch_on_other_ranks_sees_each_sample_once_an_epoch(capsys, tmp_path, monkeypatch):
    """50 samples in batches of 12; what the trainers of all ranks take is noted by its place. Each sample of the test
    data is judged once, too."""
    (tmp_path / "own.py").write_text(NUMBERED)
    took, seen, judged = data.Loader.__next__, {}, []

    def noted(self):
        begin = self.position
        x, y = took(self)
        numbers = np.rint(x[:, 0] * self.samples).astype(int).tolist()
        if self.training:
            first = begin + self.rank * len(x)
            for place, number in enumerate(numbers, first):
                assert seen.setdefault(place, number) == number
        else:
            judged.extend(numbers)
        return x, y

    monkeypatch.setattr(data.Loader, "__next__", noted)
    flags = ["--model", "mlp", "--model-arg", "features=3", "--data", f"{tmp_path / 'own.py'}:numbers", "--batch-size",
             12, "--checkpoint", tmp_path / "c"]
    on = [[], RANKS["data"], ["--parallel", "data", "--ranks", 3, "--scheduler", "barrier"], RANKS["gpipe"]]
    for steps, ranks in zip((3, 6, 7, 13), on, strict=True):
        judged.clear()
        train(capsys, *flags, *ranks, "--steps", steps, *(["--resume"] if steps > 3 else []))
        assert judged == list(range(7)) * (len(judged) // 7)
    assert sorted(seen) == list(range(13 * 12))
    for epoch in range(3):
        assert sorted(seen[epoch * 50 + i] for i in range(50)) == list(range(50))


# ---- default learning rates


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("model", "epochs", "least"), [("mlp", 8, 0.95), ("lenet", 15, 0.95), *(
    pytest.param(model if "=" in model else f"{model} preset=tiny", epochs, 0.9, marks=pytest.mark.slow)
    for model, epochs in (("ffnn layers=12 hidden=64", 15), ("ffnn", 40), ("resnet20", 15), ("resnet18", 15),
                          ("densenet121", 15), ("mobilenet_v3_large", 40)))])
def test_networks_learn_the_digits_as_they_are(capsys, model, epochs, least, optimizer):
    """With rates that decay: at a rate that stays, the accuracy of the last epoch is a matter of luck."""
    name, *arguments = model.split()
    flags = [flag for argument in arguments for flag in ("--model-arg", argument)]
    record = reported(capsys, "train", "--model", name, *flags, "--optimizer", optimizer, "--epochs", str(epochs),
                      "--lr-schedule", "cosine", "--costs", "analytic")
    assert record["accuracy"] > least


@pytest.mark.slow
def test_a_mobilenet_learns_the_digits_almost_without_error(capsys):
    """In 12 s on one core of 2026; a DenseNet-121 of growth 12 gets 99.4 % in 15 epochs, which take two minutes."""
    record = reported(capsys, "train", "--model", "mobilenet_v3_large", "--model-arg", "preset=small", "--batch-size",
                      "32", "--epochs", "40", "--lr-schedule", "cosine", "--costs", "analytic")
    assert record["accuracy"] >= 0.97


def test_a_network_of_ones_own_has_a_learning_rate_too():
    assert models.learning_rate("own.py:net", "sgd") == 0.05
    assert models.learning_rate("gpt", "adamw") == 0.001


# ---- text


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A network that has learned a text by heart."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("abcdefgh " * 400)
    assert main(["train", "--model", "gpt", "--model-arg", "preset=tiny", "--model-arg", "dropout=0.0", "--data",
                 str(folder / "a.txt"), "--batch-size", "16", "--steps", "200", "--optimizer", "adam", "--lr", "0.003",
                 "--costs", "analytic", "--checkpoint", str(folder / "c")]) == 0
    return folder / "c"


@pytest.mark.wide
def test_a_language_model_writes_text(capsys, written):
    capsys.readouterr()
    sample = ["sample", str(written), "--length"]
    assert shown(capsys, *sample, "24", "--prompt", "abc", "--temperature", "0") == "abcdefgh abcdefgh abcdefgh \n"
    texts = [reported(capsys, *sample, "40", "--temperature", "5", "--seed", seed)["text"] for seed in "112"]
    assert texts[0] == texts[1] != texts[2]
    writer = Writer.load(written)
    assert set(writer.tokens("abc", 20, temperature=50.0, top=1)) <= set(b"abcdefgh ")
    assert "empty" in refusal(capsys, "sample", str(written), "--prompt", "")


def test_a_prompt_of_other_bytes_than_utf8_is_read_as_it_is(capsys, written):
    """As a terminal in Latin-1 gives it to Python."""
    prompt = b"caf\xe9".decode(errors="surrogateescape")
    assert reported(capsys, "sample", str(written), "--prompt", prompt, "--length", "3")["text"].startswith(prompt)
    writer = Writer.load(written)
    with no_grad():
        logits = writer.model(np.array([list(b"caf\xe9")])).numpy()[0, -1]
    assert next(writer.tokens(prompt, 1, temperature=0.0)) == logits.argmax()


def test_only_language_models_write(capsys, tmp_path):
    train(capsys, "--steps", 2, "--checkpoint", tmp_path / "c")
    assert "has no tokenizer; only a network" in refusal(capsys, "sample", str(tmp_path / "c"))
    assert "there is no checkpoint" in refusal(capsys, "sample", str(tmp_path / "none"))


@pytest.mark.parametrize("kind", ["words", "Metaspace", "WordPiece"])
def test_words_that_follow_a_prompt_keep_the_space_before_them(capsys, tmp_path, written, monkeypatch, kind):
    """Tokenizers leave out the space before the first of some words."""
    library = pytest.importorskip("tokenizers")
    mark = "\u2581" if kind == "Metaspace" else ""
    known = {"[UNK]": 0, f"{mark}the": 1, f"{mark}fox": 2, "##es" if kind == "WordPiece" else "es": 3}
    made = library.Tokenizer((library.models.WordPiece if kind == "WordPiece" else library.models.WordLevel)(
        known, unk_token="[UNK]"))
    if kind == "Metaspace":
        made.pre_tokenizer, made.decoder = library.pre_tokenizers.Metaspace(), library.decoders.Metaspace()
    else:
        made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    if kind == "WordPiece":
        made.decoder = library.decoders.WordPiece()
    about = dict(checkpoint.peek(written).about) | {"tokenizer": made.to_str()}
    checkpoint.save(tmp_path / "c", Writer.load(written).model, about=about)
    drawn = [3, 2, 1] if kind == "WordPiece" else [2, 1]
    left = iter(drawn)
    monkeypatch.setattr(sampling, "_drawn", lambda *given: next(left))
    found = reported(capsys, "sample", str(tmp_path / "c"), "--prompt", "the fox", "--length", str(len(drawn)))
    assert found["text"] == ("the foxes fox the" if kind == "WordPiece" else "the fox fox the")


def test_a_network_writes_only_with_the_tokens_that_it_knows(capsys, tmp_path, written):
    pytest.importorskip("tokenizers")
    about = dict(checkpoint.peek(written).about)
    about["tokenizer"] = tokens.tokenizer("270", b"many kinds of words to be merged into one, or two").saved
    checkpoint.save(tmp_path / "c", Writer.load(written).model, about=about)
    assert refusal(capsys, "sample", str(tmp_path / "c")) == (
        f"minidl: {tmp_path / 'c'}: its tokenizer has 270 tokens, and its network knows 256\n")


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", ["alone", "data"])
def test_a_run_goes_on_only_with_its_own_tokenizer(capsys, tmp_path, ranks):
    """A vocabulary that is trained on other text has as many tokens, which mean something else."""
    pytest.importorskip("tokenizers")
    file, folder = tmp_path / "a.txt", tmp_path / "c"
    file.write_text("the quick brown fox jumps over a lazy dog\n" * 99)
    flags = ["train", "--model", "gpt", "--model-arg", "preset=tiny", "--model-arg", "layers=1", "--data", str(file),
             "--tokenizer", "270", "--batch-size", "4", "--costs", "analytic", "--checkpoint", str(folder),
             *RANKS[ranks]]
    shown(capsys, *flags, "--steps", "2")
    shown(capsys, *flags, "--steps", "4", "--resume")
    file.write_text("how vexingly quick daft zebras jump, said he\n" * 99)
    assert refusal(capsys, *flags, "--steps", "6", "--resume") == (
        f"minidl: {folder} was made with another tokenizer, whose tokens mean other text; give the --tokenizer and the "
        f"training text that it was made with\n")
    assert checkpoint.peek(folder).step == 4


def test_a_network_for_translations_translates_until_the_end(capsys, tmp_path, monkeypatch):
    for language in ("de", "en"):
        for part in ("train", "test"):
            (tmp_path / f"{part}.{language}").write_text("ein haus\nzwei\n" * 8)
    shown(capsys, "train", "--model", "rnn", "--model-arg", "preset=tiny", "--data", str(tmp_path), "--batch-size", "4",
          "--steps", "2", "--costs", "analytic", "--checkpoint", str(tmp_path / "c"))
    writer = Writer.load(tmp_path / "c")
    end, written = writer.tokenizer.special["end"], iter(b"abc")
    monkeypatch.setattr(sampling, "_drawn", lambda *given: next(written, end))
    assert reported(capsys, "sample", str(tmp_path / "c"), "--prompt", "ein haus") == {
        "prompt": "ein haus", "tokens": 3, "text": "abc"}


# -------------------------------------------------------------------------------------------- several steps in a launch
def test_a_run_in_launches_of_several_steps_is_the_same_run(capsys, tmp_path):
    """Its records too, but for times; an epoch, a checkpoint and a new learning rate end a launch."""
    found = {}
    for k in (1, 5, 64):
        log, folder = tmp_path / f"log{k}", tmp_path / f"kept{k}"
        record, _ = train(capsys, "--epochs", 2, "--log", log, "--log-every", 3, "--checkpoint", folder, "--keep", 9,
                          "--checkpoint-every", 8, "--steps-per-launch", k, "--optimizer", "adam", "--warmup", 4)
        told = [{key: r[key] for key in r.keys() - {"samples_per_s", "eta_s", "data_ms"}} for r in lines(log)]
        found[k] = (record["params_sha256"], record["test"], told, sorted(path.name for path in folder.iterdir()))
        assert all(r["samples_per_s"] > 0 <= r["eta_s"] for r in lines(log) if "loss" in r)
    assert found[5] == found[1]
    assert found[64] == found[1]


def test_a_run_in_launches_goes_on_from_a_checkpoint(capsys, tmp_path):
    whole, _ = train(capsys, "--steps", 17, "--steps-per-launch", 4)
    train(capsys, "--steps", 9, "--checkpoint", tmp_path, "--steps-per-launch", 4)
    record, _ = train(capsys, "--steps", 17, "--checkpoint", tmp_path, "--resume", "--steps-per-launch", 3)
    assert record["params_sha256"] == whole["params_sha256"]


def in_launches(at_once: int = 6) -> Trainer:
    return Trainer(Recorded(Job(model="mlp", model_args={"preset": "tiny"}, batch_size=64)), CostModel.analytic(),
                   at_once=at_once)


def test_launches_end_where_something_is_done_between_steps():
    one, ran, several = in_launches(), [], Trainer.several

    def noted(most: int) -> int:
        ran.append(several(one, most))
        return ran[-1]

    one.several = noted  # type: ignore[method-assign]
    seen = []
    loop.run(one, loop.Course(steps=29, rate=lambda step: 0.1 if step < 8 else 0.05,
                              progress=lambda step, record: seen.append(step)))
    assert ran == [6, 2, 6, 6, 3, 6]  # a new rate after 8, the end of an epoch of 22.5 after 23
    assert seen == [*range(1, 30)]
    assert len(one.losses) == len(one.seconds) == len(one.waits) == 29


def test_a_loss_that_is_not_finite_has_its_step_within_a_launch():
    one = in_launches()
    one.recorded.optimizer.lr = 1e30
    with pytest.raises(TrainingError, match=r"the loss is (nan|inf) at step [23] of mlp"):
        loop.run(one, loop.Course(steps=12))


def test_data_that_cannot_be_read_end_a_launch_before_them(monkeypatch):
    one, inputs, calls = in_launches(), Trainer._inputs, []

    def read(self: Trainer) -> list:
        calls.append(1)
        if len(calls) == 9:
            raise data.DataError("row 3 cannot be read")
        return inputs(self)

    monkeypatch.setattr(Trainer, "_inputs", read)
    with pytest.raises(data.DataError, match="row 3"):
        loop.run(one, loop.Course(steps=12))
    assert len(one.losses) == 8


def test_runs_that_have_single_steps_say_so(capsys):
    _, err = train(capsys, "--steps", 3, "--steps-per-launch", 2, "--trace", "t.json", code=2)
    assert "--steps-per-launch has no effect here; it goes with runs without --trace and --html" in err
    _, err = train(capsys, "--steps", 3, "--steps-per-launch", 2, "--scheduler", "partime", code=2)
    assert "2 steps a launch need one device" in err
