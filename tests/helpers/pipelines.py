"""Short calls for plans of pipelines on given times, and for facts about policies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import minidl as ml
from minidl.core.tasks import parse_task
from minidl.schedulers import find, names, pipeline
from minidl.schedulers.pipeline import joint, refine, v_shape, zb_auto

POLICIES = {name: find(name).staged for name in names("pipeline")}


def little_effort(monkeypatch: Any) -> None:
    """Searches try few candidates from here on."""
    for module, effort in ((v_shape, 5_000), (refine, 5_000), (zb_auto, 1e4), (joint, 1e4)):
        monkeypatch.setattr(module, "EFFORT", effort)


def swapped(schedule: ml.Schedule, a: str, b: str) -> ml.Schedule:
    """The schedule with two tasks exchanged. It is not validated."""
    keys, at = schedule.keys.copy(), [schedule.keys.tolist().index(parse_task(name)) for name in (a, b)]
    keys[at] = keys[at[::-1]]
    return replace(schedule, keys=keys, slots=None)


def policy(name: str | pipeline.Policy) -> pipeline.Policy:
    return POLICIES[name] if isinstance(name, str) else name


def place(name: str | pipeline.Policy, ranks: int, chunks: int | None = None) -> pipeline.Placement:
    return policy(name).place(ranks, chunks)


def plan(name: str | pipeline.Policy, ranks: int, micro_batches: int, cost: ml.CostModel | None = None,
         chunks: int | None = None, activation_cap: float | None = None, message_bytes: int = 0,
         **options: Any) -> pipeline.PipelinePlan:
    """The policy's plan; `cost`: per stage, by default all times 1."""
    return ml.plan(pipeline.Pipeline(micro_batches, message_bytes=message_bytes), name, cost,
                   ml.Machine(ranks, activation_cap=activation_cap), chunks=chunks, **options)


def read_plan(schedule: ml.Schedule, ranks: int, micro_batches: int, chunks: int | None = None,
              cap: float | None = None, like: pipeline.PipelinePlan | None = None) -> pipeline.PipelinePlan:
    """The plan of a given order."""
    return ml.plan(pipeline.Pipeline(micro_batches), schedule, None, ml.Machine(ranks, activation_cap=cap),
                   chunks=chunks, like=like)


def groups(name: str) -> int:
    """The groups of micro-batches whose sums a run under this scheduler, of any kind, keeps apart."""
    return POLICIES[name].groups if name in POLICIES else 1
