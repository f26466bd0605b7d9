"""The networks again in JAX, as plain functions of a dict of our state's arrays: what `strongest` compares with.

A network is `forward(p, x, new, drop)`: `p` the arrays by name, filters as (h, w, inputs, outputs); `x` a batch, images
channels last; it writes running statistics into `new`; `drop` is its dropout. Importing needs JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, nn

STATES = "running_mean", "running_var", "num_batches_tracked"  #: the last words of names that are not trained
Forward = Callable[[dict[str, Any], Any, dict[str, Any], Callable[[Any], Any]], Any]


def linear(p: Any, name: str, x: Any) -> Any:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def conv(p: Any, name: str, x: Any, stride: int = 1, padding: int | None = None) -> Any:
    """Square filters; by default the border keeps the size. As many groups as the filters' inputs say."""
    w = p[f"{name}.weight"]
    border = (w.shape[0] // 2 if padding is None else padding,) * 2
    y = lax.conv_general_dilated(x, w, (stride, stride), (border, border), dimension_numbers=("NHWC", "HWIO", "NHWC"),
                                 feature_group_count=x.shape[-1] // w.shape[2])
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def up(p: Any, name: str, x: Any) -> Any:
    """A transposed convolution whose windows touch and do not overlap."""
    w = p[f"{name}.weight"]
    n, h, v, _ = x.shape
    y = jnp.einsum("nhwc,aboc->nhawbo", x, w)
    return y.reshape(n, h * w.shape[0], v * w.shape[1], w.shape[2]) + p[f"{name}.bias"]


def pool(x: Any) -> Any:
    n, h, w, c = x.shape
    return x.reshape(n, h // 2, 2, w // 2, 2, c).max((2, 4))


def batch_norm(p: Any, new: Any, name: str, x: Any, eps: float = 1e-5, momentum: float = 0.1) -> Any:
    axes = tuple(range(x.ndim - 1))
    mean, var, count = x.mean(axes), x.var(axes), x.size // x.shape[-1]
    for key, value in (("running_mean", mean), ("running_var", var * (count / max(1, count - 1)))):
        new[f"{name}.{key}"] = (1 - momentum) * p[f"{name}.{key}"] + momentum * lax.stop_gradient(value)
    return (x - mean) * (lax.rsqrt(var + eps) * p[f"{name}.weight"]) + p[f"{name}.bias"]


def layer_norm(p: Any, name: str, x: Any, eps: float = 1e-5) -> Any:
    mean = x.mean(-1, keepdims=True)
    centred = x - mean
    return centred * lax.rsqrt((centred * centred).mean(-1, keepdims=True) + eps) * p[f"{name}.weight"] + p[
        f"{name}.bias"]


def attention(q: Any, k: Any, v: Any, heads: int, **mask: Any) -> Any:
    n, t, width = q.shape
    q, k, v = (a.reshape(n, t, heads, width // heads) for a in (q, k, v))
    return nn.dot_product_attention(q, k, v, **mask).reshape(n, t, width)


# ------------------------------------------------------------------------------------------------------------- networks
def mlp(p: Any, x: Any, new: Any, drop: Any) -> Any:
    depth = sum(name.endswith(".weight") for name in p)
    for i in range(depth):
        x = linear(p, f"layer{i}", nn.relu(x) if i else x)
    return x


def norms(p: Any, x: Any, new: Any, drop: Any) -> Any:
    for i in range(sum(name.startswith("norms") and name.endswith(".weight") for name in p)):
        x = nn.gelu(layer_norm(p, f"norms.{i}", linear(p, f"layers.{i}", x)), approximate=False)
    return linear(p, "head", x)


def lenet(p: Any, x: Any, new: Any, drop: Any) -> Any:
    x = pool(nn.relu(conv(p, "conv1", x)))
    x = pool(nn.relu(conv(p, "conv2", x, padding=0)))
    x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
    return linear(p, "fc3", nn.relu(linear(p, "fc2", nn.relu(linear(p, "fc1", x)))))


def vgg(p: Any, x: Any, new: Any, drop: Any) -> Any:
    for i in range(6):
        x = nn.relu(conv(p, f"convs.{i}", x))
        x = pool(x) if i % 2 else x
    return linear(p, "head", drop(nn.relu(linear(p, "hidden", x.mean((1, 2))))))


def unet(p: Any, x: Any, new: Any, drop: Any) -> Any:
    def both(i: int, x: Any) -> Any:
        return nn.relu(conv(p, f"second.{i}", nn.relu(conv(p, f"first.{i}", x))))

    fine = both(0, x)
    middle = both(1, pool(fine))
    coarse = both(2, pool(middle))
    x = both(3, jnp.concatenate([middle, up(p, "up.0", coarse)], -1))
    return conv(p, "head", both(4, jnp.concatenate([fine, up(p, "up.1", x)], -1))).reshape(-1, 10)


def resnet20(p: Any, x: Any, new: Any, drop: Any) -> Any:
    x = nn.relu(batch_norm(p, new, "bn1", conv(p, "conv1", x)))
    for stage in (1, 2, 3):
        for block in range(3):
            name, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            y = nn.relu(batch_norm(p, new, f"{name}.bn1", conv(p, f"{name}.conv1", x, stride)))
            y = batch_norm(p, new, f"{name}.bn2", conv(p, f"{name}.conv2", y))
            if f"{name}.downsample.0.weight" in p:
                x = batch_norm(p, new, f"{name}.downsample.1", conv(p, f"{name}.downsample.0", x, stride))
            x = nn.relu(x + y)
    return linear(p, "fc", x.mean((1, 2)))


def mobilenet(p: Any, x: Any, new: Any, drop: Any) -> Any:
    from minidl.models.mobilenet import BLOCKS

    def unit(name: str, x: Any, stride: int = 1) -> Any:
        return batch_norm(p, new, f"{name}.1", conv(p, f"{name}.0", x, stride), 1e-3, 0.01)

    x = nn.hard_swish(unit("features.0", x, 2))
    for i, (_, _, _, excite, swish, stride) in enumerate(BLOCKS, 1):
        name, act = f"features.{i}.block", nn.hard_swish if swish else nn.relu
        units, y = sum(f"{name}.{j}.0.weight" in p for j in range(4)), x
        for j in range(units - 1):
            y = act(unit(f"{name}.{j}", y, stride if j == units - 2 else 1))
        if excite:
            means = y.mean((1, 2), keepdims=True)
            squeezed = nn.relu(conv(p, f"{name}.{units - 1}.fc1", means))
            y = y * nn.hard_sigmoid(conv(p, f"{name}.{units - 1}.fc2", squeezed))
        y = unit(f"{name}.{units - 1 + excite}", y)
        x = x + y if x.shape == y.shape else y
    x = nn.hard_swish(unit(f"features.{len(BLOCKS) + 1}", x)).mean((1, 2))
    return linear(p, "classifier.3", nn.hard_swish(linear(p, "classifier.0", x)))


def recurrent(kind: str) -> Forward:
    """`kind`: LSTM or GRU, with torch's order of gates; the input product of all steps comes first."""

    def forward(p: Any, x: Any, new: Any, drop: Any) -> Any:
        w, b = p["layer.weight_hh_l0"], p["layer.bias_hh_l0"]
        gx = x @ p["layer.weight_ih_l0"].T + p["layer.bias_ih_l0"]
        h = jnp.zeros((x.shape[1], w.shape[1]), x.dtype)

        def lstm(state: Any, gx: Any) -> Any:
            h, c = state
            i, f, g, o = jnp.split(gx + h @ w.T + b, 4, -1)
            c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
            return (nn.sigmoid(o) * jnp.tanh(c), c), None

        def gru(h: Any, gx: Any) -> Any:
            (xr, xz, xn), (hr, hz, hn) = jnp.split(gx, 3, -1), jnp.split(h @ w.T + b, 3, -1)
            z = nn.sigmoid(xz + hz)
            return (1 - z) * jnp.tanh(xn + nn.sigmoid(xr + hr) * hn) + z * h, None

        last = lax.scan(lstm, (h, h), gx)[0][0] if kind == "LSTM" else lax.scan(gru, h, gx)[0]
        return linear(p, "head", last)

    return forward


def gpt(heads: int) -> Forward:
    def forward(p: Any, ids: Any, new: Any, drop: Any) -> Any:
        def product(name: str, x: Any) -> Any:
            return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

        table = p["transformer.wte.weight"]
        x, i = table[ids] + p["transformer.wpe.weight"][:ids.shape[1]], 0
        while (name := f"transformer.h.{i}") + ".ln_1.weight" in p:
            q, k, v = jnp.split(product(f"{name}.attn.c_attn", layer_norm(p, f"{name}.ln_1", x)), 3, -1)
            x = x + product(f"{name}.attn.c_proj", attention(q, k, v, heads, is_causal=True))
            y = nn.gelu(product(f"{name}.mlp.c_fc", layer_norm(p, f"{name}.ln_2", x)), approximate=True)
            x, i = x + product(f"{name}.mlp.c_proj", y), i + 1
        return layer_norm(p, "transformer.ln_f", x) @ table.T

    return forward


def bert(heads: int) -> Forward:
    def forward(p: Any, ids: Any, new: Any, drop: Any) -> Any:
        norm, table = partial(layer_norm, eps=1e-12), p["bert.embeddings.word_embeddings.weight"]
        x = (table[ids] + p["bert.embeddings.token_type_embeddings.weight"][0]
             + p["bert.embeddings.position_embeddings.weight"][:ids.shape[1]])
        x, mask, i = norm(p, "bert.embeddings.LayerNorm", x), (ids != 0)[:, None, None, :], 0
        while (name := f"bert.encoder.layer.{i}") + ".output.dense.weight" in p:
            own = (linear(p, f"{name}.attention.self.{part}", x) for part in ("query", "key", "value"))
            y = linear(p, f"{name}.attention.output.dense", attention(*own, heads, mask=mask))
            x = norm(p, f"{name}.attention.output.LayerNorm", x + y)
            y = nn.gelu(linear(p, f"{name}.intermediate.dense", x), approximate=False)
            x, i = norm(p, f"{name}.output.LayerNorm", x + linear(p, f"{name}.output.dense", y)), i + 1
        x = nn.gelu(linear(p, "cls.predictions.transform.dense", x), approximate=False)
        return norm(p, "cls.predictions.transform.LayerNorm", x) @ table.T + p["cls.predictions.bias"]

    return forward


# ----------------------------------------------------------------------------------------------------------------- step
def arrays(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is trained, and what is not, of our state: filters turned as `conv` takes them."""
    made = {name: jnp.array(a.transpose(2, 3, 1, 0) if a.ndim == 4 else a) for name, a in state.items()}
    return ({name: a for name, a in made.items() if not name.endswith(STATES)},
            {name: a for name, a in made.items() if name.endswith(STATES)})


def train_step(forward: Forward, adamw: bool, dropout: float) -> Callable[..., Any]:
    """`step(p, states, moments, n, rate, x, y)` -> (p, states, moments, loss), to be compiled with donated buffers:
    AdamW, or SGD with momentum, with torch's constants. `n`: the number of the step, from 1 on."""

    def step(p: Any, states: Any, moments: Any, n: Any, rate: Any, x: Any, y: Any) -> Any:
        def drop(a: Any) -> Any:
            if not dropout:
                return a
            keep = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), n), 1 - dropout, a.shape)
            return jnp.where(keep, a / (1 - dropout), 0)

        def loss_of(p: Any) -> Any:
            new: dict[str, Any] = dict(states)
            logits = forward({**p, **states}, x, new, drop)
            chosen = jnp.take_along_axis(nn.log_softmax(logits.reshape(-1, logits.shape[-1])), y.reshape(-1, 1), 1)
            return -chosen.mean(), new

        (loss, new), grads = jax.value_and_grad(loss_of, has_aux=True)(p)
        if adamw:
            first, second = moments
            first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
            second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, grads)
            size, root = rate / (1 - 0.9 ** n), jnp.sqrt(1 - 0.999 ** n)
            p = jax.tree.map(lambda p, m, v: p * (1 - rate * 0.01) - size * m / (jnp.sqrt(v) / root + 1e-8),
                             p, first, second)
            return p, new, (first, second), loss
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, moments[0], grads)
        return jax.tree.map(lambda p, v: p - rate * v, p, velocity), new, (velocity,), loss

    return step
