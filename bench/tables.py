"""docs/results.md, made from the records in `bench/results/`.

    python bench/tables.py            prints the page
    python bench/tables.py --write    writes it

Its pictures are drawn by `bench/plots.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

from batch_size import paying
from common import RESULTS
from ladder_table import brief, said
from launches import said as launch_said
from learning import rows as learning
from single_device import TORCH
from spectrum import said as spectrum_said
from stale import accuracies
from strongest import TARGETS
from tradeoff import rows as tradeoff_rows

SHARDS = {"whole": "plain buckets", "gradients": "gradients in shards", "parameters": "parameters in shards",
          "within": "parameters in shards, within torch's peak", "searched": "shards as the search finds",
          "torch": "torch's fully_shard"}
RUN_AS = {"one device": "one device", "data": "two data-parallel ranks", "pipeline": "a pipeline on two ranks",
          "all": "all"}
SHOWN = 0.03  #: the least share of a step that a kernel family needs to be in the table of floors
PAGE = Path(__file__).parent.parent / "docs" / "results.md"
Row = tuple[str, str, str]  #: what was measured, what was seen, the target or "-"


def times(r: dict[str, float]) -> str:
    """A ratio with its spread."""
    return f"{r['median']:.2f}x ({r['p10']:.2f} to {r['p90']:.2f})"


def mlp(record: dict[str, Any]) -> Iterator[Row]:
    targets = {"16 x 64, batch 8": ">= 12x", "784-512-512-10, batch 64": ">= 1.0x", "8 x 1024, batch 256": "-"}
    for name, e in record["networks"].items():
        for key, value in e.items():
            if key.startswith("against torch"):
                yield (f"MLP {name}: {key.removeprefix('against ')} / minidl in order", times(value),
                       targets[name] if "eager" in key else "-")
        if name.startswith("8 x"):
            yield (f"MLP {name}: one stream / two streams", times(e["two_streams_against_one"]),
                   ">= 1.3x, ideal 1.41x")
            both = e["step_ms"]["minidl in_order"]["median"] / e["step_ms"]["one stream, two BLAS threads"]["median"]
            yield f"MLP {name}: one stream / one stream with two BLAS threads", f"{both:.2f}x", "-"
        if "overhead_us_per_task" in e:
            yield ("a task beyond its kernel calls, one lane",
                   f"{e['overhead_us_per_task']['median']:.2f} us", "<= 0.2 us")
        errors = ", ".join(f"{k} {v['median']:+.1%} (worst {v['worst']:+.1%})"
                           for k, v in e["prediction_error"].items())
        yield f"MLP {name}: predicted against measured step", errors, "5 %, two streams 10 %"


def lanes(record: dict[str, Any]) -> Iterator[Row]:
    for name, e in record["networks"].items():
        for policy in ("in_order", "multi_stream"):
            yield (f"{name}, {policy}: Python lanes / native lanes", times(e[f"python / native, {policy}"]),
                   f">= {e['target']}x" if policy == "in_order" else ">= 1.0x")
        yield (f"{name}, in_order: a traced step / one without a trace", times(e["traced / untraced, in_order"]),
               "<= 1.02x")


def cnn(record: dict[str, Any]) -> Iterator[Row]:
    for name, e in record["networks"].items():
        yield (f"{name}, batch {e['batch']}: minidl / torch channels-last", times(e["ratio"]),
               f"<= {e['target']}x")
        error = e["prediction_error"]["in_order"]
        yield (f"{name}, batch {e['batch']}: predicted against measured step",
               f"{error['median']:+.1%} (worst {error['worst']:+.1%})", "5 %")


def language(record: dict[str, Any]) -> Iterator[Row]:
    for name, e in record["networks"].items():
        yield f"{name}: 4 layers of 128, 8 x 128 tokens: minidl / torch eager", times(e["ratio"]), "<= 1.2x"


def recurrent(record: dict[str, Any]) -> Iterator[Row]:
    for name, e in record["networks"].items():
        yield f"{name}: 28 steps of 28 to 128, batch {e['batch']}: minidl / torch eager", times(e["ratio"]), "<= 0.85x"


def network_plans(record: dict[str, Any]) -> Iterator[Row]:
    for name, kinds in record["networks"].items():
        for kind, times in kinds.items():
            first, *others = times
            yield (f"{name}, {kind}: {first} / others",
                   "; ".join(f"{other} {times[first] / times[other]:.2f}x" for other in others), "-")


def messages(record: dict[str, Any]) -> Iterator[Row]:
    for row in record["only_new"]:
        yield (f"{row['network']}, {row['scheduler']}, {row['ranks']} ranks of {row['chunks']}: bytes with only_new",
               "; ".join(f"{what} {row['after'][key] / row['before'][key]:.2f}x" for key, what in (
                   ("forward", "forward"), ("backward", "backward"), ("peak_bytes", "the peak"))), "-")
    for row in (*record["fill"], *record["prefetch"]):
        for name, arm in [*row["arms"].items()][1:]:
            first, seen = next(iter(row["arms"].items())), ""
            if "step_ms" in arm:
                seen = f"; measured {times(arm['times_faster'])}, {first[1]['waits']:.1%} -> {arm['waits']:.1%}"
            yield (f"{row['scheduler']}, {row['ranks']} ranks: {first[0]} / {name}; waits",
                   f"predicted {first[1]['predicted_ms'] / arm['predicted_ms']:.2f}x, "
                   f"{first[1]['predicted_waits']:.1%} -> {arm['predicted_waits']:.1%}{seen}", "-")


def wide(record: dict[str, Any]) -> Iterator[Row]:
    for name, e in record["networks"].items():
        arm = min(("multi_stream", "widths chosen"), key=lambda arm: e["step_ms"][arm]["median"])
        off = e["predicted_ms"]["widths chosen"] / e["step_ms"]["widths chosen"]["median"] - 1
        yield (f"{name}, tasks of {e['task_us']:.0f} us: one lane / two lanes", times(e[f"in_order / {arm}"]),
               ">= 1.6x" if e["task_us"] > 200 else ">= 1.0x")
        yield f"{name}, widths chosen: predicted / measured step, less 1", f"{off:+.1%}", "15 %, median 8 %"


def wide_torch(record: dict[str, Any]) -> Iterator[Row]:
    for name, e in record["networks"].items():
        yield f"{name}: minidl / torch, two threads each", times(e["minidl / torch"]), "<= 1.0x"


def cores(record: dict[str, Any]) -> Iterator[Row]:
    for name, e in record["networks"].items():
        for arms, target in (("one lane / one thread", 0.85 if "gpt" not in name else 1.0),
                             ("two lanes / two threads", 1.0)):
            yield f"{name}: minidl, {arms} of torch", times(e[arms]), f"<= {target:g}x"
    for name, e in record["busy cores"].items():
        yield f"{name}, busy cores: two lanes / one lane", times(e["two lanes / one lane"]), "<= 1.3x"


def strongest(record: dict[str, Any]) -> Iterator[Row]:
    for cores, name in (("1", "one core"), ("all", "all cores")):
        for network, kinds in record["networks"].items():
            if (entry := kinds.get(cores)) is None or entry["best"] is None:
                continue
            others = ", ".join(f"{peer} {over['median']:.2f}x" for peer, over in entry["over"].items()
                               if peer != entry["best"]) + "".join(f"; without {arm}" for arm in entry["left_out"])
            yield (f"{network}, {name}: {entry['ours']} / {entry['best']}",
                   f"{times(entry['over'][entry['best']])}; {others}", f"<= {TARGETS[cores][0]:g}x")
        if found := record["summary"].get(cores):
            yield (f"{name}: minidl / the best peer, median and worst",
                   f"{found['median']:.2f}x, {found['worst']:.2f}x", f"{TARGETS[cores][1]:g}x, {TARGETS[cores][0]:g}x")
    for network, kinds in record["networks"].items():
        if entry := kinds.get("1"):
            yield (f"{network}: seconds until the first step; planned peak of minidl",
                   ", ".join(f"{arm} {e['start_s']:.1f}" for arm, e in entry["arms"].items() if arm != "torch eager")
                   + f"; {entry['arms'][entry['ours']]['peak_bytes'] / 1e6:,.1f} MB", "-")


def floors(record: dict[str, Any]) -> Iterator[Row]:
    known = [kinds["floors"] for kinds in record["networks"].values() if "floors" in kinds]
    if known:
        peak, product = (statistics.median(found[key] for found in known) for key in ("peak_gflops", "product_gflops"))
        yield ("one core: fused multiply-adds on registers; a large product",
               f"{peak:.0f} GFLOP/s; {product:.0f} GFLOP/s, {product / peak:.0%}", "-")
    for network, kinds in record["networks"].items():
        if found := kinds.get("floors"):
            rows = [f"{family} {row['ms'] / found['ms']:.0%} of the step, {row['share']:.0%} of its floor"
                    for family, row in found["families"].items() if row["ms"] >= SHOWN * found["ms"]]
            yield f"{network}: {found['share']:.0%} of its floor", "; ".join(rows), "-"


def shares(record: dict[str, Any]) -> Iterator[Row]:
    for network, found in record["networks"].items():
        parts = [(f"{row['family']} ({row['floor_ms'] / row['ms']:.0%} of it its floor)", row["share"])
                 for row in found["families"] if row["ms"]]
        parts += [(f"no task: {cause}", row["share"]) for cause, row in found["waits"].items()]
        shown = sorted((part for part in parts if part[1] >= SHOWN), key=lambda part: -part[1])
        yield (f"{network}, {record['device']}, {found['scheduler']}: {found['ms']:.3g} ms traced, "
               f"{found['untraced_ms']:.3g} untraced", "; ".join(f"{share:.0%} {what}" for what, share in shown), "-")


def wide_scaling(record: dict[str, Any]) -> Iterator[Row]:
    for name, e in record["networks"].items():
        for arm, gains in e["speedup"].items():
            yield (f"{name}, {arm}: predicted gain over one core",
                   "; ".join(f"{cores} cores {gain:.2f}x" for cores, gain in gains.items() if cores != "1"), "-")


def planning(record: dict[str, Any]) -> Iterator[Row]:
    for c in record["cases"]:
        if (c["ranks"], c["micro_batches"]) in ((256, 1024), (1024, 4096)):
            target = "<= 10 s" if c["ranks"] == 256 else "<= 120 s, 12 GiB"
            yield (f"{c['scheduler']}, {c['ranks']} ranks, {c['micro_batches']} micro-batches: plan, prove, simulate",
                   f"{c['plan_validate_simulate_s']:.1f} s, {c['peak_gib']:.1f} GiB, "
                   f"{c['simulated_tasks_per_s'] / 1e6:.1f} M tasks/s simulated", target)


def planning_networks(record: dict[str, Any]) -> Iterator[Row]:
    for c in record["cases"]:
        what = "plan" if c["command"] == "plan" else "dry run with ranks as threads"
        ranks = f"{c['ranks']} ranks" if c["ranks"] > 1 else "one device"
        yield (f"{c['network']}, {ranks}: {what}, {c['tasks']:,} tasks",
               f"{c['s']:.1f} s, {c['peak_mib']} MiB", f"<= {c['most_s']} s")


def single_device(record: dict[str, Any]) -> Iterator[Row]:
    for name, e in record["networks"].items():
        gain = {arm: e["against"][f"in_order / {arm}"]
                for arm in ("multi_region", "multi_region, border kept", "published map", "multi_stream")}
        best, *others = gain
        yield (f"{name}: one stream / two", f"{best} {times(gain[best])}; "
               + "; ".join(f"{arm} {gain[arm]['median']:.2f}x" for arm in others), ">= 1.15x")
        if name in TORCH and "in_order / torch eager" in e["against"]:
            yield (f"{name}: minidl, one stream / torch",
                   f"eager {times(e['against']['in_order / torch eager'])}; compiled "
                   f"{e['against']['in_order / torch compiled']['median']:.2f}x",
                   f"<= {TORCH[name]:g}x")
    for streams, e in record["prediction"].items():
        yield (f"predicted against measured step, {streams}",
               f"{e['median']:.1%}, median over {e['n']} networks (worst {e['worst']:+.1%})",
               {"one stream": "5 %", "two streams": "10 %"}[streams])


def prediction(record: dict[str, Any]) -> Iterator[Row]:
    """The least step is the one that other work on the machine disturbed least."""
    for name, e in record["networks"].items():
        for arm, target in (("in_order", "10 %"), ("two lanes", "15 %")):
            found = e["prediction_error"][arm]
            yield (f"{name}, {arm}: predicted against measured step",
                   f"{found['median']['median']:+.1%} of the median (worst {found['median']['worst']:+.1%}), "
                   f"{found['least']['median']:+.1%} of the least", target)
        yield (f"{name}: chosen plan / best plan tried, measured",
               "; ".join(f"{arm} on {e['lanes'][arm]} lane{'s' * (e['lanes'][arm] > 1)} {over['median']:.2f}x "
                         f"(least steps {over['least']:.2f}x)" for arm, over in e["over_best"].items()), "<= 1.03x")


def predicted_steps(record: dict[str, Any]) -> Iterator[Row]:
    for kind, networks in record["runs"].items():
        for name, policies in networks.items():
            errors = (f"{policy} {e['error']:+.1%}{' *' * e['disturbed']}" for policy, e in policies.items())
            yield f"{name}, {RUN_AS[kind]}: printed / taken step, less 1", ", ".join(errors), "12 %"
    for kind, found in record["summary"].items():
        calm = record["summary_undisturbed"].get(kind)
        yield (f"{RUN_AS.get(kind, kind)}: size of the error", f"median {found['median']:.1%}, worst "
               f"{found['worst']:.1%} of {found['n']} runs" + (
                   f"; without disturbed ones {calm['median']:.1%}, {calm['worst']:.1%} of {calm['n']}"
                   if calm and calm["n"] < found["n"] else ""), "median 5 %, worst 12 %")


def memory(record: dict[str, Any]) -> Iterator[Row]:
    for name, e in record["networks"].items():
        peaks = e["peak_bytes"]
        same = all(p["planned"] == p["allocated"] for p in peaks.values())
        yield f"{name}: planned peak equals allocated peak", "yes, each arm" if same else "no", "to the byte"
        for arm in ("sqrt", "auto", "blocks"):
            share = peaks[arm]["activations"] / peaks["none"]["activations"]
            yield (f"{name}, {arm}: step / the plain step, with {share:.0%} of its activation peak",
                   times(e["against"][f"{arm} / none"]), "45 %, <= 1.35x" if (name, arm) == ("gpt", "sqrt") else "")
        yield (f"{name}: checkpointed blocks, minidl / torch", times(e["against"]["blocks / torch checkpoint"]),
               "<= 1.0x")


def memory_shards(record: dict[str, Any]) -> Iterator[Row]:
    for name, e in record["networks"].items():
        peaks, steps = e["peak_bytes"], e["step_ms"]
        for arm in ("whole", "gradients", "parameters", "within", "searched", "torch"):
            peak = peaks[arm].get("allocated", peaks[arm].get("tracked"))
            error = f"; {e['prediction_error'][arm]['median']:+.0%} predicted" if arm in e["prediction_error"] else ""
            yield (f"{name} on {e['ranks']} ranks, {SHARDS[arm]}: peak, step",
                   f"{peak / 1e6:.0f} MB, {steps[arm]['median']:.0f} ms{error}", "5 %" if error else "-")
        yield f"{name}: parameters in shards, minidl / torch", times(e["against"]["parameters / torch"]), "<= 1.0x"
        yield f"{name}: the same within torch's peak, minidl / torch", times(e["against"]["within / torch"]), "<= 1.0x"


def data_parallel(record: dict[str, Any]) -> Iterator[Row]:
    for s in record["settings"]:
        best = s["arms"]["reverse_first_k"]["speed_up_over_barrier"]
        buckets = s["arms"]["reverse_first_k"]["speed_up_over_buckets"]
        yield (f"two ranks, {s['network']}, communication / computation {s['ratio_wanted']:g}: "
               f"barrier / reverse first-{s['k']}",
               f"{times(best)}; over buckets {buckets['median']:.2f}x; ceiling {s['ceiling_over_barrier']:.2f}x", "-")


def pipeline_parallel(record: dict[str, Any]) -> Iterator[Row]:
    """A row for each setting: GPipe over the schedules, torch over ours, and the prediction errors."""
    for s in record["settings"]:
        deep = f" of {s['layers']} layers, {s['micro_batches']} micro-batches" if s.get("layers") else ""
        about = f"{s['ranks']} ranks, {s['network']}{deep}, {s['computation']}"
        gains = [f"{arm} {a['speed_up_over_gpipe']['median']:.2f}x" for arm, a in s["arms"].items() if arm != "gpipe"]
        yield f"{about}: gpipe / others", "; ".join(gains), "-"
        if s["torch"]:
            yield (f"{about}: torch.distributed.pipelining / minidl, same stages",
                   "; ".join(f"{arm.split(', ')[1]} {times(a['torch_over_minidl'])}" for arm, a in s["torch"].items()),
                   "> 1x")
        errors = [a["prediction_error"]["median"] for a in s["arms"].values()]
        apart = [a["bubble"] - a["bubble_predicted"] for a in s["arms"].values()]
        yield (f"{about}: predicted against measured step; bubble measured less predicted",
               f"median {statistics.median(map(abs, errors)):.1%}, worst {max(errors, key=abs):+.1%}; "
               f"{statistics.median(apart) * 100:+.1f} points, worst {max(apart, key=abs) * 100:+.1f}",
               "5 %; 2 points")


def hint(record: dict[str, Any]) -> Iterator[Row]:
    """A row for each arm of each setting: its step over the policy's own, measured and simulated."""
    for s in record["settings"]:
        about = f"{s['ranks']} ranks, {s['micro_batches']} micro-batches"
        for arm, words in (("fixed", "the order at the cap 2p - s"), ("hint", "a hint at the cap 2p - s"),
                           ("hint, own cap", "a hint at 1F1B's own cap")):
            a = s["arms"][arm]
            yield (f"{about}: {words} / 1F1B's order",
                   f"{times(a['measured_ratio'])}; simulated {a['simulated_ratio']['median']:.2f}x; step "
                   f"{a['off']:+.1%} off the simulated one", "<= 0.85x" if arm == "hint" else "-")


def group(record: dict[str, Any]) -> Iterator[Row]:
    """A row for each network and arm: how many times faster than the first arm."""
    for network, arms in record["networks"].items():
        first = next(iter(arms))
        for name, arm in arms.items():
            if name != first:
                about = f", {arm['groups']} groups" if arm["groups"] else ""
                yield f"{network}: {first} / {name}{about}", times(arm["faster"]), ">= 1.0x; 1.05x on one"


def exchanges(record: dict[str, Any]) -> Iterator[Row]:
    """A row for each arm of each setting: its step over the one in order, measured and predicted."""
    for s in record["settings"]:
        about = f"{s['ranks']} ranks, an exchange of {s['exchange']:g} experts"
        for arm, words in (("weights", "weight gradients hide exchanges"), ("two_batches", "two halves in turn")):
            a = s["arms"][arm]
            yield (f"{about}: {words} / in order",
                   f"{times(a['measured_ratio'])}; predicted {a['predicted_ratio']:.2f}x; step {a['off']:+.1%} off the "
                   f"predicted one", "<= 0.80x, within 5 %" if (s["ranks"], s["exchange"], arm) == (4, 1, "weights")
                   else "-")


def experts_ranks(record: dict[str, Any]) -> Iterator[Row]:
    yield (f"moe_gpt small on {record['ranks']} ranks of one core, {record['scheduler']}: minidl / torch over gloo",
           f"{times(record['ratio'])}; {record['minidl_ms']['median']:.0f} and {record['torch_ms']['median']:.0f} ms; "
           f"losses at most {record['losses_apart']:.0e} apart", "<= 0.70x")


def stale(record: dict[str, Any]) -> Iterator[Row]:
    for name, arm in record["arms"].items():
        seen = "; ".join(f"lr {rate}: {accuracies(values)}" for rate, values in arm["rates"].items())
        yield (f"digits on {record['ranks']} ranks, {name}: accuracy on stale / on the newest weights",
               f"{seen}; {arm['mean']:.2f} updates late, {arm['steady']:.2f} in steady state, drift {arm['drift']}",
               "-")


def spectrum(record: dict[str, Any]) -> Iterator[Row]:
    for arms in record["methods"].values():
        for name, arm in arms.items():
            yield f"digits, {name}: accuracy", spectrum_said(arm), arm["expected"]


def tradeoff(record: dict[str, Any]) -> Iterator[Row]:
    for network, name, seen, time, late, command in tradeoff_rows(record):
        yield f"{network}, {name}: `{command}`", f"{seen}; {time}{f'; {late} updates late' * bool(late)}", "-"


def batch_size(record: dict[str, Any]) -> Iterator[Row]:
    for sparsity, part in record["sparsities"].items():
        steps = ", ".join(f"{k:.0f}" if k is not None else "-" for k in part["steps"].values())
        yield f"sparsity {sparsity}: steps to the target, batch sizes {', '.join(part['steps'])}", steps, "-"
        for policy in dict.fromkeys(t["policy"] for t in part["times"]):
            mine = [t for t in part["times"] if t["policy"] == policy]
            best = min(mine, key=lambda t: t["ms"])
            yield (f"sparsity {sparsity}, {policy}: time to the target on 1 rank; the least",
                   f"{mine[0]['ms']:.2f} ms; {best['ms']:.2f} ms on {best['ranks']} ranks, batch {best['batch']}; "
                   f"{paying(part['times'], policy)} ranks pay", "-")


def launches(record: dict[str, Any]) -> Iterator[Row]:
    """All rows but chains of one length, which earlier records have."""
    for row in record["rows"]:
        if "kernels" not in row:
            yield f"{row['group']}: {row['name']}", launch_said(row), "-"


def ladder(record: dict[str, Any]) -> Iterator[Row]:
    """The targets for one GPU, then a row for each network: the time of torch's rungs over minidl's, and the gain from
    order alone."""
    for precision, rows in record["targets"].items():
        for row in rows:
            if row["seen"]:
                yield f"one GPU, {precision}: {row['what']}", said(row["seen"]), row["target"]
    for precision, networks in record["networks"].items():
        for label, entry in networks.items():
            if line := brief(entry):
                yield f"{label}, {precision}: torch / minidl", line, "-"


def nodes(record: dict[str, Any]) -> Iterator[Row]:
    for label, entry in record["networks"].items():
        before, now = entry["before"], entry["now"]
        plain, fused = (f"{before[name]['nodes']} -> {now[name]['nodes']}" for name in ("plain", "fused"))
        groups = now["grouped"]["floor_ms"] / before["fused"]["floor_ms"]
        row, lanes = (now["fused"][key] / before["fused"][key] for key in ("floor_ms", "lanes_ms"))
        yield (f"{label}: nodes of a step; least time fused, now / before", f"plain {plain}, fused {fused}; "
               f"{now['fused']['floor_ms']:.3f} ms, {row:.2f}x; multi_region {now['fused']['lanes_ms']:.3f} ms, "
               f"{lanes:.2f}x; in groups {now['grouped']['nodes']} nodes, {groups:.2f}x", "-")
    mlp = record["in_launches"]
    yield (f"MLP, whole call: {mlp['steps']} steps a launch, expected / one step a launch, seen",
           f"{mlp['expected']:.3f} ms, {mlp['expected'] / mlp['seen']:.2f}x", "<= 0.75x")


#: what the parts of `gpu_proof.py` show; the benchmarks have their own records and rows
PROOFS = {"tests": "the tests marked `gpu`", "kernels": "every kernel's tests",
          "mpi": "two ranks leave the bits of one process", "sanitizer": "training steps under compute-sanitizer"}


def gpu_proof(record: dict[str, Any]) -> Iterator[Row]:
    for name, what in PROOFS.items():
        part = record["parts"].get(name, {})
        if "steps" in part:
            steps = part["steps"].values()
            counts = {kind: sum(step["counts"].get(kind, 0) for step in steps if "counts" in step)
                      for kind in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
            seen = ([f"{n} {kind.lower()}" for kind, n in counts.items() if n]
                    or [f"{sum(step['passed'] for step in steps)} of {len(steps)} runs"])
            unfinished = [step for step, found in part["steps"].items() if "exit" not in found or found["timed_out"]]
            yield (f"on a GPU: {what}", ", ".join([*seen, *(f"{step} not finished" for step in unfinished)]),
                   "all pass")


@dataclass(frozen=True)
class Section:
    """A part of the page: what to know before its figures, and the records that it shows."""

    title: str
    words: str
    rows: dict[str, Callable[[dict[str, Any]], Iterator[Row]]]  # by record; one that has no rows has a picture


INTRODUCTION = """\
# Results

Made by `python bench/tables.py --write` from the records in `bench/results`; the pictures by
`python bench/plots.py`. Each record says when, where and from which commit it was taken.

The figures come from shared machines with two cores, those on a GPU from one H100. The arms of a comparison are
interleaved in one run; the result is the ratio and its spread (10th to 90th percentile), not the time. In pictures a
bar is a median, its line the spread, and a cross what was predicted from costs that were not measured on that schedule.
[claims.md](claims.md) sets the published claims beside these figures.
"""
SECTIONS = (
    Section("One device, one stream", """\
Steps of small networks are launches more than arithmetic: there recording gains most over an eager framework. Torch ran
with one thread, as minidl did.""", {"mlp": mlp, "lanes": lanes, "cnn": cnn, "language": language,
                                       "recurrent": recurrent}),
    Section("One device, two streams", """\
Steps are predicted well where tasks are long. Tasks of microseconds slow each other down more than the measured pairs
do; with such tasks the gain of two streams also varies most: 1.06x to 1.29x between runs for MobileNetV3 at width 0.25.
A large layer runs faster with two BLAS threads on one stream than on two streams: overlap pays where one kernel cannot
fill the machine.""", {"single_device": single_device, "prediction": prediction}),
    Section("One device, 2 to 16 cores", """\
Two cores are measured, with `--split auto`, which leaves tasks whole where parts would not gain. More cores are
predicted from the costs of tasks, whole and in as many parts as cores, which were measured on two: nothing was measured
on 16. Lanes share the memory's bandwidth. How much two lanes copy at once was measured, how much more lanes do was not.
So there are two predictions: by Amdahl's law from one lane and two; and, with care, if all lanes together copy no more
than two. These were made beside other work; MobileNetV3 and DenseNet-121 are from an older record (AMD EPYC, commit
9df90e8), in which lanes shared no bandwidth. Attention over thousands of tokens is compared with torch, which has as
many threads as minidl has lanes. On busy cores another process computes on each core without end.

Before lanes shared bandwidth, predictions took tasks as if they ran alone. One timeline each, so simulated: LeNet takes
14 % longer, since its tasks last 10 % longer beside another lane, above all poolings and updates; MobileNetV3 of width
0.25, batch 32, 16 %, since its tasks last 19 % longer, weight gradients 39 %; the GRU 3 %. Waits add less.

ResNet-18 took 0.69 and 0.70 of torch's time in two runs; before its convolutions of small images skipped the padding,
it took 0.99 to 1.08. Steps of DenseNet-121 on two lanes take 54 ms, as predicted, or 97. In between, the host of this
virtual machine has moved its two cores to caches of their own: a hand-over between them takes 0.27 us then, not 0.08,
and a KB from the other core 0.06 us to read, not 0.006, and 0.35 us to overwrite, not 0.07. The tasks that mostly move
data take 2 to 6 times as long, and predictions, which take cores as they were measured, do not say so. `train` and
`compare` name it as a reason. Three more runs beside torch took 0.45, 0.66 and 0.72 of its time.""", {
    "wide": wide, "wide_torch": wide_torch, "cores": cores, "wide_scaling": wide_scaling}),
    Section("Beside the strongest", """\
The same training step in torch eager, torch.compile (the loss; its optimizer is torch's fused one) and JAX's jit (the
whole step, with buffers donated to it), with the same weights and losses; minidl on all cores is the better one of one
lane and two lanes with chosen widths. On one core all are pinned, and the processor's time counts. Seconds until the
first step: record, plan and bind, or a compiler that starts with an empty cache beside another one.

Rows come three times: for an Intel with AMX, an AMD Zen 4, and an AMD Zen 3, which has no AVX-512. On the Zen 4
OpenBLAS reaches 77 to 105 of a core's 118 GFLOP/s on the products of these networks, tiles of minidl 97 to 115. On the
Intel it is 98 to 155 and 143 to 178 of 210 to 225; that core's clock changes by a tenth within a minute. On the Zen 3
it is 78 to 92 of 102; tiles reach 83 to 95 if a weight is packed once for several products. The MLP with 2,048 units
takes 1.02 times its floor (below) there, and the GPT 6 x 384 takes 1.06 times. The host of the Zen 3 was about a tenth
slower in the hour of the rows for one core than in the hour before. On the Zen 4 the MLP with 2,048 units has the
slowest products, since the rows of its weights are a multiple of 4 KB apart.

On one core of the Intel, and on the Zen 3, all arms have large pages and keep the memory that they free (glibc's
tunables), as minidl's own memory does. How long the host of that virtual machine takes for new pages changes from day
to day; without the tunables it makes peers slow: in the same hour minidl took 0.45 of the best peer's time for
ResNet-20 without them and 0.67 with them, 0.43 and 0.49 for LeNet, 0.86 and 0.95 for the MLP with 2,048 units. That MLP
and the GPT 6 x 384 are above 0.85 on the Intel: products take 0.9 and 0.7 of their time; the MLP's reached 127 to 161
GFLOP/s of 209 on another day, torch's 141 to 167. Rows for all cores of the Intel, and all rows of the Zen 4, are
older: they are without the tunables, and the Intel's without Winograd's convolutions and without fusion, as are its
floors below (commit adce3448).""",
            {"strongest": strongest, "strongest_zen4": strongest, "strongest_zen3": strongest}),
    Section("What holds each step back", """\
A launch's floor is its flops at the rate of a large product on this core, or its bytes at the rate of a copy of as many
bytes, if that is longer. A launch that finds its operands in a cache may be below its floor. Attention counts all
scores, also those that a causal mask leaves out, so over long rows its floor is nearly twice too high. Each launch is
timed alone, on one core; a family is a file in `kernels/`. As above, rows may come three times.""",
            {"strongest": floors, "strongest_zen4": floors, "strongest_zen3": floors}),
    Section("Where the time of a step goes", """\
Steps of the ladder's networks, traced: the share of each kernel family and of lanes without a task in the time of all
lanes. Families that find their operands in a cache may be below their floor. `python bench/shares.py --device cuda`
takes it from replayed graphs on a GPU; no GPU has run it yet, so this is the CPU. The verb `report` shows the same of
any trace.""", {
    "shares_cpu": shares, "shares_cuda": shares}),
    Section("Predicted step times", """\
The step that `train` and `compare` print before they train, against the median step that they then take; each run is
the command as a user types it. Costs are measured on free cores: a run marked with * ran while other processes used
more than 3 % of the machine.""", {"predicted_steps": predicted_steps}),
    Section("Memory for time", """\
Steps that compute activations again, beside the plain step and beside torch's checkpointing of the same blocks, one
thread each; and ranks that share out, beside torch's `fully_shard` over gloo. All on free cores.""",
            {"memory": memory, "memory_shards": memory_shards}),
    Section("Data-parallel ranks", """\
Tasks wait instead of computing, as if an accelerator computed; the link is a shaped loopback. The second picture is
simulated: it shows for which networks and links reverse first-k gains over priority.""",
            {"data_parallel_waits": data_parallel, "first_k_map": lambda _: iter(())}),
    Section("Pipelines on ranks", """\
In the first record tasks compute (`kernels`), and each rank has a core; the calls of native lanes count in the measured
peaks. Stale policies are measured amid their steps, without draining. In the second, tasks wait instead (`waits`), so
that more ranks than cores can be measured; `vgg16` has layers of width 64 that wait as long as the layers of VGG-16
take. Eight ranks share two cores. The FFNN and the RNN there were measured when a rank looked for all messages after
each task; the others since it looks for the next one of each lane.""",
            {"pipeline_parallel_kernels": pipeline_parallel, "pipeline_parallel_waits": pipeline_parallel}),
    Section("Orders as hints", """\
1F1B, B = 2F. Task times are drawn anew for each step: they vary by .3 from micro-batch to micro-batch, and by half of
that from task to task. Tasks wait instead of computing, and the ranks are threads of one process. The simulator uses
the same draws. A forward lasts 60 ms. Beside other work, where sleeps of threads end 2 to 3 ms late, steps were up to
7.5 % longer than simulated.""",
            {"hint": hint}),
    Section("Weight gradients in groups, on one lane of a CPU", """\
A step of SGD with momentum, in order. *another build* is the one before groups. Since then, the weight gradient of a
small pointwise convolution is a product, and that of a filter per channel skips taps that never meet the image. Nothing
else is gained on a CPU, where a native call costs nanoseconds. Other work ran at the same time; the times are the
thread's own.""",
            {"group": group}),
    Section("Experts on data-parallel ranks", """\
Tasks that wait, as above. Each of two blocks has a dense layer, and one with experts and a shared expert; the three
take 20 ms each for a forward, an output gradient and a weight gradient, and each of the four exchanges half as long, as
long or twice as long. In order, a rank waits for every exchange. With `hide=weights`, weight gradients run beside
exchanges backward, and the shared expert beside dispatch; with `hide=two_batches`, two micro-batches take turns.
Parameters have equal bits. Below, real products: torch exchanges rows by `all_to_all_single`.""",
            {"exchanges": exchanges, "experts_ranks": experts_ranks}),
    Section("Plans of networks for language, priced", """\
Simulated, from costs of single tasks that were measured on a busy machine: 4 ranks, 4 micro-batches, links of 20 us and
1 GB/s. BERT and GPT have 12 layers of 128, the RNN 16 cells of 128, the FFNN 12 layers of 1024. Modulo allocation cuts
a network into 12 stages; the FFNN's 13 blocks do not divide evenly into them, so it loses there.""",
            {"network_plans": network_plans}),
    Section("Messages between ranks", """\
The bytes that are sent in a step, and the share of a step in which the average rank waits, without and with `only_new`,
`fill` and `prefetch`. Bytes are counted in plans of 16 layers and 8 micro-batches. Tasks wait instead of computing, and
each message and gather takes 10 ms. Two ranks were measured under MPI, beside other work; for `prefetch`, two ranks of
each of two replicas. For `fill`, all layers but the last one are computed again. For `prefetch`, each rank has four
stages.""",
            {"messages": messages}),
    Section("What networks learn", """\
The command line's own runs on one core, judged on data that they have not seen; each entry of the record has its
command. The text is Python's manual, whose bytes differ between Python versions.""",
            {"learning": lambda record: iter(learning(record))}),
    Section("Stale pipelines", """\
Accuracy on the embedded digits beside one process that updates as often, on the newest weights; how many updates late
the weights are, and how far the versions of two micro-batches in flight can drift apart.""", {"stale": stale}),
    Section("Approximate backward passes", """\
Accuracy on the embedded digits, the mean of three seeds and their range. The target is the accuracy of a NumPy model of
the published rule, one or two seeds; the papers' own figures, on larger networks, are in [claims](claims.md).
*dither S*: gradients of pre-activations rounded to multiples of S standard deviations; shares are means over the run's
epochs. ReLU makes most of the zeros before. *SLTT-K*: a spiking network, K of whose 6 time steps have a
backward pass. *PARTIME*: 6,000 ticks of 32 samples; with one stage it is plain SGD, which
misses its target in a ring as well, by 2.2 points: the set-ups differ, not the methods. If a fresh batch comes every
tick, little more than chance is learned in both set-ups; how little differs by 6 and 8 points, and as much by the seed.
*pipedream*: 9 layers of 64, an update after each of 16 micro-batches, six epochs.
*layerpipe2*: 5 layers of 64, an update after each of 16 micro-batches, six epochs, momentum .9.
*adamw*, *muon*: 9 layers of 32, an update after each of 16 micro-batches, one epoch, at a rate of 0.003 if none is
given; 2, 5 and 9 ranks make weights up to 2, 8 and 16 updates late. The optimizer decides more than the prediction:
after six epochs, 8 updates late, Muon learns as without delay, with or without prediction, while AdamW loses 41 points,
of which the prediction brings 5 back, less than seeds differ. After one epoch a prediction still brings Muon 19 points,
and AdamW none. The rate decides as well: at 0.001 Muon learns less than AdamW, at 0.009 far more, and a lower rate
suits a late AdamW better (*pipedream*). Sixteen updates late neither learns much in an epoch, and seeds differ by up to
41 points.
*Jacobi*, *Gauss-Seidel*, *DeepPCR*, *Highway-BP*: batches of 16, twelve epochs, and simulated steps on 64 lanes, by
analytic costs. For sweeps no accuracy was published but Highway-BP's, so compare with the exact pass: a chain
needs nearly all of its sweeps, a residual network none or one. One Newton iteration is not enough either.
*ADL*, *rates by delay*: as *layerpipe2*, which ADL equals in bits with updates of one micro-batch; rates grow back to
0.02 within 20 or 60 of 67 steps, and are then as unstable. *PETRA*: six reversible blocks of 64, at a rate of 0.005.
*barrier*, *acco*, *delayed_update*: 4 layers of 64 on data-parallel ranks, two micro-batches each, 12 epochs; *sgd, lr
0.02* has a momentum of .9.
*SGD*, *PD-ASGD*: 504 updates of batches of 16.
*DDP*, *LayUp*: 4 ranks, batches of 16 on each, the time of 500 batches; with a slow rank DDP ends 124 steps, LayUp 125
batches there and 500 on each other rank. The rate is 0.2, which is how the target's sum of four gradients acts at
0.05; LayUp needs it as well, since the ranks' mean moves by one rank's rate.
DDP with a slow rank misses its target by 12 points: after 124 steps accuracy still rises steeply; half the rate gave
78.6 %, a quarter 53.6 %, of three seeds that are not in the record.""",
            {"spectrum": spectrum}),
    Section("The whole spectrum", """\
Every method that changes which values a backward pass reads, on the embedded digits (5 layers of 64, twelve epochs,
three seeds) and on a small GPT (4 blocks of width 32, 3,200 samples of 16 bytes, one seed): what it has learned, the
predicted time of the run, and how many updates late its gradients are, counted in its version log; for PARTIME and
`delayed_update` it follows from their rules. Times are simulated on assumed costs, with links of 1 us and 10 GB/s and,
for sweeps, 16 lanes; the record has the `plan` command of each point. Each method has the same tries for its learning
rate, a ninth, a third, once, three and nine times the usual one; the best one on a held-out fifth of the training part
(on the digits by the mean of three seeds) trains on the whole part, and the record has them all. On the GPT the lowest
try suits most stale pipelines best, so an even lower rate may suit them better.
PD-ASGD and LayUp were replayed from their logs, with equal bits.
Two Newton iterations are exact for these layers, so DeepPCR's bits stay; with one it hardly learns. Missing on the GPT
are DeepPCR, since it is no chain of narrow layers; PETRA, since its blocks are not reversible; PARTIME, since its first
and last stage share the embedding ("take a network whose stages share nothing"); the spiking network. Made by
`python bench/tradeoff.py`, later points by `python bench/tradeoff.py --add`.""", {"tradeoff": tradeoff}),
    Section("Batch size and ranks", """\
Steps to an error of 5 % on the embedded digits, one hidden layer of 32, the fastest of drawn learning rates and
momenta, mean of three seeds; sparse networks are pruned before training (Lee et al., 2003.11316). Times are these steps
times the simulated step on assumed costs, at the best batch size of each number of ranks; ranks pay that save at
least a quarter of the time of half as many.""", {"batch_size": batch_size}),
    Section("Large plans", """\
Recorded networks: the whole command, start-up and recording included, by costs from flops and bytes.""",
            {"planning": planning, "planning_networks": planning_networks}),
    Section("What a launch costs", """\
One row of `python bench/launch_overhead.py` each, which takes a minute; `--row NAME` measures one alone. Medians (10th
to 90th percentile, and more of single calls). *host*: the caller is busy; *first*: until the first instruction has run;
*done*: until the host knows the end; *device*: from one queued call to the next. *a + b n*: the cost over the number n
of calls in one launch, by the line whose relative errors have the least squares, and its largest error. A profiler
makes each call longer. A line of several lanes is off if they sleep at one length and still spin at the next. The
H100's record is an earlier and quick one, of three samples.""",
            {"launch_overhead_cpu": launches, "launch_overhead_cuda": launches}),
    Section("Nodes of a step", """\
Calls of a step's CUDA graph, counted without a GPU, before and after changes that make them fewer. Least times are made
of what an H100 took at least for a dependent node (own kernels 1.22 us, products 4.1, also those by our kernels, cuDNN
4.5; three samples each), in a row or simulated on two lanes. They leave out all work on data: they predict no step, and
no GPU has run the new nodes. In groups: `--group-weights 36`, in a row; a group counts as one node. The last row
assumes that K steps a launch need a K-th of the host's time, and three more nodes each.""",
            {"nodes": nodes}),
    Section("On a GPU", """\
One H100, in four short calls, 24 minutes in all. E0: launch by launch; E1: one graph, one stream; E2: one graph,
several streams; B1: torch eager, tuned; B2: torch's own CUDA graph. The host is a virtual machine whose launches are
slow, so ratios to eager torch are high; those between graphs do not depend on it. The costs for the first two networks
left out the time between launches.""", {"ladder": ladder, "gpu_proof": gpu_proof}),
)


#: the figures at the top: record, the first words of one of its rows, what that row says
TEN = (
    ("mlp", "MLP 16 x 64, batch 8: torch eager", "a small MLP, recorded: torch eager's step over minidl's"),
    ("cnn", "mobilenet_v3, batch 32", "MobileNetV3: minidl's step over torch's, one thread"),
    ("wide_torch", "gpt, batch 8", "a small GPT: minidl's step over torch's, two threads each"),
    ("single_device", "densenet121 k24", "weight gradients out of order on a second CPU lane, DenseNet-121"),
    ("memory", "gpt, sqrt", "memory for time: a GPT's step with a quarter of its activations"),
    ("data_parallel_waits", "two ranks, head-heavy, communication / computation 0.5", "reverse first-k on two ranks"),
    ("pipeline_parallel_waits", "8 ranks, mlp of 64 layers", "eight ranks: GPipe's step over other orders'"),
    ("predicted_steps", "all: size of the error", "the step that `train` predicts before it trains"),
    ("ladder", "one GPU, tf32: one stream / out of order, both captured", "the order alone within CUDA graphs, H100"),
    ("ladder", "one GPU, tf32: the fastest of torch's graph", "one graph a step, H100: torch's over minidl's"),
)


def ten() -> Iterator[str]:
    """The lines of the table of ten figures; none for a record that is not there."""
    makers = {name: make for section in SECTIONS for name, make in section.rows.items()}
    shown = []
    for name, start, words in TEN:
        if (path := RESULTS / f"{name}.json").exists():
            found = [seen for what, seen, _ in makers[name](json.loads(path.read_text())) if what.startswith(start)]
            shown += [f"| {words} | {seen} | [{name}](../bench/results/{name}.json) |" for seen in found[:1]]
    if shown:
        yield from ("\n## Ten figures\n", "| what | seen | record |", "|---|---|---|", *shown)


def _earlier(record: dict[str, Any]) -> str:
    """The settings of a record that were measured before or after the others, and where; for the ladder, the number of
    runs."""
    if "added" in record:
        return "".join(f"; {'; '.join(more['points'])}: commit {more['commit']}, {more['date']}"
                       for more in record["added"])
    if record["name"] == "ladder":
        runs = [run for networks in record["networks"].values() for entry in networks.values()
                for run in entry.values() if "sources" in run]
        others = [run for run in runs if run["sources"] != record["machine"]["sources"]]
        return (f"; {len(others)} of {len(runs)} runs of other sources, "
                f"{', '.join(sorted({run['date'] for run in others}))}" if others else "")
    kept = [s for s in record.get("settings", []) if "recorded" in s]
    if not kept:
        return ""
    about = kept[0]["recorded"]
    return ("; " + ", ".join(f"{s['network']} {s['ratio_wanted']:g}" for s in kept)
            + f": {about['cpu']}, commit {about['commit']}, {about['date']}")


def _where(name: str, record: dict[str, Any]) -> str:
    """The machine on which a record was made, and its sources."""
    link = f"[{name}](../bench/results/{name}.json)"
    if record.get("what") == "simulated":
        return f"{link}: simulated"
    about = (next((part["machine"] for part in record["parts"].values() if "machine" in part), {}) if "parts" in record
             else record.get("machine", record))
    gpu = about.get("gpu", record.get("gpu"))
    version = f"commit {about['commit']}" if about["commit"] else f"sources {about['sources']}"
    busy = (f", busy with others ({about['load_before']:g} processes wanted to run)"
            if about.get("load_before", 0) > 2 * about["cores"] else "")
    busy = f", {record['note']}" if record.get("note") else busy
    return (f"{link}: {gpu['name'] + ', ' if gpu else ''}{about['cpu']}, {about['cores']} cores{busy}, {version}, "
            f"{about['date']}{_earlier(record)}")


def part(section: Section) -> Iterator[str]:
    """The lines of a section; none without records."""
    records = {name: json.loads(path.read_text())
               for name in section.rows if (path := RESULTS / f"{name}.json").exists()}
    if not records:
        return
    yield f"\n## {section.title}\n"
    if section.words:
        yield f"{section.words}\n"
    for name, record in records.items():
        if (RESULTS / f"{name}.svg").exists():
            yield f"![{section.title}: {name}](../bench/results/{name}.svg)\n"
        rows = [f"| {what} | {seen} | {target} |" for what, seen, target in section.rows[name](record)]
        if rows:
            yield from ("| what | seen | target |", "|---|---|---|", *rows, "")
        yield _where(name, record)
        yield ""


def page() -> str:
    """The page in Markdown."""
    sections = (line for section in SECTIONS for line in part(section))
    return "\n".join([INTRODUCTION.rstrip(), *ten(), *sections]).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
