"""`plan --curve`: points that nothing beats, each with the command that makes it; as table, JSON, picture and page."""

from __future__ import annotations

import json
import shlex
import xml.etree.ElementTree as ElementTree
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from browser import browser, opened
from command_line import reported, run, run_json, shown

NETWORK = ["--model", "mlp", "--model-arg", "hidden=32", "--model-arg", "layers=6", "--batch-size", "64", "--costs",
           "analytic"]
SMALL = ["--model", "mlp", "--model-arg", "hidden=32", "--model-arg", "layers=4", "--costs", "analytic"]
PIPELINE = ["--model", "gpt", "--model-arg", "preset=tiny", "--batch-size", "8", "--costs", "analytic", "--parallel",
            "pipeline", "--ranks", "2", "--micro-batches", "4"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    [*NETWORK, "--scheduler", "in_order"], SMALL,
    [*NETWORK, "--parallel", "data", "--ranks", "2", "--scheduler", "barrier"],
    [*PIPELINE, "--scheduler", "zb_h1"], [*PIPELINE, "--scheduler", "pipedream_2bw"]],
    ids=["in_order", "all of one device", "data", "zb_h1", "stale"])
def test_no_point_is_beaten_and_each_command_makes_its_plan(capsys: Any, tmp_path: Path, monkeypatch: Any,
                                                            flags: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    code, record = run_json(capsys, "plan", *flags, "--curve")
    points = record["curve"]
    assert code == 0
    assert all(a["peak_bytes"] < b["peak_bytes"] and a["step_ms"] >= b["step_ms"] for a, b in pairwise(points))
    assert record["smallest_limit"] == points[0]["peak_bytes"]
    for how in ("none", "all", "sqrt") if "pipedream_2bw" not in flags else ("none",):
        known = reported(capsys, "plan", *flags, "--recompute", how)
        assert any(p["peak_bytes"] <= known["peak_bytes"] and p["step_ms"] <= known["predicted_step_ms"]
                   for p in points)
    for point in points:
        made = reported(capsys, *shlex.split(point["command"])[1:])
        assert (made["peak_bytes"], made["predicted_step_ms"]) == (point["peak_bytes"], point["step_ms"])
        assert made["activation_peak_bytes"] == point["activation_peak_bytes"]
    assert Path("plan.csv").read_text().count("rank,lane,task") == 1


def test_the_curve_as_a_table_a_picture_and_a_page(capsys: Any, tmp_path: Path) -> None:
    svg, html = tmp_path / "curve.svg", tmp_path / "curve.html"
    flags = ["plan", *SMALL, "--scheduler", "in_order", "--curve"]
    points = reported(capsys, *flags)["curve"]
    assert len(points) > 2
    out = shown(capsys, *flags, "--svg", str(svg), "--html", str(html))
    assert all(f"{p['peak_bytes']:,}" in out and p["choice"] in out for p in points)
    assert "--curve" not in out.splitlines()[-1]
    drawn = ElementTree.fromstring(svg.read_text())
    titles = [t.text for t in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert [p["choice"] for p in points] == [t.partition(":")[0] for t in titles[1:]]
    page = html.read_text()
    data = json.loads(page.partition('type="application/json" id="data">')[2].partition("</script>")[0])
    assert [p["title"] for p in data["plans"]] == [p["choice"] for p in points]
    assert [p["command"] for p in data["figures"]["curve"]] == [
        p["command"] for p in points]


def test_kept_layers_can_be_ranges(capsys: Any) -> None:
    flags = ["plan", *NETWORK, "--recompute"]
    assert reported(capsys, *flags, "3-5,9") == reported(capsys, *flags, "3,4,5,9")
    for wrong in ("5-3", "3-99", "3-", "-", ""):
        code, _, err = run(capsys, *flags, wrong)
        assert code == 2
        assert f"there is no layer '{wrong}' to keep" in err


@pytest.mark.slow
def test_a_point_of_the_page_shows_its_plan_and_its_command(capsys: Any, tmp_path: Path) -> None:
    html = tmp_path / "curve.html"
    flags = ["plan", *NETWORK, "--scheduler", "in_order", "--curve"]
    with browser() as running, ExitStack() as tabs:
        points = reported(capsys, *flags, "--html", str(html))["curve"]
        tab = tabs.enter_context(opened(running, html, ready="window.page"))
        dots = tab.locator("#curves circle")
        assert dots.count() == len(points)
        for i in (1, len(points) - 1):
            dots.nth(i).click()
            said = tab.locator("#command-of code").inner_text()
            assert shlex.split(said)[-6:-2] == shlex.split(points[i]["command"])[-6:-2]
            assert tab.locator("#plan").input_value() == str(i)
            assert tab.locator("#curves circle.on").count() == 1
        dots.nth(0).focus()
        tab.keyboard.press("Enter")
        assert tab.locator("#plan").input_value() == "0"
