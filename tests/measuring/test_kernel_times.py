"""`minidl kernels`: kernels are checked against their references, and timed; a wrong one is found."""

from __future__ import annotations

import math

import numpy as np
import pytest
from command_line import refusal, reported, shown

from minidl.cli import main
from minidl.cli.kernels import families
from minidl.devices import device as devices
from minidl.kernels import KERNELS
from minidl.measuring import kernel_times


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, value in (("ROWS", 64), ("SIDE", 64)):
        monkeypatch.setattr(kernel_times, name, value)


@pytest.mark.parametrize("name", kernel_times.EXAMPLES)
def test_every_example_is_right_and_is_timed(name):
    found = kernel_times.timing(devices.get("cpu"), name, 1e4)
    assert found.right
    assert found.error < 1e-6
    assert 0 < found.launch_us <= found.us
    assert found.gbs > 0
    assert found.share > 0
    assert math.isfinite(found.share)


def test_a_launch_takes_the_median_of_its_runs(monkeypatch):
    """The first run, which may load something, does not count."""
    now, lengths = [100.0], iter([9.0] + [1.0, 2.0, 8.0] * 50)

    def run():
        now[0] += next(lengths)

    monkeypatch.setattr(kernel_times, "perf_counter", lambda: now[0])
    monkeypatch.setattr(kernel_times, "RUNS", 3)
    assert kernel_times._median(run) == 2e6


def test_figures_follow_from_bytes_flops_and_time(monkeypatch):
    monkeypatch.setattr(kernel_times.Rolled, "time", lambda self: self.bytes / 100.0)
    found = kernel_times.timing(devices.get("cpu"), "linear", 1e3, rows=16)
    nbytes, flops = 4 * (16 * 512 + 512 * 512 + 512 + 16 * 512), KERNELS["linear"].flops(
        [np.empty((16, 512)), np.empty((512, 512)), np.empty(512)], [np.empty((16, 512))])
    us = nbytes / 100.0
    assert (found.us, found.gbs) == (us, 0.1)
    assert found.gflops == flops / us / 1e3
    assert found.share == max(1.0, flops / 1e3 / us)


def test_a_wrong_kernel_is_found(monkeypatch, capsys):
    right = KERNELS["gelu"]._cpu
    monkeypatch.setattr(KERNELS["gelu"], "_cpu", lambda x, y: [*right(x, y), lambda: np.multiply(y, 1.001, out=y)])
    found = reported(capsys, "kernels", "gelu", "--device", "cpu", code=1)["kernels"]
    by_name = {t["kernel"]: t for t in found}
    assert by_name["gelu"]["right"] is False
    assert by_name["gelu"]["error"] == pytest.approx(0.001, rel=0.01)
    assert by_name["gelu_grad"]["right"] is True
    # an output that stays empty is wrong too
    monkeypatch.setattr(KERNELS["gelu"], "_cpu", lambda x, y: [lambda: y.fill(np.nan)])
    assert main(["kernels", "gelu", "--device", "cpu"]) == 1
    assert "inf WRONG" in capsys.readouterr().out


def test_all_families_are_listed(capsys):
    listed = reported(capsys, "kernels")["families"]
    assert [f["family"] for f in listed] == [*families()]
    assert {k["kernel"] for f in listed for k in f["kernels"]} >= kernel_times.EXAMPLES.keys()
    assert all(f["about"] for f in listed)
    assert "layer_norm" in shown(capsys, "kernels")


@pytest.mark.parametrize(("argv", "says"), [
    (["gellu"], "unknown kernel or family 'gellu'; similar names: gelu"), (["dither"], "dither has no example to time"),
    (["gelu", "--ranks", "2"], "--ranks has no effect on `minidl kernels`")])
def test_what_cannot_be_timed_is_one_line(argv, says, capsys):
    assert says in refusal(capsys, "kernels", *argv)
