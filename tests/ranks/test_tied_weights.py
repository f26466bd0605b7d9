"""Parameters that several stages use: the messages between their copies, the versions that these have, checkpoints.
Their bits are in test_same_bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rank_runs import COST, MICRO_BATCHES, STEPS, WIDTH, check, prepared, recorded, trained

import minidl as ml
from minidl.core.tasks import RECEIVES, SENDS, Kind, unpack
from minidl.pricing.cost import Link
from minidl.training import checkpoint
from minidl.training.job import Job
from minidl.training.recorded import Recorded


def programs(ranks: int, scheduler: str, **more: Any) -> tuple[Any, ...]:
    """Of a network whose first weight is the last one's, transposed."""
    return prepared({"network": "transposed", "ranks": ranks, "scheduler": scheduler, **more})[0][1].programs


def uses_of_weights(graph: ml.TaskGraph) -> set[str]:
    """The messages that updates make: gradients of copies and new weights."""
    made = {t.micro_batch for t in graph if t.kind == Kind.F}
    return {t.name for t in graph if t.kind in (*SENDS, *RECEIVES) and t.micro_batch not in made}


def test_a_copy_costs_two_messages_a_step_and_no_states() -> None:
    """Whatever the number of micro-batches: a gradient to the first stage, new weights back."""
    first, middle, last = (program.graph for program in programs(3, "one_f_one_b", optimizer="adam"))
    assert uses_of_weights(first) == {"2RO4>0", "0SF4>2"}
    assert uses_of_weights(middle) == set()
    assert uses_of_weights(last) == {"2SO4>0", "0RF4>2"}
    assert {t.micro_batch for t in first if t.kind == Kind.U} <= {0, MICRO_BATCHES}, "to no sample"
    names = [s.name for s in last.storages if s.shape == (WIDTH - 2, WIDTH) and s.role.persistent]
    assert len(names) == 1, "its own copy, and neither mean nor square"


def test_with_clipping_the_square_sums_travel_in_the_message_of_the_gradient() -> None:
    assert uses_of_weights(programs(2, "zb_h1", clip=0.05)[0].graph) == {"1RO4>0", "0SO4>1", "0SF4>1"}


def test_both_ends_of_a_v_share_the_weight_itself() -> None:
    for program in programs(2, "zb_v"):
        assert uses_of_weights(program.graph) == set()


@pytest.mark.few(1)
@pytest.mark.parametrize(("scheduler", "every"), [("pipedream", 1), ("pipedream_2bw", 4), ("paci", 2), ("layerpipe", 1),
                                                  ("layerpipe2", 1)])
def test_under_a_stale_policy_both_uses_read_one_version(scheduler: str, every: int) -> None:
    """That of the first stage's forward, of the same micro-batch; and the bits are those of the log, replayed."""
    options = {"options": {"mini_batches": 2}} if scheduler == "paci" else {}
    found = check({"network": "transposed", "scheduler": scheduler, "every": every, "optimizer": "adam", **options})
    read = {(e.step, unpack(e.key).micro_batch, unpack(e.key).unit): e.version for e in found.log
            if e.stage == 0 and unpack(e.key).kind == Kind.F}
    uses = {(step, i) for step, i, stage in read if stage}
    assert len(uses) == STEPS * MICRO_BATCHES
    for step, i in uses:
        assert {read[key] for key in read if key[:2] == (step, i)} == {read[step, i, 0]}
    assert max(read.values()) > min(read.values())


def test_a_policy_of_ones_own_with_several_updates_and_fresh_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stages on several ranks use .*weight, and the step updates it 4 times"):
        ml.plan(recorded(network="transposed", every=1)[1], "one_f_one_b", COST, ml.Machine(2))


def test_messages_of_weights_have_their_price() -> None:
    slow = replace(COST, link=Link(0.0, 1.0))
    period = ml.plan(recorded(network="transposed")[1], "gpipe", slow, ml.Machine(2)).period
    assert period > 2 * WIDTH * (WIDTH - 2) * 4, "there and back, a byte a microsecond"


def test_a_checkpoint_goes_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    job = Job(model="gpt", model_args={"preset": "tiny", "layers": 3, "dropout": 0.0}, batch_size=16,
              micro_batches=MICRO_BATCHES, optimizer="adam")
    parts = trained(replace(job, scheduler="zb_h1", parallel="pipeline"), 3, result=lambda trainer: trainer)
    mine: Recorded = parts[-1].recorded
    checkpoint.save(tmp_path, mine.model, mine.optimizer, step=STEPS, loader=mine.train_data)
    twice = lambda trainer: [trainer.step() for _ in range(STEPS)] and trainer.params_sha256()  # noqa: E731
    (whole,) = trained(job, result=twice)
    rest = trained(replace(job, scheduler="gpipe", parallel="pipeline"), 2, load=tmp_path)
    assert {sha for _, sha in rest} == {whole}
