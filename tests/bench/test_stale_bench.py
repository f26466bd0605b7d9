"""The report on stale training: staleness has closed forms, and a run's record has what its table shows."""


import pytest
import stale
from helpers import deadline

from minidl.training.job import Job


@pytest.mark.parametrize("ranks", [2, 4])
def test_staleness_in_steady_state(ranks):
    assert stale.steady_staleness("pipedream", {}, ranks) == pytest.approx((ranks - 1) / 2)
    assert stale.steady_staleness("layerpipe2", {"history": "average"}, ranks) == pytest.approx(ranks - 1)
    assert stale.steady_staleness("pipedream_2bw", {"mini_batches": 4}, ranks) == pytest.approx(1)


def test_a_run_beside_one_on_the_newest_weights():
    base = {"model": "mlp", "model_args": {"layers": 2, "hidden": 16}, "batch_size": 256, "micro_batches": 4,
            "update_every": 1, "lr": 0.02}
    with deadline():
        found = stale.trained(Job(**base, scheduler="pipedream", parallel="pipeline"), 2, 1)
        alone = stale.trained(Job(**base), 1, 1)
    assert (found["most"], found["most_of_stages"], found["drift"]) == (1, [1, 0], 0)
    assert found["mean"] == round(23 / 48, 4), "six steps; the first micro-batch of an epoch reads the newest weights"
    assert 0 <= alone["accuracy"] <= 1
    assert stale.accuracies({"accuracy": [0.5, 0.7], "synchronous": [0.9, None]}) == "60.0 % / diverges"


def test_a_run_that_diverges_has_no_accuracy():
    job = Job(model="mlp", model_args={"layers": 2, "hidden": 16}, batch_size=256, micro_batches=4, update_every=1,
              lr=1e9)
    assert stale.trained(job, 1, 1) == {"accuracy": None}
