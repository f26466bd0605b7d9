"""docs/from_torch.md: its Python runs as it is written, and the names in its table exist."""

from __future__ import annotations

import re

import numpy as np
import pytest
from helpers import ROOT, torch_or_skip

import minidl as ml
from minidl import nn, ops, optim
from minidl.autograd.hints import absent

TEXT = (ROOT / "docs" / "from_torch.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
ROWS = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| ")][2:]


def test_the_examples_run() -> None:
    torch_or_skip()
    assert len(BLOCKS) >= 5
    scope: dict[str, object] = {"__name__": "from_torch"}
    for block in BLOCKS:
        exec(block, scope)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_names_of_the_table_exist(row: list[str]) -> None:
    assert len(row) == 2, row
    for prefix, where in (("ml", ml), ("nn", nn), ("optim", optim), ("nn.functional", nn.functional)):
        for name in re.findall(rf"\b{prefix}\.(\w+)", row[1]):
            assert hasattr(where, name), f"{prefix}.{name}"
    if "the same" in row[1]:  # then what torch has is here, too
        first, *rest = re.findall(r"`([^`]+)`", row[0])
        home = {"torch": ml, "nn": nn, "optim": optim, "x": ml.Tensor}.get(first.partition(".")[0])
        for name in (first, *rest):
            bare = name.partition(".")[2] or name
            if home and (word := re.match(r"\w+$", re.sub(r"\(.*", "", bare))):
                assert hasattr(home, word[0]) or word[0] in ("to", "size", "cpu"), f"{name} is not in {home}"


#: functions behind layers, of backends, of quantized and sparse numbers, of sizes that are symbols, and copies of views
BACKEND = re.compile(
    r".*_copy|(fbgemm|miopen|native|sym|quantized?|fake_quantize|fused|choose|batch_norm|grid_sampler|norm_except)_\w+"
    r"|affine_grid_generator|grid_sampler|(gru|lstm|rnn_relu|rnn_tanh)(_cell)?|[dhs]smm|hspmm|saddmm|spmm")


def test_every_public_name_of_torch_is_here_or_in_the_tables_of_what_is_absent() -> None:
    """Layers, functions and optimizers, and the functions of torch; the public ones are those that torch lets others
    override. Some of these are its backends' own."""
    torch = torch_or_skip()
    known, table = torch.overrides.get_testing_overrides(), absent()
    rows = (ROOT / "minidl" / "autograd" / "absent.md").read_text().splitlines()
    assert [row for row in rows if row.startswith("| `") and row not in TEXT] == [], "put these rows on the page"
    rooms = {"nn": (nn, torch.nn, lambda name, value: isinstance(value, type)),
             "F": (nn.functional, torch.nn.functional, lambda name, value: callable(value) and (
                 value in known or name[-1] == "_")),
             "optim": (optim, torch.optim, lambda name, value: isinstance(value, type) or name == "lr_scheduler")}
    for room, (mine, theirs, public) in rooms.items():
        lacking = {f"{room}.{name}" for name in dir(theirs) if name[0] != "_" != name[-1]
                   and name not in mine.__all__ and public(name, getattr(theirs, name))}
        named = {name for name in table if name.startswith(f"{room}.")}
        assert lacking - named == set()
        assert {name for name in named if (bare := name.partition(".")[2]) in mine.__all__
                or not hasattr(theirs, bare)} == set()

    def here(name: str) -> bool:
        return any(hasattr(room, name) for room in (ml.Tensor, ml, nn.functional))

    used = {name for name in dir(torch) if name[0] != "_" != name[-1] and callable(value := getattr(torch, name))
            and value in known and not BACKEND.fullmatch(name)}
    named = {name for name in table if "." not in name}
    assert {name for name in used if not here(name) and f"F.{name}" not in table} - named == set()
    assert {name for name in named if here(name) or not hasattr(torch, name)} == set()


def test_what_the_tables_say_to_write_is_what_torch_computes() -> None:
    torch = torch_or_skip()
    x, y, var = (ml.array(np.random.default_rng(i).uniform(0.1, 1.0, (3, 4, 4, 2))) - 0.3 * (i == 0) for i in range(3))
    sign = ml.array(np.where(y.numpy() > 0.5, 1.0, -1.0))
    ours = {**{n: getattr(nn.functional, n) for n in nn.functional.__all__}, "where": ml.where, "einsum": ml.einsum,
            "ops": ops, "x": x, "lambd": 0.3, "threshold": 0.2, "value": -1.0, "margin": 0.4, "var": var, "k": 2,
            "p": 3, "x1": x, "x2": var}
    F, t, s = torch.nn.functional, torch.tensor(x.numpy()), torch.tensor(sign.numpy())
    u, v = torch.tensor(y.numpy()), torch.tensor(var.numpy())
    for key, wanted, other in (
            ("hardshrink", F.hardshrink(t, 0.3), y), ("softshrink", F.softshrink(t, 0.3), y),
            ("tanhshrink", F.tanhshrink(t), y), ("threshold", F.threshold(t, 0.2, -1.0), y),
            ("rrelu", F.rrelu(t), y), ("soft_margin_loss", F.soft_margin_loss(
                t, s, reduction="none"), sign),
            ("gaussian_nll_loss", F.gaussian_nll_loss(t, u, v, reduction="none"), y),
            ("poisson_nll_loss", F.poisson_nll_loss(t, u, reduction="none"), y),
            ("hinge_embedding_loss", F.hinge_embedding_loss(t, s, 0.4, reduction="none"), sign),
            ("margin_ranking_loss", F.margin_ranking_loss(t, v, s, 0.4, reduction="none"), sign)):
        found = eval(absent()[f"F.{key}"].partition(", its")[0], ours | {"y": other})
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-5, atol=1e-6, err_msg=key)
    pooled = eval(absent()["F.lp_pool2d"].partition(", to")[0], ours | {"x": y}) ** (1 / 3)
    np.testing.assert_allclose(pooled.numpy(), F.lp_pool2d(u.permute(0, 3, 1, 2), 3, 2).permute(0, 2, 3, 1).numpy())
    flat = {"x": x[0, 0], "y": y[0, 0], "weight": var[0]}
    np.testing.assert_allclose(eval(absent()["F.bilinear"], ours | flat | {"weight": var[0].permute(1, 0, 2)[:, :2]}
                                    ).numpy(), F.bilinear(t[0, 0], u[0, 0], v[0].permute(1, 0, 2)[:, :2]).numpy())
