"""Mixed precision: products in 16 bits, master weights in float32, loss scaling; on the CUDA runtime of the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import cuda_runtime
import numpy as np
import pytest
from helpers import kernels, random_array, torch_or_skip

import minidl as ml
from minidl import checkpoint, cli, data, models, nn, ops, optim, schedulers
from minidl.autograd.op import input_dtypes
from minidl.autograd.tape import Tape, current, use
from minidl.core.tasks import Kind
from minidl.devices.cuda import device as devices
from minidl.fusion import fused
from minidl.passes.boundary import must_stay, with_late
from minidl.runtime.checking import random_schedule
from minidl.runtime.executors import GraphExecutor, SequentialExecutor, StreamExecutor, executor
from minidl.training.job import Job
from minidl.training.recorded import Recorded
from minidl.training.trainer import Trainer

HALVES = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  #: with the largest relative error of rounding


@pytest.fixture
def there(monkeypatch):
    """A tape on a CUDA device that is not there, in force; the function gives another one."""
    def registered(seed: int = 0) -> Any:
        monkeypatch.setitem(devices._devices, 0, cuda_runtime.device(seed))
        return Tape(devices._devices[0])

    with use(registered()):
        yield registered


def rounded(x: Any, low: str) -> Any:
    """To 16 bits and back."""
    return np.asarray(x, np.float32).astype(low).astype(np.float32)


def error(found: Any, wanted: Any) -> float:
    found, wanted = (np.concatenate([np.ravel(v).astype(np.float64) for v in values]) for values in (found, wanted))
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


# ---------------------------------------------------------------------------------------------------------------- types
@pytest.mark.parametrize(("precision", "given", "low", "expected"), [
    ("any", ["float32", "bfloat16"], "bfloat16", ["float32", "bfloat16"]),
    ("low", ["float32", "float16", "int64"], "bfloat16", ["bfloat16", "bfloat16", "int64"]),
    ("low", ["float64", "float32"], "float16", ["float64", "float16"]),
    ("low", ["float32", "bfloat16"], None, ["float32", "bfloat16"]),
    ("widest", ["bfloat16", "bfloat16"], "bfloat16", ["bfloat16", "bfloat16"]),
    ("widest", ["bfloat16", "float32"], None, ["float32", "float32"]),
    ("widest", ["float64", "float16"], None, ["float64", "float64"]),
    ("widest", ["bfloat16", "float16"], None, ["float32", "float32"]),
    ("widest", ["float64", "float32"], None, ["float64", "float32"]),
    ("full", ["bfloat16", "int64"], "bfloat16", ["float32", "int64"]),
    ("full", ["float16", "float64"], None, ["float64", "float64"]),
    ("full", ["float32"], "float16", ["float32"])])
def test_what_types_ops_take(precision, given, low, expected):
    assert input_dtypes(precision, given, low) == expected


def test_without_16_bits_the_message_says_so(capsys):
    with (pytest.raises(ml.DeviceError, match="bfloat16 needs a CUDA device; cpu computes in float32 and float64"),
          ml.autocast("bfloat16")):
        pass
    with pytest.raises(ml.DeviceError, match="float16 needs a CUDA device"):
        ops.relu(ml.array(np.ones(3), "float16"))
    with pytest.raises(ml.DeviceError, match="bfloat16 needs a CUDA device"):
        ml.array(np.ones(3, np.float32)).astype("bfloat16")
    with pytest.raises(ValueError, match="autocast takes bfloat16 or float16, not 'float32'"), ml.autocast("float32"):
        pass
    with pytest.raises(ValueError, match="unknown type 'half'; known: float32, float64, bf16, fp16"):
        Job(dtype="half")
    for dtype in ("bf16", "fp16"):
        assert cli.main(["train", "--model", "mlp", "--dtype", dtype, "--steps", "1"]) == 2
        assert f"{dtype} needs a CUDA device; cpu computes in float32 and float64" in capsys.readouterr().err


def test_a_product_takes_rounded_inputs_and_gives_float32_gradients(there):
    x, w, b = (random_array(s, i, "float32") for i, s in enumerate([(5, 7), (4, 7), (4,)]))
    for low, half_unit in HALVES.items():
        p, q = ml.Parameter(w), ml.Parameter(b)
        with ml.autocast(low):
            y = ops.linear(ml.array(x), p, q)
        assert y.dtype == low
        dy = random_array((5, 4), 9, "float32")
        (y * ml.array(dy)).sum().backward()
        assert {p.grad.dtype, q.grad.dtype, p.dtype} == {"float32"}
        np.testing.assert_array_equal(p.numpy(), w)
        np.testing.assert_allclose(y.numpy().astype("float32"), rounded(x, low) @ rounded(w, low).T + rounded(b, low),
                                   rtol=half_unit, atol=1e-6)
        np.testing.assert_allclose(p.grad.numpy(), rounded(dy, low).T @ rounded(x, low), rtol=half_unit, atol=1e-6)
        np.testing.assert_array_equal(p.grad.numpy(), rounded(p.grad.numpy(), low))  # made in 16 bits, kept in 32
        np.testing.assert_allclose(q.grad.numpy(), rounded(dy, low).sum(0), rtol=half_unit, atol=1e-6)


def test_sums_of_two_types_are_made_in_the_wider_one(there):
    x, p = ml.array(random_array((3, 4), 1, "float32")), ml.Parameter(random_array((4, 4), 2, "float32"))
    with ml.autocast("bfloat16"):
        low = x @ p
        y = low + x
        assert ((low + low).dtype, y.dtype, ops.concat([x, low]).dtype) == ("bfloat16", "float32", "float32")
        assert (ops.softmax(low).dtype,
                nn.cross_entropy(low, ml.array(np.array([0, 1, 2]))).dtype) == ("float32", "float32")
    np.testing.assert_array_equal(y.numpy(), low.numpy().astype("float32") + x.numpy())
    with pytest.raises(ml.ShapeError, match="matmul: types differ: bfloat16, float32"):
        low @ p


def test_astype_brings_gradients_back(there):
    p = ml.Parameter(np.array([1.0, 2.0, 3.0], np.float32))
    low = p.astype("bfloat16")
    assert low.dtype == "bfloat16"
    assert low.astype("bfloat16") is low
    (low.astype("float32") * ml.array(np.array([1.0, 0.5, 3.001], np.float32))).sum().backward()
    np.testing.assert_array_equal(p.grad.numpy(), [1.0, 0.5, 3.0])  # 3.001 went back through bfloat16
    with pytest.raises(ml.ShapeError, match="a tensor holds numbers .*, not float8"):
        p.astype("float8")
    same = ml.Parameter(np.array([1.0, 2.0]))
    (same.astype("float32") * 2.0).sum().backward()
    assert same.grad.dtype == "float64"


# ---------------------------------------------------------------------------------------------------------------- norms
def test_norms_keep_their_statistics_in_float32(there):
    x = random_array((6, 5, 5, 3), 1, "float32") + 3
    for layer in (nn.BatchNorm2d(3), nn.LayerNorm(3)):
        low, wide = ml.array(x).astype("bfloat16"), ml.array(rounded(x, "bfloat16"))
        names = [name for name, _ in layer.named_parameters()]
        found = []
        for given in (low, wide):
            state = {k: v.copy() for k, v in layer.state_dict().items()}
            y = layer(given)
            assert y.dtype == given.dtype
            (y.astype("float32") * ml.array(random_array(x.shape, 2, "float32"))).sum().backward()
            found.append([y.numpy().astype("float32"), *(dict(layer.named_parameters())[n].grad.numpy() for n in names),
                          *(v for k, v in layer.state_dict().items() if k.startswith("running"))])
            for p in layer.parameters():
                p.used = True
            layer.load_state_dict(state)
        assert error(found[0][:1], found[1][:1]) < 2.0**-8
        for a, b in zip(found[0][1:], found[1][1:], strict=True):
            assert a.dtype == np.float32
            assert error([a], [b]) < (2.0**-8 if "grad" in names else 5e-3)
        assert all(error([a], [b]) < 1e-6 for a, b in zip(found[0][3:], found[1][3:], strict=True))  # of the same x
    with pytest.raises(ml.ShapeError, match="types differ"):
        ops.layer_norm(low, ml.array(np.ones(3)))


# ------------------------------------------------------------------------------------------------------------- networks
def example(model: Any) -> Any:
    return next(data.load("digits", batch_size=16, seed=5, image_size=model.input_shape[0],
                          channels=model.input_shape[2], classes=10))


def gradients(low: str | None, build: Any, scale: float = 1.0, sample: Any = example) -> list[Any]:
    """Of all parameters, float32."""
    ml.seed(5)
    model = build()
    x, y = sample(model)
    with ml.autocast(low) if low else nullcontext():
        loss = nn.cross_entropy(model(ml.array(x)), ml.array(y))
    loss.backward(ml.array(np.float32(scale)))
    assert {p.grad.dtype for p in model.parameters()} == {"float32"}
    return [p.grad.numpy() / scale for p in model.parameters()]


class Smooth(nn.Module):
    """No kinks, whose sides rounding could exchange."""

    input_shape = (8, 8, 1)

    def __init__(self) -> None:
        self.first, self.second, self.last = nn.Conv2d(1, 4, 3, 2), nn.Linear(36, 24), nn.Linear(24, 10)

    def forward(self, x: Any) -> Any:
        return self.last(ops.tanh(self.second(ops.tanh(self.first(x)).flatten(1))))


@pytest.mark.few(1)
@pytest.mark.parametrize("low", HALVES)
def test_gradients_of_a_smooth_network(there, low):
    assert error(gradients(low, Smooth, 1024.0), gradients(None, Smooth, 1024.0)) < 4 * HALVES[low]


#: how far gradients may be off in units of rounding; those of torch's autocast are off as much
NETWORKS = [("mlp", {}, 25), ("lenet", {"image_size": 12}, 45), ("resnet20", {"preset": "tiny"}, 110),
            pytest.param("mobilenet_v3_large", {"preset": "tiny"}, 160, marks=pytest.mark.slow)]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "arguments", "units"), NETWORKS)
def test_gradients_of_networks(there, name, arguments, units):
    wanted = gradients(None, lambda: models.create(name, **arguments))
    errors = {low: error(gradients(low, lambda: models.create(name, **arguments)), wanted) for low in HALVES}
    assert all(errors[low] < units * unit for low, unit in HALVES.items()), errors


class Sequence(nn.Module):
    """Embedding, recurrence and attention with a residual."""

    def __init__(self) -> None:
        self.embedding, self.lstm = nn.Embedding(11, 8), nn.LSTM(8, 8, batch_first=True)
        self.attention, self.norm, self.last = nn.MultiheadAttention(8, 2), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        y, _ = self.lstm(x)
        x = x + self.attention(self.norm(x + y))
        return self.last(ops.mean(x, axis=1))


@pytest.mark.slow
def test_gradients_of_sequences(there):
    def tokens(_: Any) -> Any:
        rng = np.random.default_rng(0)
        return rng.integers(0, 11, (6, 5)), rng.integers(0, 3, 6)

    wanted = gradients(None, Sequence, sample=tokens)
    for low, unit in HALVES.items():
        assert error(gradients(low, Sequence, sample=tokens), wanted) < 8 * unit


# --------------------------------------------------------------------------------------------------------------- graphs
def recorded(there: Any, low: str | None, parts: int = 1) -> Any:
    """A step of a small network, as a graph."""
    ml.seed(1)
    model = models.mlp(64, 12, 10)
    opt = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x, y = next(data.load("digits", batch_size=8, seed=5))

    def step(x: Any, y: Any) -> None:
        for m in range(parts):
            with ml.micro_batch(m):
                nn.cross_entropy(model(x), y).backward()
        opt.step()

    with ml.autocast(low) if low else nullcontext():
        return ml.record(step, x, y)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_graph_has_the_same_tasks_in_any_precision(there, parts):
    plain, mixed = recorded(there, None, parts), recorded(there, "bfloat16", parts)
    assert [t.name for t in mixed] == [t.name for t in plain]
    casts = [t.kind for t in mixed for launch in t.launches if launch.kernel == "cast"
             and mixed.storages[launch.reads[0].storage].role == "parameter"]
    assert casts == [Kind.F] * 4, "each parameter once, whatever the micro-batches"
    gradients = [launch.writes[0].dtype for t in mixed if t.kind == Kind.W
                 for launch in t.launches if launch.kernel == "cast"]
    assert gradients == ["float32"] * 4 * parts


def test_a_step_ends_what_was_rounded(there):
    """Two steps in one context are two steps."""
    def run(one: bool) -> Any:
        ml.seed(2)
        layer = nn.Linear(4, 3)
        opt = optim.SGD(layer.parameters(), 0.5)
        with ml.autocast("bfloat16") if one else nullcontext():
            for n in range(2):
                with nullcontext() if one else ml.autocast("bfloat16"):
                    loss = (layer(ml.array(random_array((2, 4), n, "float32"))) ** 2).mean()
                loss.backward()
                opt.step()
        assert not current().rounded
        return [p.numpy() for p in layer.parameters()]

    for a, b in zip(run(True), run(False), strict=True):
        np.testing.assert_array_equal(a, b)


class Run:
    """A training run in float16 whose first scale is far too large."""

    def __init__(self, tape: Any, optimizer: str, interval: int = 2, scale: float = 2.0**20) -> None:
        self.device = tape.device
        with use(tape):
            ml.seed(5)
            self.batches = data.load("digits", batch_size=16, seed=5)
            self.model = models.mlp(64, 24, 10)
            self.scaler = optim.GradScaler(scale, growth_interval=interval)
            self.opt = (optim.SGD(self.model.parameters(), 0.1, 0.9, max_norm=1.0, scaler=self.scaler)
                        if optimizer == "sgd" else optim.AdamW(self.model.parameters(), 0.01, scaler=self.scaler))
            with ml.autocast("float16"):
                self.graph = ml.record(self.step, *next(self.batches))
        self.batches.restore({"position": 0})

    def step(self, x: Any, y: Any) -> Any:
        loss = nn.cross_entropy(self.model(x), y)
        loss.backward(self.scaler.scale)
        self.opt.step()
        return loss

    def state(self) -> dict[str, Any]:
        return {name: t.numpy().copy() for owner in (self.model, self.opt) for name, t in owner.named_tensors()}

    def train(self, run: Any, steps: int, scales: list[float] | None = None) -> list[Any]:
        """Losses and all that is left; `scales` takes those between steps, for which late tasks cannot stay late."""
        losses = []
        for _ in range(steps):
            losses.append(np.float32(run(*next(self.batches))))
            if scales is not None:
                scales.append(float(self.scaler.scale))
        return [*losses, *self.state().values()]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(np.array_equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_overflow_skips_the_step_and_shrinks_the_scale(there, optimizer):
    run = Run(there(1), optimizer)
    step = SequentialExecutor(run.graph, run.device)
    scale = float(run.scaler.scale)
    skipped = good = 0
    for _ in range(10):
        before = run.state()
        step(*next(run.batches))
        after, now = run.state(), float(run.scaler.scale)
        changed = {name for name, value in after.items() if not np.array_equal(value, before[name])}
        if now == scale / 2:
            skipped, good = skipped + 1, 0
            assert changed <= {"scale", "good_steps"}
            assert after["good_steps"] == 0
        else:
            good += 1
            assert now == (2 * scale if good % 2 == 0 else scale)
            assert changed >= after.keys() - {"lr", "scale"}
            assert all(np.isfinite(value).all() for value in after.values())
        scale = now
    assert 2 < skipped < 8, "the first scales are too large"


def plan_of(name: str, graph: Any) -> Any:
    if name == "one step late":  # every task that may be
        delayed = np.flatnonzero(~must_stay(graph))
        return with_late(ml.Schedule.of(graph, {ml.Lane(0): [*delayed, *np.setdiff1d(np.arange(len(graph)), delayed)]}),
                         graph, delayed)
    return (schedulers.multi_stream(graph) if name == "multi_stream"
            else random_schedule(graph, 3, np.random.default_rng(0)))


@pytest.mark.few(1)
@pytest.mark.parametrize(("optimizer", "kind", "plan"), [
    ("sgd", StreamExecutor, "multi_stream"), ("sgd", GraphExecutor, "random"), ("sgd", None, "one step late"),
    ("adamw", StreamExecutor, "random"), ("adamw", GraphExecutor, "multi_stream")])
def test_every_executor_has_the_same_bits(there, optimizer, kind, plan):
    """Steps that are skipped, a scale that grows and shrinks: all of it in buffers."""
    first, scales = Run(there(0), optimizer), []
    wanted = first.train(SequentialExecutor(first.graph, first.device), 8, scales)
    assert any(a > b for a, b in zip(scales, scales[1:], strict=False))
    assert any(a < b for a, b in zip(scales, scales[1:], strict=False))
    run = Run(there(1), optimizer)
    chosen = plan_of(plan, run.graph)
    step = kind(run.graph, chosen, device=run.device) if kind else executor(run.graph, chosen, device=run.device)
    assert isinstance(step, kind or StreamExecutor)
    assert same(run.train(step, 8), wanted)


def test_eager_steps_have_the_bits_of_recorded_ones(there):
    first = Run(there(2), "sgd")
    wanted = first.train(SequentialExecutor(first.graph, first.device), 4)
    run = Run(there(3), "sgd")

    def eager(x: Any, y: Any) -> Any:
        with use(Tape(run.device)), ml.autocast("float16"):
            return run.step(ml.array(x), ml.array(y))

    assert same(run.train(eager, 4), wanted)


def test_a_run_goes_on_from_a_checkpoint(there, tmp_path):
    whole = Run(there(0), "adamw")
    wanted = whole.train(SequentialExecutor(whole.graph, whole.device), 7)
    begun = Run(there(1), "adamw")
    begun.train(SequentialExecutor(begun.graph, begun.device), 4)
    checkpoint.save(tmp_path, begun.model, begun.opt, step=4, loader=begun.batches)
    back = Run(there(2), "adamw", scale=2.0)
    checkpoint.load(tmp_path, back.model, back.opt, loader=back.batches)
    found = back.train(GraphExecutor(back.graph, schedulers.in_order(back.graph), device=back.device), 3)
    assert same(found, wanted[4:])


# --------------------------------------------------------------------------------------------------------- loss scaling
def test_scales_are_torchs():
    """On the CPU, in float32, with infinite gradients now and then."""
    torch = torch_or_skip()
    ours, p = optim.GradScaler(8.0, 2.0, 0.25, 3), ml.Parameter(np.ones(2, np.float32))
    theirs, q = torch.amp.GradScaler("cpu", 8.0, 2.0, 0.25, 3), torch.ones(2, requires_grad=True)
    opt, other = optim.Adam([p], 0.1, scaler=ours), torch.optim.Adam([q], 0.1)
    for n in range(16):
        factor = np.float32(np.inf if n in (0, 5, 6, 12) else 1 + n)
        (p * float(factor)).sum().backward(ours.scale)
        other.zero_grad()
        theirs.scale((q * float(factor)).sum()).backward()
        opt.step()
        theirs.step(other)
        theirs.update()
        assert float(ours.scale) == theirs.get_scale()
        np.testing.assert_allclose(p.numpy(), q.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("apart", ["one backward", "two backwards", "second backward after the first update"])
def test_two_optimizers_divide_gradients_by_the_scale_that_these_have(apart: str, recorded: bool):
    """Powers of two change no bit, so the parameters are those of training without a scale."""

    def trained(scaled: bool) -> list[Any]:
        ml.seed(2)
        model = models.mlp(6, 5, 3)
        scaler = optim.GradScaler(8.0, growth_interval=1) if scaled else None
        weights, biases = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
        first = optim.SGD(weights, 0.1, 0.9, weight_decay=0.01, scaler=scaler)
        second = optim.Adam(biases, 0.1, scaler=scaler)

        def backward(loss: Any) -> None:
            loss.backward(scaler.scale if scaler else None, retain_graph=apart == "two backwards")

        def step(x: Any) -> None:
            if apart == "second backward after the first update":
                losses = [sum(((p * p).sum() for p in some), start=x.sum()) for some in (weights, biases)]
                for loss, opt in zip(losses, (first, second), strict=True):
                    backward(loss)
                    opt.step()
                return
            y = model(x)
            backward((y * y).sum())
            if apart == "two backwards":
                backward(y.sum())
            first.step()
            second.step()

        x = random_array((4, 6), 1, "float32")
        run = ml.SequentialExecutor(ml.record(step, x)) if recorded else lambda x: step(ml.array(x))
        for _ in range(3):
            run(x)
        return [p.numpy() for p in model.parameters()]

    assert same(trained(True), trained(False))


def test_scaling_saves_small_gradients(there):
    """Gradients of a mean over many elements vanish in float16, unless they are scaled."""
    x = random_array((64, 8), 1, "float32") * np.float32(1e-3)

    def run(scale: float) -> Any:
        p = ml.Parameter(np.ones((8, 8), np.float32))
        with ml.autocast("float16"):
            y = ops.linear(ml.array(x), p)
        (y.astype("float32") * 1e-6).mean().backward(ml.array(np.float32(scale)))
        return p.grad.numpy() / scale

    wanted = np.broadcast_to(x.sum(0) * 1e-6 / 512, (8, 8))
    assert error([run(2.0**20)], [wanted]) < 1e-2
    assert not run(1.0).any()


def test_scalers_that_make_no_sense():
    for arguments in ({"init_scale": 0.0}, {"init_scale": float("inf")}, {"growth_factor": 1.0},
                      {"backoff_factor": 1.0}, {"growth_interval": 0}):
        with pytest.raises(ValueError, match="a loss scale of"):
            optim.GradScaler(**arguments)


# ----------------------------------------------------------------------------------------------------------------- jobs
@pytest.mark.wide
@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_job_learns_the_digits(there, dtype):
    there(0)
    job = Job(model="mlp", model_args={"hidden": 48}, device="cuda", dtype=dtype, lr=0.1, batch_size=64,
              micro_batches=2, scheduler="multi_stream")
    trainer = Trainer(Recorded(job), ml.CostModel.analytic())
    for _ in range(40):
        trainer.step()
    trainer.collect()
    assert trainer.losses[0] > 2.2
    assert trainer.losses[-1] < 0.5
    assert trainer.evaluate()["accuracy"] > 0.8
    assert {p.dtype for p in trainer.recorded.model.parameters()} == {"float32"}
    assert (trainer.recorded.optimizer.scaler is not None) == (dtype == "fp16")


# --------------------------------------------------------------------------------------------------------------- fusion
@pytest.mark.wide
@pytest.mark.few(1)
@pytest.mark.parametrize(("dtype", "name"), [("bf16", "resnet20"), ("fp16", "resnet20"),
                                             pytest.param("bf16", "mobilenet_v3_large", marks=pytest.mark.slow)])
def test_fusion_in_mixed_precision(there, dtype, name):
    """Casts and updates that are put together change no bits, other rules no more than rounding."""
    found = []
    for fusion in ((), ("casts", "updates"), None):
        there(len(found))
        job = Job(model=name, model_args={"preset": "tiny"}, device="cuda", dtype=dtype, batch_size=16, fusion=fusion,
                  optimizer="adam", lr=0.01, scheduler="multi_stream")
        recorded = Recorded(job)
        trainer = Trainer(recorded, ml.CostModel.analytic())
        for _ in range(3):
            trainer.step()
        trainer.collect()
        found.append([*trainer.losses, *(p.numpy() for p in recorded.model.parameters())])
        count = kernels(recorded.graph)
        if fusion != ():
            assert (count["cast_many"], count["cast"]) == (1, 3), "the image, the logits and their gradient are left"
        assert count["adam_many"] == (fusion != ())
    assert same(found[0], found[1])
    np.testing.assert_allclose(found[2][0], found[0][0], rtol=0.01)


@pytest.mark.few(1)
@pytest.mark.parametrize("arguments",
                         [{"parts": 2}, {"max_norm": 0.1}, {"max_norm": 0.1, "scaler": True}, {"steps": 2}], ids=str)
def test_casts_stay_where_they_are_needed(there, arguments):
    """Gradients that are added up or clipped are float32; after an update parameters are rounded anew."""
    def run(rules: tuple[str, ...], seed: int) -> tuple[Any, list[Any]]:
        device = there(seed).device
        with use(Tape(device)), ml.autocast("bfloat16"):
            ml.seed(1)
            model, shared = models.mlp(64, 12, 12, 10), nn.Linear(12, 12)
            model.layer1 = shared
            scaler = optim.GradScaler(1024.0) if arguments.get("scaler") else None
            opt = optim.SGD(model.parameters(), 0.1, 0.9, max_norm=arguments.get("max_norm"), scaler=scaler)
            x, y = next(data.load("digits", batch_size=8, seed=5))

            def step(x: Any, y: Any) -> Any:
                for _ in range(arguments.get("steps", 1)):
                    for m in range(arguments.get("parts", 1)):
                        with ml.micro_batch(m) if "parts" in arguments else nullcontext():
                            h = shared(nn.relu(shared(nn.relu(model.layer0(x.flatten(1))))))
                            loss = nn.cross_entropy(model.layer2(h), y)
                            loss.backward(scaler.scale if scaler else None)
                    opt.step()
                return loss.detach()

            graph = fused(ml.record(step, x, y), device, rules)
        run = GraphExecutor(graph, random_schedule(graph, 3, np.random.default_rng(seed)), device=device)
        losses = [np.float32(run(x, y)) for _ in range(2)]
        return graph, [*losses, *(p.numpy() for p in model.parameters())]

    plain, wanted = run((), 0)
    for seed in (1, 2):
        graph, found = run(("casts", "updates"), seed)
        assert same(found, wanted)
    before, after = kernels(plain), kernels(graph)
    assert after["cast_many"] == 1
    assert after["cast"] < before["cast"]
    clipped_without_scaler = "max_norm" in arguments and "scaler" not in arguments
    widened = sum(dict(launch.constants)["dtype"] == "float32" for task in graph.launches
                  for launch in task if launch.kernel == "cast")
    least = 5 * arguments.get("steps", 1)  # the logits, and a layer that is used twice
    assert widened > least if "parts" in arguments or clipped_without_scaler else widened == least
