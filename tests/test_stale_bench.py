"""The report on stale training: what draining costs has closed forms, and a run's record has what its table shows."""

import sys
from pathlib import Path

import pytest
from helpers import deadline

from minidl.training.trainer import Job

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

import stale


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("micro_batches", [4, 16, 64])
def test_what_draining_costs(ranks, micro_batches):
    m, p = micro_batches, ranks
    found = stale.drained("pipedream", {}, p, m)
    assert found["time"] == pytest.approx((m + p - 1) / m)
    assert found["stale_never_drained"] == pytest.approx((p - 1) / 2)
    assert found["stale"] == pytest.approx(sum(min(i, p - s - 1) for i in range(m) for s in range(p)) / m / p)
    found = stale.drained("layerpipe2", {"history": "average"}, p, m)
    assert found["time"] == pytest.approx((3 * m + 2 * (p - 1)) / (3 * m))  # (p - 1)(F + O), as W is apart
    assert found["stale_never_drained"] == p - 1
    assert stale.drained("paci", {"mini_batches": 4}, p, m)["time"] == pytest.approx((m + p - 1) / m)
    assert stale.drained("paci", {"mini_batches": 4}, p, 6) is None


def test_a_run_beside_one_on_the_newest_weights():
    base = {"model": "mlp", "model_args": {"layers": 2, "hidden": 16}, "batch_size": 256, "micro_batches": 4,
            "update_every": 1, "lr": 0.02}
    with deadline():
        found = stale.trained(Job(**base, scheduler="pipedream", parallel="pipeline"), 2, 1)
        alone = stale.trained(Job(**base), 1, 1)
    assert (found["most"], found["most_of_stages"], found["drift"]) == (1, [1, 0], 0)
    assert found["mean"] == pytest.approx(19 / 40), "the first micro-batch of an epoch reads the newest weights"
    assert 0 <= alone["accuracy"] <= 1
    assert stale.accuracies({"accuracy": [0.5, 0.7], "synchronous": [0.9, None]}) == "60.0 % / diverges"


def test_a_run_that_diverges_has_no_accuracy():
    job = Job(model="mlp", model_args={"layers": 2, "hidden": 16}, batch_size=256, micro_batches=4, update_every=1,
              lr=1e9)
    assert stale.trained(job, 1, 1) == {"accuracy": None}
