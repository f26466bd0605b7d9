"""Commands whose flags cannot be meant end with exit code 2 and one line that says why."""

from __future__ import annotations

from typing import Any

import pytest
from command_line import refusal
from test_costs_of_stages import LAYERS

TIMES = ["--forward", "1,2,2,1", "--output-grad", "1,2,2,1", "--weight-grad", "1,2,2,1", "--comm", "8,1,1,1"]
DATA, GIVEN = ["simulate", "--parallel", "data", "--scheduler"], ["simulate", "--ranks", "2", "--micro-batches", "4"]
ONE_EACH = [word for name in ("forward", "output-grad", "weight-grad", "comm") for word in (f"--{name}", "1,1")]
TRAIN = ["train", "--parallel", "data", "--ranks", "2", "--costs", "analytic", "--scheduler"]
ALONE = ["train", "--model", "mlp", "--model-arg", "preset=tiny", "--batch-size", "16", "--steps", "4", "--costs",
         "analytic", "--scheduler"]
SLICED = ["plan", "--model", "gpt", "--model-arg", "preset=tiny", "--data", "pydoc", "--batch-size", "8",
          "--micro-batches", "2", "--costs", "analytic", "--ranks", "2", "--scheduler", "seq1f1b"]


@pytest.mark.parametrize(("argv", "says"), [
    ([*DATA, "prio", *TIMES], "similar names: priority"),
    ([*DATA, "priority", "--k", "2", *TIMES], "--k has no effect here; it goes with --scheduler reverse"),
    ([*DATA, "reverse_first_k", "--k", "7", *TIMES], "from 0 to 4"),
    ([*DATA, "priority", *TIMES[:-2]], "--comm"),
    ([*DATA, "priority", *TIMES[:-1], "1,2"], "one time for each layer"),
    ([*DATA, "priority", "--model", "mlp"], "--ranks"),
    ([*DATA, "priority", *TIMES[:-1], "1,2,3,-4"], ">= 0"),
    ([*DATA, "acco", *ONE_EACH], "given times say nothing of weights and states; give a model"),
    ([*DATA, "delayed_update", *ONE_EACH], "given times say nothing of weights and states; give a model"),
    ([*TRAIN, "acco", "--micro-batches", "3", "--batch-size", "24"],
     "acco: a step of 3 micro-batches has no halves; give an even --micro-batches"),
    ([*TRAIN, "acco"], "acco: a step of 1 micro-batch has no halves; give an even --micro-batches"),
    *(([*TRAIN, "priority", "--model", "mlp", "--scheduler-arg", f"part_bytes={n}"],
       f"part_bytes is {n}, but 66,560 bytes of gradients have at most 1024 parts; give part_bytes=65 or more")
      for n in (-1, 0, 64)),
    ([*DATA, "priority", "--parts", "1025", *TIMES], "at most 1024"),
    ([*ALONE, "partime", "--scheduler-arg", "stages=9"], "blocks to cut between; take fewer ranks, --chunks or stages"),
    ([*ALONE, "partime", "--scheduler-arg", "stages=0"], "at least 1 stage"),
    ([*ALONE, "partime", "--micro-batches", "2"], "take --micro-batches 1"),
    ([*ALONE, "partime", "--clip", "1"], "clipping or loss scaling"),
    ([*ALONE, "partime", "--feed", "rings"], "ring, hold=K"),
    ([*SLICED, "--scheduler-arg", "slices=0"], "seq1f1b: 0 slices; a micro-batch has at least 1"),
    ([*SLICED, "--scheduler-arg", "slices=two"], "seq1f1b: slices is 'two'; it must be a whole number"),
    ([*SLICED, "--slices", "2"], "--slices has no effect here"),
    (["train", "--parallel", "pipeline", *SLICED[1:], "--model", "bert"],
     "bert cannot read its input in slices: it has no sequence, or a token depends on later ones; use gpt or rnn, "
     "which can, or another scheduler than seq1f1b"),
    ([*GIVEN, "--scheduler", "modulo", "--scheduler-arg", "group=3", "--chunks", "2"],
     "2 chunks per rank is not a multiple of the group size 3"),
    ([*GIVEN, "--scheduler", "modulo", "--scheduler-arg", "group=0"], "not a multiple of the group size 0"),
    ([*GIVEN, "--scheduler", "optimal", "--scheduler-arg", "objective=speed"], "unknown objective 'speed'; known: "),
    ([*GIVEN, "--scheduler", "optimal", "--scheduler-arg", "objective=span", "--objective", "period"],
     "--scheduler-arg objective has no effect here; use --objective"),
    ([*DATA, "reverse_first_k", "--scheduler-arg", "k=7", *TIMES], "from 0 to 4"),
    ([*GIVEN, "--scheduler", "zb_h1", "--costs", "FILE", "--forward", "2"], "has all times; leave --forward out"),
    ([*GIVEN, "--order", "hint", "--jitter", "1000"], "--jitter: '1000' must be a number from 0 to 10"),
    ([*GIVEN, "--scheduler", "zb_h1", "--costs", "measured"],
     "--costs has no effect here; it goes with a network"),
    ([*GIVEN, "--scheduler", "zb_h1", "--forward", "1,2,3"],
     "3 forward times are given for 2 stages; give 1 or as many"),
    ([*GIVEN, "--scheduler", "zb_h1", "--bandwidth", "1MB"],
     "--bandwidth has no effect here; it goes with bytes: a network, or --costs FILE"),
    ([*GIVEN, "--scheduler", "zb_h1", "--costs", "FILE", "--ranks", "9"],
     "8 stages, and 9 are needed: give as many or more, of one number in all lists, or fewer --chunks"),
    ([*GIVEN, "--scheduler", "joint", "--costs", "FILE", "--ranks", "3"], "and 12 are needed")], ids=lambda value: None)
def test_what_cannot_be_meant_is_one_line(argv: list[str], says: str, capsys: Any, tmp_path: Any) -> None:
    LAYERS.save(tmp_path / "net.json")
    assert says in refusal(capsys, *(str(tmp_path / "net.json") if word == "FILE" else word for word in argv))
