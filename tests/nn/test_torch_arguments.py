"""Every argument of torch's signatures: each function and layer that has a name of torch is called with each of its
arguments, by name and in its place, at a value that matters. Either the results and gradients are torch's, or one clear
line refuses it.

The signatures are torch's own, so a new function, layer or argument is tested as soon as it has a name of torch; where
its inputs or a value that matters are unknown here, its test fails and says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from torch_arguments import (
    Call,
    Case,
    Draws,
    Tables,
    arrays_of,
    check,
    mapped,
    of_function,
    outcome,
    parameters,
    signatures,
    torch,
    turned,
)

import minidl as ml
import minidl.nn.functional as F
from minidl import nn, optim
from minidl.nn.module import state_array

DRAWS = Draws()
floats, shares, labels = DRAWS.floats, DRAWS.shares, DRAWS.labels
X, IMAGE, SERIES = floats(3, 4), floats(2, 4, 6, 5), floats(2, 4, 7)
PAIR = {"input": floats(3, 4), "target": floats(3, 4)}
CHANCES = {"input": shares(3, 4), "target": shares(3, 4)}
OTHERS = Draws()
SIDES = {"x1": OTHERS.floats(3, 4), "x2": OTHERS.floats(3, 4)}
SIDED = {"input1": OTHERS.floats(3, 4), "input2": OTHERS.floats(3, 4), "target": np.array([1, -1, 1])}
TRIPLET = {name: OTHERS.floats(3, 4) for name in ("anchor", "positive", "negative")}
BAG = {"input": np.array([0, 1, 3, 1, 2, 1]), "weight": OTHERS.floats(5, 4), "offsets": np.array([0, 2, 2])}
CLASSES = {"input": floats(5, 4), "target": np.array([0, 3, 1, 1, 2])}
SEQUENCE = floats(3, 2, 4)
WINDOW = {"kernel_size": 2}
FUNCTIONS: dict[str, Case] = {
    "adaptive_avg_pool1d": Case({"input": SERIES, "output_size": 3}, last=True),
    "adaptive_avg_pool2d": Case({"input": IMAGE, "output_size": (3, 2)}, last=True),
    **{f"{kind}_pool{d}d": Case({"input": IMAGE if d == 2 else SERIES, **WINDOW}, last=True)
       for kind in ("avg", "max") for d in (1, 2)},
    "binary_cross_entropy": Case(CHANCES),
    "binary_cross_entropy_with_logits": Case({**CHANCES, "input": floats(3, 4)}),
    "conv1d": Case({"input": SERIES, "weight": floats(6, 4, 3)}, last=True),
    "conv2d": Case({"input": IMAGE, "weight": floats(6, 4, 3, 3)}, last=True),
    "conv_transpose1d": Case({"input": SERIES, "weight": floats(4, 6, 3)}, last=True),
    "conv_transpose2d": Case({"input": IMAGE, "weight": floats(4, 6, 3, 3)}, last=True),
    "cosine_similarity": Case({"x1": floats(3, 4), "x2": floats(3, 4)}),
    "cross_entropy": Case(CLASSES), "nll_loss": Case(CLASSES), "mse_loss": Case(PAIR), "l1_loss": Case(PAIR),
    "smooth_l1_loss": Case(PAIR), "huber_loss": Case(PAIR), "kl_div": Case(CHANCES),
    "dropout": Case({"input": np.ones((50, 40), np.float32)}, drawn=True),
    "embedding": Case({"input": labels(3, 2), "weight": floats(5, 4)}),
    "embedding_bag": Case(BAG), "pairwise_distance": Case(SIDES),
    "cosine_embedding_loss": Case(SIDED), "triplet_margin_loss": Case(TRIPLET),
    "group_norm": Case({"input": IMAGE, "num_groups": 2}, last=True),
    "interpolate": Case({"input": IMAGE, "size": (12, 15)}, last=True),
    **dict.fromkeys(("layer_norm", "rms_norm"), Case({"input": X, "normalized_shape": (4,)})),
    "linear": Case({"input": X, "weight": floats(5, 4)}),
    "log_softmax": Case({"input": X, "dim": -1}), "softmax": Case({"input": X, "dim": -1}),
    "one_hot": Case({"tensor": np.array([0, 1, 2])}), "pad": Case({"input": X, "pad": (1, 2)}),
    "pixel_shuffle": Case({"input": IMAGE, "upscale_factor": 2}, last=True),
    "prelu": Case({"input": IMAGE, "weight": shares(4)}, last=True),
    "scaled_dot_product_attention": Case({name: floats(2, 2, 3, 4) for name in ("query", "key", "value")}),
}
LAYERS: dict[str, Case] = {
    **{name: Case({"kernel_size": 2}, {"input": SERIES if name.endswith("1d") else IMAGE}, last=True)
       for name in ("AvgPool1d", "AvgPool2d", "MaxPool1d", "MaxPool2d")},
    "AdaptiveAvgPool1d": Case({"output_size": 3}, {"input": SERIES}, last=True),
    "AdaptiveAvgPool2d": Case({"output_size": (3, 2)}, {"input": IMAGE}, last=True),
    **{name: Case({"in_channels": 4, "out_channels": 6, "kernel_size": 3},
                  {"input": SERIES if name.endswith("1d") else IMAGE}, last=True)
       for name in ("Conv1d", "Conv2d", "ConvTranspose1d", "ConvTranspose2d")},
    "BatchNorm1d": Case({"num_features": 4}, {"input": X}),
    "BatchNorm2d": Case({"num_features": 4}, {"input": IMAGE}, last=True),
    "InstanceNorm2d": Case({"num_features": 4}, {"input": IMAGE}, last=True),
    "GroupNorm": Case({"num_groups": 2, "num_channels": 4}, {"input": IMAGE}, last=True),
    "LayerNorm": Case({"normalized_shape": 4}, {"input": X}), "RMSNorm": Case({"normalized_shape": 4}, {"x": X}),
    "BCELoss": Case({}, CHANCES), "BCEWithLogitsLoss": Case({}, {**CHANCES, "input": floats(3, 4)}),
    "CrossEntropyLoss": Case({}, CLASSES), "NLLLoss": Case({}, CLASSES), "KLDivLoss": Case({}, CHANCES),
    **{name: Case({}, PAIR) for name in ("HuberLoss", "L1Loss", "MSELoss", "SmoothL1Loss")},
    "Dropout": Case({}, {"input": np.ones((50, 40), np.float32)}, drawn=True),
    "Dropout2d": Case({}, {"input": np.ones((50, 40, 2, 2), np.float32)}, last=True, drawn=True),
    "Embedding": Case({"num_embeddings": 5, "embedding_dim": 4}, {"input": labels(3, 2)}),
    "EmbeddingBag": Case({"num_embeddings": 5, "embedding_dim": 4}, {n: BAG[n] for n in ("input", "offsets")}),
    "CosineEmbeddingLoss": Case({}, SIDED), "TripletMarginLoss": Case({}, TRIPLET),
    **dict.fromkeys(("CosineSimilarity", "PairwiseDistance"), Case({}, SIDES)),
    "Linear": Case({"in_features": 4, "out_features": 5}, {"input": X}),
    "Flatten": Case({}, {"input": floats(2, 3, 4, 5)}), "Unflatten": Case({"dim": 1, "unflattened_size": (2, 2)},
                                                                         {"input": X}),
    "LogSoftmax": Case({"dim": -1}, {"input": X}), "Softmax": Case({"dim": -1}, {"input": X}),
    "MultiheadAttention": Case({"embed_dim": 4, "num_heads": 2}, dict.fromkeys(("query", "key", "value"), SEQUENCE)),
    "TransformerEncoderLayer": Case({"d_model": 4, "nhead": 2, "dim_feedforward": 5, "dropout": 0.0,
                                     "batch_first": True}, {"src": SEQUENCE}),
    "TransformerDecoderLayer": Case({"d_model": 4, "nhead": 2, "dim_feedforward": 5, "dropout": 0.0,
                                     "batch_first": True}, {"tgt": SEQUENCE, "memory": OTHERS.floats(3, 5, 4)}),
    **{name: Case({"input_size": 4, "hidden_size": 3}, {"input": SEQUENCE if len(name) < 5 else X})
       for name in ("RNN", "GRU", "LSTM")},
    **{f"{name}Cell": Case({"input_size": 4, "hidden_size": 3}, {"input": X}) for name in ("RNN", "GRU", "LSTM")},
    "PixelShuffle": Case({"upscale_factor": 2}, {"input": IMAGE}, last=True),
    "PReLU": Case({}, {"input": IMAGE}, last=True), "Upsample": Case({"size": (12, 15)}, {"input": IMAGE}, last=True),
    "ZeroPad2d": Case({"padding": 1}, {"input": IMAGE}, last=True),
}
#: not called: containers, whose arguments are modules; Parameter is a tensor
APART = {"Module", "Optimizer", "ModuleDict", "ModuleList", "Sequential", "Parameter"}
WEIGHT = shares(3, 4)
MATTERS: dict[str, list[Any]] = {
    "inplace": [True], "reduction": ["sum", "none", "wrong"], "size_average": [False], "reduce": [False],
    "weight": [WEIGHT], "pos_weight": [shares(4)], "target": [floats(3, 4)],
    "cross_entropy target": [np.array([1, 1, 2, 0, -100]), np.full(5, -100), shares(5, 4)],
    "nll_loss target": [np.array([1, 1, 2, 0, -100]), np.full(5, -100)],
    "CrossEntropyLoss target": [np.array([1, 1, 2, 0, -100]), np.full(5, -100), shares(5, 4)],
    "NLLLoss target": [np.array([1, 1, 2, 0, -100]), np.full(5, -100)],
    **{f"{name} weight": [shares(4)] for name in ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss")},
    "ignore_index": [1], "label_smoothing": [0.3, 2.0], "alpha": [0.3], "beta": [2.5, 0.0], "delta": [0.4, -1.0],
    "threshold": [-1], "negative_slope": [0.3], "approximate": ["tanh", "wrong"], "log_target": [True],
    "input": [], "binary_cross_entropy input": [np.full((3, 4), 1.5, np.float32), np.full((3, 4), -0.1, np.float32)],
    "BCELoss input": [np.full((3, 4), 1.5, np.float32)], "x1": [], "x2": [], "tensor": [], "self": [],
    "num_classes": [5, 2], "kernel_size": [3, (2, 3), 0], "stride": [1, 3, 0], "padding": [1, "same", -1],
    **{f"{name}{d}d padding": [1, -1] for name in ("ConvTranspose", "conv_transpose") for d in (1, 2)},
    "ZeroPad2d padding": [2, (1, 0, 2, 3)],
    **{f"{name} padding": [1, 5] for name in ("avg_pool1d", "avg_pool2d", "max_pool1d", "max_pool2d", "AvgPool1d",
                                             "AvgPool2d", "MaxPool1d", "MaxPool2d")},
    "dilation": [2], "groups": [2, 3], "ceil_mode": [True], "count_include_pad": [False], "divisor_override": [3],
    "return_indices": [True], "output_padding": [1], "output_size": [2, 1, None], "bias": [False],
    **{f"{name} bias": [floats(6)] for name in ("conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d")},
    "linear bias": [floats(5)], "group_norm bias": [floats(4)], "layer_norm bias": [floats(4)],
    "group_norm weight": [shares(4), shares(3, 4)], "layer_norm weight": [shares(4)], "rms_norm weight": [shares(4)],
    "prelu weight": [shares(1), shares(3, 4)], "kl_div target": [shares(3, 4), floats(3, 4)],
    "KLDivLoss target": [shares(3, 4), floats(3, 4)], "x": [],
    "dim": [0, 1, -3, 7], "eps": [5.0], "p": [0.3, 1.0, 1.5], "normalize p": [1, 3, float("inf")],
    "training": [False], "padding_idx": [1, -1], "max_norm": [0.5], "norm_type": [1.0], "scale_grad_by_freq": [True],
    "sparse": [True], "num_groups": [4, 1, 3], "size": [(3, 4), 7], "scale_factor": [2, 1.5], "mode": ["reflect"],
    "align_corners": [True], "recompute_scale_factor": [True], "antialias": [True], "normalized_shape": [(3, 4), 4],
    "_stacklevel": [], "dtype": [torch.float64], "device": ["meta"], "min_val": [-0.1, 2.0], "max_val": [0.1, -2.0],
    "min_value": [-0.1], "max_value": [0.1], "out": [torch.zeros(3, 4)], "pad": [(1, 0, 0, 2), (-1, 1)], "value": [0.7],
    "pad mode": ["reflect", "replicate", "circular"], "upscale_factor": [1, 3],
    "interpolate mode": ["bilinear", "bicubic", "area", "nearest-exact"],
    "Upsample mode": ["bilinear", "bicubic", "area", "nearest-exact"],
    "attn_mask": [floats(3, 3), DRAWS.rng.random((3, 3)) > 0.4], "dropout_p": [1.0], "is_causal": [True],
    "scale": [0.3], "enable_gqa": [], "query": [], "key": [floats(2, 2, 5, 4)], "momentum": [0.4, None],
    "affine": [False, True],
    "track_running_stats": [False, True], "elementwise_affine": [False], "padding_mode": ["reflect"],
    "in_channels": [5], "out_channels": [2], "num_features": [3], "num_channels": [6], "in_features": [3],
    "out_features": [2], "num_embeddings": [9], "embedding_dim": [3], "start_dim": [0, 2], "end_dim": [2],
    "unflattened_size": [(4, 1)], "num_parameters": [4], "init": [0.6], "embed_dim": [6], "num_heads": [4, 3],
    "dropout": [1.0], "add_bias_kv": [True], "add_zero_attn": [True], "kdim": [3], "vdim": [3], "batch_first": [True],
    "d_model": [6], "nhead": [4], "dim_feedforward": [3], "activation": ["gelu", torch.nn.functional.silu],
    "layer_norm_eps": [0.5], "norm_first": [True], "TransformerEncoderLayer batch_first": [False],
    "TransformerDecoderLayer batch_first": [False], "input_size": [3],
    "hidden_size": [2], "num_layers": [2], "nonlinearity": ["relu"], "bidirectional": [True], "proj_size": [2],
    "hx": [floats(1, 2, 3)], "RNNCell hx": [floats(3, 3)], "GRUCell hx": [floats(3, 3)],
    "LSTM hx": [(floats(1, 2, 3), floats(1, 2, 3))], "LSTMCell hx": [(floats(3, 3), floats(3, 3))],
    "key_padding_mask": [DRAWS.rng.random((2, 3)) > 0.5], "need_weights": [False], "average_attn_weights": [False],
    "src": [], "src_mask": [floats(2, 2)], "src_key_padding_mask": [np.array([[True, False]] * 3)],
    "args": [], "kwargs": [], "params": [], "lr": [0.01, -1.0], "dampening": [0.5], "weight_decay": [0.3, -1.0],
    "nesterov": [True], "maximize": [True], "foreach": [True], "differentiable": [True], "fused": [True],
    "capturable": [True], "betas": [(0.5, 0.7), (1.5, 0.9)], "amsgrad": [True], "decoupled_weight_decay": [True],
    "centered": [True], **{f"{name} alpha": [0.5] for name in ("RMSprop",)},
    "input1": [], "input2": [], "anchor": [], "positive": [], "negative": [], "keepdim": [True], "swap": [True],
    "margin": [0.3, -2.0], "offsets": [np.array([0, 4]), np.array([1, 2])], "include_last_offset": [True],
    "per_sample_weights": [OTHERS.shares(6)], "tgt": [], "memory": [OTHERS.floats(3, 2, 4)],
    "embedding_bag weight": [OTHERS.floats(6, 4)], "_weight": [], "tgt_mask": [OTHERS.floats(2, 2)],
    "memory_mask": [OTHERS.floats(2, 5)], "tgt_key_padding_mask": [np.array([[True, False]] * 3)],
    "memory_key_padding_mask": [np.array([[True] + [False] * 4] * 3)], "tgt_is_causal": [], "memory_is_causal": [],
    "cosine_embedding_loss target": [np.array([-1, -1, 1])], "CosineEmbeddingLoss target": [np.array([-1, -1, 1])],
    "pairwise_distance p": [1, 3, float("inf")], "PairwiseDistance p": [1, 3, float("inf")],
    **{f"{name} mode": ["sum", "max", "wrong"] for name in ("embedding_bag", "EmbeddingBag")},
    "triplet_margin_loss p": [1, 3], "TripletMarginLoss p": [1, 3],
    "SGD momentum": [0.5, -1.0], "RMSprop momentum": [0.5], "Muon momentum": [0.5, -1.0],
    "Muon nesterov": [False], "Muon eps": [1e6, -1.0],
    "ns_coefficients": [(2.0, -1.5, 0.5), (1.0,)], "ns_steps": [2, 100],
    "adjust_lr_fn": ["original", "match_rms_adamw", "other"]}
BESIDE: dict[str, dict[str, Any]] = {
    "count_include_pad": {"padding": 1}, "norm_type": {"max_norm": 0.5}, "align_corners": {"mode": "bilinear"},
    "antialias": {"mode": "bilinear", "size": (3, 2)}, "scale_factor": {"size": None}, "output_padding": {"stride": 2},
    "InstanceNorm2d momentum": {"track_running_stats": True},
    **{f"InstanceNorm2d {name}": {"affine": True} for name in ("bias", "num_features", "device")},
    "padding_mode": {"padding": 1}, "nesterov": {"momentum": 0.9}, "amsgrad": {"betas": (0.5, 0.5)},
    "dampening": {"momentum": 0.9},
    "decoupled_weight_decay": {"weight_decay": 0.3},
    "dropout": {"num_layers": 2}, "per_sample_weights": {"mode": "sum"},
    "recompute_scale_factor": {"size": None, "scale_factor": 1.3}, "value": {"mode": "constant"}}


#: without gradients, of which torch's are other than finite differences: it takes the limit `eps` as no limit
VALUES_ALONE = {"cosine_similarity eps"}
SAME_RESULT = {"foreach", "differentiable", "fused", "capturable", "sparse", "need_weights", "average_attn_weights",
               "is_causal", "enable_gqa"}
ALSO: dict[str, tuple[str, ...]] = {"dim": ("axis",), "dtype": ("data type",), "d_model": ("MultiheadAttention",),
                                    "conv1d": ("conv2d",), "lr": ("learning rate",), "weight_decay": ("weight decay",),
                                    "conv_transpose1d": ("conv_transpose2d",)}


def of_layer(torchs: Any, ours: Any, case: Case, made: Call, x: Call) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Torch's results, gradients and states of a layer that is made and called so, and ours with the same weights."""
    weights: dict[str, Any] = {}

    def theirs() -> list[Any]:
        torch.manual_seed(0)
        args, named = made.split(lambda name, value: mapped(value, torch.tensor))
        layer = torchs(*args, **named)
        weights.update({name: t.detach().numpy().copy() for name, t in layer.state_dict().items()})
        args, named = x.split(lambda name, value: mapped(value, torch.tensor))
        found = outcome(lambda: layer(*args, **named), [p for _, p in sorted(layer.named_parameters())])
        return [*found, *(t.numpy() for _, t in sorted(layer.named_buffers()))]

    def new() -> Any:
        args, named = made.split(lambda name, value: mapped(value, ml.array))
        layer = ours(*args, **named)
        if weights or layer.state_dict():
            layer.load_state_dict(weights)
        return layer

    def mine() -> list[Any]:
        tensor = lambda a: ml.array(np.ascontiguousarray(turned(a, case.last)))  # noqa: E731
        args, named = x.split(lambda name, value: mapped(value, tensor))
        other, layer = new(), new()  # statistics change with each call
        outputs = [turned(a, case.last, back=True) for a in outcome(lambda: other(*args, **named), [])]
        leaves = [p for _, p in sorted(layer.named_parameters())]
        outcome(lambda: layer(*args, **named), leaves)
        grads = [p.grad.numpy().transpose(p.axes) if p.axes else p.grad.numpy() for p in leaves if p.grad is not None]
        return [*outputs, *grads, *(state_array(t) for _, t in sorted(layer.named_buffers()))]

    return theirs, mine


TABLES = Tables(MATTERS, BESIDE, SAME_RESULT, ALSO)


def shared(mine: ModuleType | Any, torchs: Any) -> list[str]:
    return [name for name in mine.__all__ if callable(getattr(torchs, name, None)) and name not in APART]


@pytest.mark.few(8)
@pytest.mark.parametrize("name", shared(F, torch.nn.functional))
def test_every_argument_of_a_function(name: str) -> None:
    torchs, ours = getattr(torch.nn.functional, name), getattr(F, name)
    case = FUNCTIONS.get(name, Case({"input": X}))
    faults = []
    for argument, known in parameters(signatures(torchs)):
        alone = f"{name} {argument}" in VALUES_ALONE
        faults += check(name, argument, known, case.given,
                        lambda call, a=alone: of_function(torchs, ours, case, call, not a), case.drawn, TABLES)
    assert not faults, "\n".join(faults)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", [n for n in shared(nn, torch.nn) if isinstance(getattr(torch.nn, n), type)])
def test_every_argument_of_a_layer(name: str) -> None:
    torchs, ours = getattr(torch.nn, name), getattr(nn, name)
    case = LAYERS.get(name, Case({}, {"input": X}))
    (forward, *_) = signatures(torchs.forward)
    inputs = [p for p in forward.parameters.values() if p.name != "self"]
    x = Call(case.x, tuple(p.name for p in inputs if p.name in case.x))
    faults = []
    for argument, known in parameters(signatures(torchs)):
        faults += check(name, argument, known, case.given,
                        lambda call: of_layer(torchs, ours, case, call, x), case.drawn, TABLES)
    made = Call(case.given, ())
    for p in inputs:
        faults += check(name, p.name, inputs, case.x, lambda call: of_layer(torchs, ours, case, made, call), case.drawn,
                        TABLES)
    assert not faults, "\n".join(faults)


def of_optimizer(torchs: Any, ours: Any, call: Call) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The parameter after five steps of torch's optimizer, and of ours."""

    def run(f: Any, weight: Any) -> list[Any]:
        args, named = call.split(lambda name, value: [weight] if name == "params" else value)
        optimizer = f(*args, **named)
        for step in range(5):
            optimizer.zero_grad()
            ((weight * (5.0 - step) - 1.0) ** 4).sum().backward()
            optimizer.step()
        return arrays_of(weight)

    return (lambda: run(torchs, torch.nn.Parameter(torch.tensor(X))), lambda: run(ours, nn.Parameter(X)))


@pytest.mark.parametrize("name", shared(optim, torch.optim))
def test_every_argument_of_an_optimizer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's Muon computes directions in bfloat16; here it computes them in the parameter's type, as ours does."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    torchs, ours = getattr(torch.optim, name), getattr(optim, name)
    faults = []
    for argument, known in parameters(signatures(torchs)):
        given = {"params": None, "lr": 0.003}
        faults += check(name, argument, known, given, lambda call: of_optimizer(torchs, ours, call), False, TABLES)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", ["LSTM", "GRU", "LSTMCell", "GRUCell"])
def test_gates_take_no_nonlinearity(name: str) -> None:
    with pytest.raises(TypeError, match="nonlinearity"):
        getattr(nn, name)(3, 4, nonlinearity="relu")


def test_losses_of_recorded_steps_are_not_numbers_where_torchs_are_not() -> None:
    """The numbers of a recorded step are not known when it is made, so nothing is refused there."""
    x, y = np.full((3, 2), 1.5, np.float32), np.ones((3, 2), np.float32)
    below = ml.record(F.binary_cross_entropy, -x, y)
    assert np.isnan(ml.StreamExecutor(below, ml.schedulers.in_order(below))(-x, y).numpy())
    above = ml.record(F.binary_cross_entropy, x, y)
    assert np.isnan(ml.StreamExecutor(above, ml.schedulers.in_order(above))(x, y).numpy())
    none = np.full(3, -100)
    ignored = ml.record(F.cross_entropy, x, none)
    run = ml.StreamExecutor(ignored, ml.schedulers.in_order(ignored))
    assert np.isnan(run(x, none).numpy())
    for name in (nn.cross_entropy, ml.ops.cross_entropy, nn.CrossEntropyLoss()):
        given = {} if isinstance(name, nn.Module) else {"ignore_index": -100}
        assert np.isnan(name(ml.array(x), ml.array(none), **given).numpy())
    assert run(x, np.array([0, -100, 1])).numpy() == F.cross_entropy(ml.array(x), ml.array([0, -100, 1])).numpy()


class Even(torch.Tensor):
    """A tensor whose "random" numbers are evenly spread, so that two libraries draw the same."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def uniform_(self, a: float, b: float, generator: Any = None) -> Any:
        return self.copy_(torch.linspace(a, b, self.numel()).reshape(self.shape))

    def normal_(self, mean: float, std: float, generator: Any = None) -> Any:
        return self.copy_(torch.linspace(mean - std, mean + std, self.numel()).reshape(self.shape))


GIVEN = {"val": 0.5, "nonlinearity": "tanh"}
VALUES = Tables({"tensor": [], "val": [2.0], "mean": [0.5], "std": [0.2], "a": [0.3], "b": [3.0], "gain": [2.0],
                 "mode": ["fan_out", "wrong"], "nonlinearity": ["relu", "tanh", "conv2d", "wrong"], "param": [0.3],
                 "generator": [torch.Generator()]}, {"param": {"nonlinearity": "leaky_relu"}}, {"generator"}, {})


@pytest.mark.parametrize("name", [n for n in dir(torch.nn.init) if not n.startswith("_") and hasattr(nn.init, n)
                                  and callable(getattr(nn.init, n)) and n != "Tensor"])
def test_every_argument_of_values_for_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No numbers are drawn by chance."""
    even = lambda width, shape, dtype: np.linspace(-width, width, int(np.prod(shape))).reshape(shape)  # noqa: E731
    monkeypatch.setattr(nn.init.random, "uniform", even)
    monkeypatch.setattr(nn.init.random, "normal", even)
    torchs, ours = getattr(torch.nn.init, name), getattr(nn.init, name)

    def runs(call: Call) -> tuple[Callable[[], Any], Callable[[], Any]]:
        def run(f: Any, weight: Callable[[], Any]) -> list[Any]:
            args, named = call.split(lambda n, value: weight() if n == "tensor" else value)
            return arrays_of(f(*args, **named))

        theirs = lambda: torch.zeros(3, 4, 5).as_subclass(Even)  # noqa: E731
        return lambda: run(torchs, theirs), lambda: run(ours, lambda: nn.Parameter(np.zeros((3, 4, 5), np.float32)))

    known = signatures(torchs)
    given = {"tensor": None, **GIVEN}
    faults = [fault for argument, others in parameters(known) for fault in
              check(name, argument, others, {n: given[n] for n in given if n in {p.name for p in others}
                                             and (n != "nonlinearity" or name == "calculate_gain")}, runs, False,
                    VALUES)]
    assert not faults, "\n".join(faults)
