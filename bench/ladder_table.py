"""The ladder's record as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ladder_record import FIRST_RUN, GRAPHS, SCHEDULER, TUNED, errors, measured, median


def run_text(label: str, run: Mapping[str, Any]) -> str:
    """One run of a network as text: a line for each rung, then ratios, then the rungs that are left out."""
    lines = [f"\n{label}"]
    if "correct" in run:
        correct = run["correct"]
        lines[0] += (f"   equal bits: {correct['equal_bits']}"
                     + (f"; losses agree with torch: {correct['losses']['agrees']}" if "losses" in correct else ""))
    for name, s in run.get("step_ms", {}).items():
        peak, predicted, launch, resident = (run["peak_bytes"][name], run.get("predicted_ms", {}).get(name),
                                             run["launch_us"].get(name), run["resident_ms"].get(name))
        lines.append(f"  {name:20} {s['median']:9.3f} ms   p10 {s['p10']:9.3f}   p90 {s['p90']:9.3f}   n {s['n']:4}   "
                     f"host {run['host_us'][name]['median']:9.1f} us"
                     f"   ready {run['ready_s'][name]:7.1f} s   peak "
                     f"{f'{peak / 2**20:9.1f} MiB' if peak is not None else '-':>13}"
                     + (f"   resident {resident['median']:9.3f}" if resident else "")
                     + (f"   launch {launch['median']:7.1f} us" if launch else "")
                     + (f"   predicted {predicted:9.3f} ({errors(run)[name]:+.1%})" if predicted is not None else ""))
    lines += [f"  {name:44} {r['median']:7.3f}x   p10 {r['p10']:7.3f}   p90 {r['p90']:7.3f}"
              for name, r in run.get("ratios", {}).items()]
    if "stopped" in run and "step_ms" in run:
        turns = max(s["n"] for s in run["step_ms"].values())
        return "\n".join([*lines, f"  stopped after {turns} turns: {run['stopped']}"])
    lines += [f"  left out: {name}: {why}" for name, why in run.get("left_out", {}).items()]
    return "\n".join(lines)


def brief(entry: Mapping[str, Any]) -> str | None:
    """A network in one line: torch's times over minidl's, the gain from order alone, minidl's step; None without
    times."""
    first = entry.get(FIRST_RUN, {})
    if "step_ms" not in first:
        return None
    peers = [f"{name} {r:.2f}x" for name in (TUNED, *GRAPHS) if (r := median(entry, name))]
    orders = [f"{slow} / {fast} {r:.2f}x" for slow, fast in (("E1", "E2"), ("E0a", "E0b"))
              if (r := median(entry, f"{slow} in_order", f"{fast} {SCHEDULER}"))]
    return "; ".join([*peers, *orders, f"{first['minidl']} {first['step_ms'][first['minidl']]['median']:.2f} ms"])


def said(seen: Mapping[str, Any] | None) -> str:
    """A target's result as text."""
    if seen is None:
        return "-"
    networks = f"{seen['networks']} of {seen['of']} networks"
    if "geometric_mean" in seen:
        return f"{seen['geometric_mean']:.2f}x, worst {seen['worst']:.2f}x ({networks})"
    if "error" in seen:
        return f"median error {seen['error']:.1%}, worst {seen['worst_error']:+.1%} ({networks})"
    launch = f"launch {seen['launch']:.0f} us, worst {seen['worst_launch']:.0f}; " if "launch" in seen else ""
    return f"{launch}with its batch {seen['step']:.0f} us, worst {seen['worst_step']:.0f} ({networks})"


def result(record: Mapping[str, Any]) -> str:
    """Means of all ratios, and the targets, by precision."""
    lines = []
    for precision, networks in record["networks"].items():
        done = sum(1 for entry in networks.values() for _ in measured(entry))
        lines.append(f"\n{precision}: {done} runs of {len(networks)} networks")
        for name, value in record["summary"][precision].items():
            lines.append(f"  {name:44} {value['geometric_mean']:7.3f}x geometric mean   {value['worst']:7.3f}x worst   "
                         f"{value['networks']} networks")
        for row in record["targets"][precision]:
            met = {True: "met", False: "NOT MET", None: ""}[row["met"]]
            lines.append(f"  {row['what']}: {said(row['seen'])}   target {row['target']}   {met}".rstrip())
    return "\n".join(lines)
