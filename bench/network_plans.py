"""Out-of-order schedules of the networks for language, priced with measured costs: one device, data-parallel ranks and
pipelines. Costs are measured here, in single tasks; nothing else runs.

    python bench/network_plans.py [--only bert] [--out FILE.json]

Forms that fit a CPU: BERT and GPT of 12 layers, 128 wide, on 128 tokens; the RNN of 16 cells, 128 wide, on 64 tokens;
the FFNN of 12 layers of 1024. Links take 20 us and move 1 GB/s.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT)]

from common import machine, save

import minidl as ml
from minidl import schedulers
from minidl.pricing.collectives import Collective
from minidl.pricing.cost import Link
from minidl.schedulers import pipeline
from minidl.training.job import Job
from minidl.training.recorded import Recorded

SMALL = {"preset": "small", "layers": 12}
NETWORKS: dict[str, tuple[str, dict[str, Any], str]] = {
    "BERT-12": ("bert", SMALL, "pydoc"), "GPT-12": ("gpt", SMALL, "pydoc"),
    "RNN-16": ("rnn", SMALL | {"layers": 16}, "pydoc"), "FFNN-12": ("ffnn", {"layers": 12}, "digits")}
RANKS, MICRO_BATCHES, BATCH = 4, 4, 16
LINK = Link(20.0, 1000.0)  # microseconds, bytes per microsecond
DEVICE = ("in_order", "multi_stream", "multi_region")
DATA = ("barrier", "buckets", "priority", "reverse_first_k")
PIPELINES: tuple[tuple[str, int | None], ...] = (
    ("gpipe", None), ("one_f_one_b", None), ("zb_h1", None), ("fast_forward", None), ("modulo", 3),
    ("modulo_greedy", 3))


def step(network: str, **options: Any) -> Recorded:
    name, arguments, data = NETWORKS[network]
    return Recorded(Job(model=name, model_args=arguments, data=data, batch_size=BATCH, optimizer="adamw", lr=1e-3,
                        **options))


def priced(network: str) -> dict[str, Any]:
    """The period of a step in milliseconds under each scheduler."""
    found: dict[str, Any] = {}
    whole = step(network)
    cost = whole.with_pairs(whole.measure(), measured=True)
    found["one device"] = {name: ml.plan(whole.graph, name, cost).predicted_step_ms for name in DEVICE}
    collective = Collective(RANKS, LINK)
    ranks = ml.Machine(RANKS, collective=lambda sizes: collective.time(sum(sizes.values())))
    found["data-parallel"] = {
        name: ml.plan(whole.graph, name, replace(cost, corun=None, link=LINK), ranks).predicted_step_ms
        for name in DATA}
    parts = step(network, micro_batches=MICRO_BATCHES, parallel="pipeline", scheduler="gpipe")
    cost = replace(parts.measure(), link=LINK)
    found["pipelines"] = {
        name: pipeline.price(ml.plan(parts.graph, name, cost, ml.Machine(RANKS),
                                     **schedulers.find(name).known(chunks=chunks))).makespan / 1e3
        for name, chunks in PIPELINES}
    return {kind: {name: round(ms, 3) for name, ms in times.items()} for kind, times in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=NETWORKS, help="one network instead of all")
    parser.add_argument("--out", help="file for the record; default bench/results/network_plans.json")
    options = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "ranks": RANKS, "micro_batches": MICRO_BATCHES, "batch": BATCH,
                              "link": {"latency_us": LINK.latency, "bytes_per_us": LINK.bandwidth}, "networks": {}}
    for network in [options.only] if options.only else NETWORKS:
        record["networks"][network] = priced(network)
        for kind, times in record["networks"][network].items():
            first = next(iter(times.values()))
            print(f"{network}, {kind}: " + ", ".join(f"{name} {ms:.1f} ms ({first / ms:.2f}x)"
                                                     for name, ms in times.items()), flush=True)
    save("network_plans", record, options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
