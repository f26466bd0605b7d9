"""Loss scaling on ranks: replicas skip the same steps, and what cannot be scaled. Bits are in test_same_bits."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import together
from rank_runs import COST, Run, batches

import minidl as ml
from minidl import models, nn, optim
from minidl.runtime.executors import DistributedExecutor
from minidl.schedulers.pipeline import PipelineError
from minidl.training.job import Job
from minidl.training.recorded import Recorded


def test_a_loss_scale_of_several_optimizers_is_refused():
    scaler = optim.GradScaler(8.0)
    first, second = models.mlp(12, 8, 8), models.mlp(8, 8, 5)
    both = [optim.SGD(m.parameters(), 0.1, scaler=scaler) for m in (first, second)]

    def step(x, y):
        loss = nn.cross_entropy(second(first(x)), y)
        loss.backward(scaler.scale)
        for opt in both:
            opt.step()
        return loss

    graph = ml.record(step, *batches(0)[0][:2])
    with pytest.raises(PipelineError, match="scales its loss for several optimizers"):
        ml.plan(graph, "gpipe", ml.CostModel.analytic(), ml.Machine(2))


@pytest.mark.few(2)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", ["barrier", "buckets", "priority", "reverse_first_k", "dear"])
def test_replicas_skip_the_same_steps(name, optimizer, clip):
    """A gradient that is not finite on one rank is so in the mean of all."""
    settings = {"optimizer": optimizer, "clip": clip, "scaled": True, "micro_batches": 2, "network": "mlp"}
    own = [((run := Run(settings)), run.recorded()) for _ in range(2)]
    plans = [ml.plan(graph, name, COST, ml.Machine(2)) for _, graph in own]
    data = [batches(0, 2, (1,)), batches(1, 2)]  # not finite on rank 0

    def work(communicator):
        run, plan = own[communicator.rank][0], plans[communicator.rank]
        execute, scales = DistributedExecutor(plan.graph, plan.schedule, communicator), []
        for parts in (*data[communicator.rank], data[communicator.rank][0]):
            execute(*parts)
            execute.settle()
            scales.append(run.scaler.scale.item())
        execute.close()
        return scales, run.tensors()

    first, second = together(2, work)
    assert first == second
    assert first[0] == [8.0, 4.0, 4.0, 8.0]
    assert all(np.isfinite(p.numpy()).all() for p in own[0][0].model.parameters())


def test_the_updates_of_a_pipeline_are_not_one_launch():
    """They are of several stages."""
    job = Job(model_args={"preset": "tiny"}, batch_size=16, micro_batches=4, parallel="pipeline", scheduler="gpipe",
              fusion=("updates",))
    made = Recorded(job).plan(ml.CostModel.analytic(), ml.Machine(2))
    assert all(np.isfinite(p) for p in made.peaks)
    assert not any(launch.kernel == "sgd_many" for own in made.graph.launches for launch in own)
