"""Recorded models as pipelines: their stages, fused tasks, memory, and what each rank does for itself."""


import numpy as np
import pytest

import minidl as ml
from minidl import models, nn, optim, schedulers
from minidl.autograd.tape import micro_batch
from minidl.core.graph import GraphBuilder
from minidl.core.tasks import GraphError, Kind
from minidl.fusion import RULES
from minidl.passes.rewrite import coarsen, fuse
from minidl.plans.memory import plan_memory
from minidl.plans.program import lower
from minidl.pricing.cost import CostModel
from minidl.schedulers import pipeline
from minidl.training.job import Job
from minidl.training.recorded import Recorded

MICRO_BATCHES = 4
X, Y = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32), np.array([0, 3, 1, 2])
COST = CostModel.analytic()


def steps(model, opt, x, y, micro_batches=2):
    """A recorded step of some micro-batches."""
    def step(x, y):
        for i in range(micro_batches):
            with micro_batch(i, i * len(x)):
                loss = nn.cross_entropy(model(x), y)
                loss.backward()
        opt.step()
        return loss

    return ml.record(step, x, y)


def recorded():
    ml.seed(0)
    model = models.mlp(8, 16, 16, 16, 16, 4)
    return steps(model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9), X, Y, MICRO_BATCHES)


def test_stages_hold_every_task_once():
    graph = recorded()
    stages = pipeline.balanced(graph, COST, 3)
    coarse, group = coarsen(graph, stages[graph.unit])
    assert sorted(set(group.tolist())) == list(range(len(coarse)))
    assert sum(len(t.launches) for t in coarse) == sum(len(t.launches) for t in graph)
    assert coarse.flops.sum() == pytest.approx(graph.flops.sum())
    for t in graph:
        owner = coarse[int(group[t.index])]
        assert owner.unit == stages[t.unit]
        assert owner.kind == t.kind or (owner.kind, t.kind) == (Kind.O, Kind.W)
    names = {t.name for t in coarse}
    assert {"0F0", "1O2", "2W3", "0U0"} <= names
    assert len(names) == len(coarse)


def test_stages_are_cut_between_blocks_and_beside_units_without_a_name():
    builder = GraphBuilder()
    builder.unit_names = dict(enumerate(("a/0/x", "", "a/1/x", "a/1/y", "a/2/x")))
    for unit in range(5):
        builder.task(unit, Kind.F, writes=[builder.buffer(f"b{unit}", 8)])
    graph, cost = builder.build(), CostModel(kinds={"F": 1.0})
    assert pipeline.balanced(graph, cost, 4).tolist() == [0, 1, 2, 2, 3]
    with pytest.raises(pipeline.PipelineError, match="only 4 blocks"):
        pipeline.balanced(graph, cost, 5)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["resnet20", "densenet121", "revnet"])
def test_wherever_blocks_of_a_fused_step_begin_it_can_be_cut(name: str):
    """A norm that is fused with a sum runs behind later layers; a product may add to the gradient of a layer behind."""
    graph = Recorded(Job(model=name, model_args={"preset": "tiny"}, batch_size=4, dither=1.0, parallel="pipeline",
                         fusion=tuple(RULES))).graph
    block = pipeline.balanced(graph, COST)
    for begin in range(1, block.max() + 1):
        ml.plan(graph, "gpipe", COST, ml.Machine(ranks=2), stage_of_unit=(block >= begin).astype(int))


def test_fuse_publishes_at_the_end():
    graph, _ = coarsen(recorded(), pipeline.balanced(recorded(), COST, 3)[recorded().unit])
    which = np.zeros((3, MICRO_BATCHES), bool)
    which[1, 2] = True
    fused, _ = fuse(graph, which)
    assert len(fused) == len(graph) - 1
    both = fused["1B2"]
    assert set(both.launches) == {*graph["1O2"].launches, *graph["1W2"].launches}
    assert "1B2" in {fused.name(int(q)) for q in fused.preds[fused["0O2"].index]}
    everywhere, _ = fuse(graph)
    assert not np.isin(everywhere.kind, (Kind.O, Kind.W)).any()


def test_every_rank_counts_adams_steps_and_dropouts_for_itself():
    ml.seed(0)
    layers = [nn.Linear(8, 8) for _ in range(3)]
    opt = optim.Adam([p for layer in layers for p in layer.parameters()], 0.1)

    def model(x):
        for layer in layers:
            x = nn.dropout(nn.relu(layer(x)), 0.5)
        return x

    graph = steps(model, opt, X, Y)
    plan = ml.plan(graph, "gpipe", COST, ml.Machine(3))
    of_rank = {t.name: plan.placement.table[0, t.unit] for t in plan.graph}
    crossing = {(plan.graph.name(int(q)), t.name) for t in plan.graph for q in plan.graph.preds[t.index]
                if of_rank[t.name] != of_rank[plan.graph.name(int(q))]}
    assert crossing
    assert {kind for pair in crossing for kind in (pair[0][1], pair[1][1])} <= {"F", "O", "W", "B"}
    ticks = [launch.kernel for t in plan.graph for launch in t.launches if launch.kernel == "adam_tick"]
    assert len(ticks) == 3
    assert len(pipeline.cut(graph, COST, 1).graph["0U0"].launches) == len([x for t in graph if t.kind == Kind.U
                                                                           for x in t.launches])


def test_sums_of_squares_are_taken_where_gradients_are_and_go_to_every_rank():
    ml.seed(0)
    model = models.mlp(8, 16, 16, 4)
    graph = steps(model, optim.SGD(model.parameters(), 0.1, max_norm=1.0), X, Y)
    m = int(graph.micro_batch.max()) + 1
    plan = ml.plan(graph, "gpipe", COST, ml.Machine(3))
    talking, schedule = pipeline.add_communication(plan.graph, plan.schedule)
    for stage in range(3):
        squares = talking[f"{stage}U{m}"]
        assert {launch.kernel for launch in squares.launches} == {"square_sum"}
        assert "clip_factor" in {launch.kernel for launch in talking[f"{stage}U0"].launches}
        others = [r for r in range(3) if r != stage]
        sent = [t for t in talking if t.name in {f"{stage}SO{m}>{r}" for r in others}]
        assert len(sent) == 2
        assert {squares.index} == {p for t in sent for p in talking.preds[t.index].tolist()}


def test_activations_of_a_stage_without_parameters_end_with_its_output_gradients():
    ml.seed(0)
    layer = nn.Linear(8, 4)
    graph = steps(lambda x: nn.relu(nn.relu(layer(x))), optim.SGD(layer.parameters(), 0.1), X, Y, 6)
    names = list(graph.unit_names)
    cuts = np.array([0 if "linear" in name else 1 for name in names])
    with pytest.raises(ValueError, match="unit 0 is on stage -1; stages are"):
        ml.plan(graph, "one_f_one_b", COST, ml.Machine(2), stage_of_unit=cuts - 1)
    plan = ml.plan(graph, "one_f_one_b", COST, ml.Machine(2), stage_of_unit=cuts)
    assert not any(t.unit == 1 and t.kind == Kind.W for t in pipeline.cut(graph, COST, 2, cuts).graph)
    assert plan.peaks == (2, 1)


@pytest.mark.parametrize("name", ["gpipe", "zb_h1"])
def test_one_rank_needs_the_memory_of_one_device(name):
    graph = recorded()
    plan = ml.plan(graph, name, COST, ml.Machine(1))
    assert plan.peak_bytes == (plan_memory(plan.graph, plan.schedule).peak_bytes,)
    first, second = ml.plan(graph, name, COST, ml.Machine(2)).peak_bytes
    assert max(first, second) < plan.peak_bytes[0] < first + second


@pytest.mark.parametrize(("name", "ranks", "chunks"), [("gpipe", 2, None), ("zb_h1", 3, None), ("interleaved", 2, 2)])
def test_a_ranks_peak_is_that_of_its_program(name, ranks, chunks):
    plan = ml.plan(recorded(), name, COST, ml.Machine(ranks), **schedulers.find(name).known(chunks=chunks))
    talking = pipeline.add_communication(plan.graph, plan.schedule)
    assert plan.peak_bytes == tuple(lower(*talking, ranks=ranks, rank=r).peak_bytes for r in range(ranks))


def test_cuts_that_make_no_sense():
    graph = recorded()
    with pytest.raises(GraphError, match="cut the graph elsewhere"):
        coarsen(graph, (graph.unit == 1).astype(np.int64))
    with pytest.raises(pipeline.PipelineError, match="only .* blocks"):
        ml.plan(graph, "gpipe", COST, ml.Machine(40))
    for name in ("chimera", "pipedream"):
        with pytest.raises(pipeline.PipelineError, match="record"):
            ml.plan(graph, name, COST, ml.Machine(2))
