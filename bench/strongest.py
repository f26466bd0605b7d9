"""Ours beside the strongest: torch eager, torch.compile and JAX's jit of the same step, on one core and on all.

    python bench/strongest.py [--networks GPT] [--cores 1|all] [--rounds 7] [--seconds 5] [--out FILE.json]
    python bench/strongest.py --floors [--networks GPT] [--out FILE.json]      only what holds each of ours back

Needs the extra `strong` and a C++ compiler. Each arm has a process of its own. First the losses of all arms over some
steps must agree; then the arms take turns. On one core, to which all processes are pinned, the processor's time counts,
so that other work there counts less; on all cores the clock's. All have large pages and keep what they free. A step is
forward, backward and the optimizer. Buffers are donated to JAX; torch has fused optimizers, no gradients between steps,
images channels last. Networks that are measured replace their entries in the record.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from strongest_networks import NETWORKS, Network, twin

CHECKED, APART = 5, 0.05  #: steps whose losses must agree, and by how much of their change they may differ
RATES = {False: 0.01, True: 1e-3}  #: while losses are compared, by whether the optimizer is AdamW
SLOW = 1e-7  #: the rate while steps are timed, so that no unit dies and leaves denormal momenta
LEAST = 0.01  #: of a step's time: smaller families are not shown
PATIENCE = 900.0  #: seconds for an arm to build its step
#: of glibc 2.35 or newer, for all arms: large pages, and what is freed stays with the process. Otherwise a virtual
#: machine's host takes time for the pages of each step, and more on some days, from all but minidl, which keeps its own
PAGES = ":".join(f"glibc.malloc.{name}={value}" for name, value in (
    ("hugetlb", 1), ("mmap_threshold", 1 << 32), ("trim_threshold", 1 << 34), ("top_pad", 1 << 26)))
SETTLE = MappingProxyType({"1": 0.02, "all": 0.1})  #: seconds until threads of other arms have stopped spinning
OURS = {"1": ("minidl",), "all": ("minidl, one lane", "minidl, two lanes")}
FUSED = ("batch_norm_act", "batch_norm_grad", "squeeze_excite", "epilogue", "slabs", "additions", "slopes",
         "weight_updates", "in_place")  #: rules of fusion of our step
PEERS = "torch eager", "torch.compile", "torch.compile, max-autotune", "JAX jit"
TARGETS = {"1": (0.85, 0.60), "all": (0.85, 0.65)}  #: the worst and the median network, ours over the best peer


class Arm(NamedTuple):
    """`step()` starts a step and returns its loss, for which `float` waits; `rate` sets the learning rate; `facts` for
    the record."""

    step: Callable[[], Any]
    rate: Callable[[float], None]
    facts: dict[str, Any]


# ----------------------------------------------------------------------------------------------------- an arm's process
def recorded(network: Network, dropout: float, folder: Path) -> tuple[Any, Any, Any, Any]:
    """(graph, images or tokens, labels, optimizer). Writes the weights for the other arms."""
    import minidl as ml
    from minidl import nn, optim

    ml.seed(0)
    model = network.ours(dropout)
    if not (weights := folder / "weights.npz").exists():
        np.savez(weights, **model.state_dict())
    x, y = network.inputs()
    opt: Any = (optim.AdamW(model.parameters(), RATES[True], weight_decay=0.01) if network.vocabulary else
                optim.SGD(model.parameters(), RATES[False], momentum=0.9))

    def train(x: Any, y: Any) -> Any:
        out = model(x)
        loss = nn.cross_entropy(out.reshape(-1, out.shape[-1]), y)
        loss.backward()
        opt.step()
        return loss

    return ml.record(train, x, y), x, y, opt


def ours(network: Network, dropout: float, folder: Path, lanes: int) -> Arm:
    """A recorded step that is fused, on one lane in order, or on two lanes with chosen widths. `start_s`: record, plan
    and bind."""
    import minidl as ml
    from minidl.fusion import fused

    begin = time.perf_counter()
    graph, x, y, opt = recorded(network, dropout, folder)
    graph = fused(graph, ml.device.cpu(), FUSED)
    before = time.perf_counter()
    cost = ml.measure(graph, parts=2) if lanes == 2 else None
    measuring = time.perf_counter() - before
    plan = ml.plan(graph, "in_order") if cost is None else ml.plan(graph, "multi_stream", cost, split="auto")
    run = ml.StreamExecutor(plan.graph, plan.schedule)
    start = time.perf_counter() - begin - measuring

    def rate(lr: float) -> None:
        opt.lr = lr

    return Arm(lambda: run(x, y), rate, {"start_s": start, "measuring_s": measuring,
                                         "peak_bytes": max(plan.peak_bytes)})


def in_torch(network: Network, dropout: float, folder: Path, cores: int, mode: str | None) -> Arm:
    """Eager, or the loss compiled in a mode; the optimizer is fused."""
    import torch
    from torch_twins import images

    torch.set_num_threads(cores)
    made = twin(network, dropout, dict(np.load(folder / "weights.npz")))
    x, y = network.inputs()
    tx, ty = images(x) if x.ndim == 4 else torch.from_numpy(x), torch.from_numpy(y)
    optim = torch.optim
    opt: Any = (optim.AdamW(made.parameters(), RATES[True], weight_decay=0.01, fused=True) if network.vocabulary else
                optim.SGD(made.parameters(), RATES[False], momentum=0.9, fused=True))

    def loss_of(x: Any, y: Any) -> Any:
        out = made(x)
        return torch.nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), y)

    if mode is not None:
        loss_of = torch.compile(loss_of, mode=mode)

    def step() -> Any:
        opt.zero_grad(set_to_none=True)
        loss = loss_of(tx, ty)
        loss.backward()
        opt.step()
        return loss.detach()

    def rate(lr: float) -> None:
        for group in opt.param_groups:
            group["lr"] = lr

    begin = time.perf_counter()
    if mode is not None:  # compiles both directions, changes nothing but running statistics
        kept = {name: value.clone() for name, value in made.state_dict().items()}
        loss_of(tx, ty).backward()
        opt.zero_grad(set_to_none=True)
        made.load_state_dict(kept)
    return Arm(step, rate, {"start_s": time.perf_counter() - begin})


def in_jax(network: Network, dropout: float, folder: Path) -> Arm:
    """The whole step compiled, with donated buffers."""
    import in_jax as networks
    import jax

    trained, states = networks.arrays(dict(np.load(folder / "weights.npz")))
    adamw = bool(network.vocabulary)
    moments = tuple({name: np.zeros_like(a) for name, a in trained.items()} for _ in range(1 + adamw))
    x, y = (jax.device_put(a.astype(np.int32) if a.dtype == np.int64 else a) for a in network.inputs())
    begin = time.perf_counter()
    lr = np.float32(RATES[adamw])
    kept = [trained, states, jax.device_put(moments), 0]
    run = jax.jit(networks.train_step(network.jax(), adamw, dropout), donate_argnums=(0, 1, 2)).lower(
        *kept[:3], np.float32(1), lr, x, y).compile()
    start = time.perf_counter() - begin

    def step() -> Any:
        kept[3] += 1
        *kept[:3], loss = run(*kept[:3], np.float32(kept[3]), lr, x, y)
        return loss

    def rate(value: float) -> None:
        nonlocal lr
        lr = np.float32(value)

    return Arm(step, rate, {"start_s": start})


def pin(core: int) -> None:
    """All threads of this process to a core."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


def made(name: str, network: Network, dropout: float, folder: Path, cores: str) -> Arm:
    """The step of an arm. On one core torch compiles with all cores, and is pinned afterwards."""
    core = max(os.sched_getaffinity(0))
    if name.startswith("torch"):
        mode = {"torch.compile": "default", "torch.compile, max-autotune": "max-autotune"}.get(name)
        count = 1 if cores == "1" else len(os.sched_getaffinity(0))
        return in_torch(network, dropout, folder, count, mode)
    if cores == "1":
        pin(core)
    return in_jax(network, dropout, folder) if name == "JAX jit" else ours(
        network, dropout, folder, 2 if name == "minidl, two lanes" else 1)


def losses(arm: Arm, adamw: bool) -> list[float]:
    arm.rate(RATES[adamw])
    found = [float(arm.step()) for _ in range(CHECKED)]
    arm.rate(SLOW)
    return found


def serve(network_name: str, name: str, cores: str, folder: Path) -> None:
    """Builds an arm, says its losses and facts, then answers each line of standard input, the seconds of a turn, with
    the seconds of a step by the clock and by the processor."""
    network, core, found = NETWORKS[network_name], max(os.sched_getaffinity(0)), sys.stdout
    sys.stdout = sys.stderr  # compilers talk
    if name == "floors":
        from floors import floors

        pin(core)
        print(json.dumps(floors(*recorded(network, network.dropout, folder)[:3])), file=found, flush=True)
        return
    adamw = bool(network.vocabulary)
    arm = made(name, network, 0.0, folder, cores)
    facts = {"losses": losses(arm, adamw), "start_s": arm.facts["start_s"]}
    if network.dropout:  # draws differ, so losses do
        arm = made(name, network, network.dropout, folder, cores)
        losses(arm, adamw)
    if cores == "1":
        pin(core)
    print(json.dumps({**arm.facts, **facts}), file=found, flush=True)
    for line in sys.stdin:
        begin, warm = time.perf_counter(), 0
        while not warm or time.perf_counter() < begin + SETTLE[cores]:
            float(arm.step())
            warm += 1
        count = max(1, round(float(line) * warm / (time.perf_counter() - begin)))
        begin, used = time.perf_counter(), time.process_time()
        for _ in range(count):
            loss = arm.step()
        float(loss)
        print(json.dumps([(time.perf_counter() - begin) / count, (time.process_time() - used) / count]), file=found,
              flush=True)


# ----------------------------------------------------------------------------------------------------------- the parent
class Worker:
    """An arm's process."""

    def __init__(self, network: str, name: str, cores: str, folder: Path) -> None:
        self.log = folder / f"{name} {cores}.log"
        # new, since a first run's compile times are wanted; without blanks, on which its compiler fails
        cache = folder / f"inductor-{len([*folder.iterdir()])}"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--serve", network, name, cores, str(folder)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "GLIBC_TUNABLES": PAGES})

    def answer(self) -> Any:
        """The next line. Raises RuntimeError if the process died or is silent for too long."""
        assert self.process.stdout is not None
        ready = select.select([self.process.stdout], [], [], PATIENCE)[0]
        if line := self.process.stdout.readline() if ready else "":
            return json.loads(line)
        said = [text for text in self.log.read_text(errors="replace").splitlines() if text.strip()] or ["no message"]
        raise RuntimeError(said[-1][:200] if ready else f"silent for {PATIENCE:g} s")

    def turn(self, seconds: float) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def missing(name: str) -> str | None:
    """Why an arm cannot run at all."""
    package = "jax" if name.startswith("JAX") else "torch" if name.startswith("torch") else "numpy"
    return None if importlib.util.find_spec(package) else f"{package} is not installed (extra `strong`)"


def measured(network: str, cores: str, rounds: int, seconds: float) -> dict[str, Any]:
    """The entry of a network on one core or on all of them."""
    entry: dict[str, Any] = {"arms": {}, "left_out": {}}
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory(prefix="minidl-strongest-") as folder:
        try:
            for name in OURS[cores]:  # one by one, since two lanes need costs measured on free cores
                workers[name] = Worker(network, name, cores, Path(folder))
                entry["arms"][name] = workers[name].answer()
            entry["left_out"] = {name: why for name in PEERS if (why := missing(name))}
            workers |= {name: Worker(network, name, cores, Path(folder)) for name in PEERS if not missing(name)}
            for name in [name for name in workers if name in PEERS]:
                try:
                    entry["arms"][name] = workers[name].answer()
                except RuntimeError as error:
                    entry["left_out"][name] = str(error)
                    workers.pop(name).end()
            entry["losses_agree"] = agree({name: arm["losses"] for name, arm in entry["arms"].items()})
            turn, samples = seconds / (rounds * len(workers)), {name: [] for name in workers}
            for _ in range(rounds):
                for name, worker in workers.items():
                    samples[name].append(worker.turn(turn))
        finally:
            for worker in workers.values():
                worker.end()
    return {**entry, **compared(samples, cores, entry["arms"])}


def agree(found: Mapping[str, list[float]]) -> bool:
    """Whether all arms' losses are as near to each other as APART of what they have learned in these steps."""
    of = np.array([*found.values()])
    return bool((np.ptp(of, 0) <= APART * np.ptp(of[0])).all())


def compared(samples: Mapping[str, list[list[float]]], cores: str, arms: Mapping[str, Any]) -> dict[str, Any]:
    """The steps of all arms, the best one of ours and of the peers, and the ratios of ours to each peer."""
    from common import ratio, spread

    clock = 1 if cores == "1" else 0
    took = {name: [step[clock] for step in steps] for name, steps in samples.items()}
    middle = {name: float(np.median(steps)) for name, steps in took.items()}
    mine = min((name for name in took if name in OURS[cores]), key=middle.__getitem__)
    peers = sorted((name for name in took if name in PEERS), key=middle.__getitem__)
    return {"arms": {name: {**arms[name], "step_ms": spread(steps), "least_ms": round(1e3 * min(steps), 4)}
                     for name, steps in took.items()},
            "ours": mine, "best": peers[0] if peers else None,
            "over": {peer: {**ratio(took, mine, peer), "least": round(min(took[mine]) / min(took[peer]), 4)}
                     for peer in peers}}


def line(network: str, cores: str, entry: dict[str, Any]) -> str:
    """A network's line of the table."""
    over = "".join(f"{entry['over'][peer]['median']:8.2f}" if peer in entry["over"] else f"{'-':>8}" for peer in PEERS)
    best = f"{entry['over'][entry['best']]['median']:8.2f} ({entry['best']})" if entry["best"] else "no peer"
    return (f"{network:36}{cores:>4}{entry['arms'][entry['ours']]['step_ms']['median']:10.3f}{over}{best}"
            f"{'' if entry['losses_agree'] else '   LOSSES DIFFER'}")


def summary(networks: Mapping[str, Any], cores: str) -> dict[str, Any] | None:
    """The worst and the median of ours over the best peer; None without a peer."""
    found = {name: kinds[cores]["over"][kinds[cores]["best"]]["median"]
             for name, kinds in networks.items() if cores in kinds and kinds[cores]["best"]}
    if not found:
        return None
    worst = max(found, key=found.__getitem__)
    return {"median": round(float(np.median([*found.values()])), 4), "worst": found[worst], "worst_network": worst,
            "above": [name for name, value in found.items() if value > TARGETS[cores][0]]}


def held_back(network: str) -> dict[str, Any]:
    """What holds our step back on one core: its floors, from a process of its own."""
    with tempfile.TemporaryDirectory(prefix="minidl-strongest-") as folder:
        worker = Worker(network, "floors", "1", Path(folder))
        try:
            return worker.answer()
        finally:
            worker.end()


def show_floors(network: str, found: dict[str, Any]) -> None:
    print(f"{network}: {found['ms']:.3f} ms, {found['share']:.0%} of its floor; a core: {found['peak_gflops']:.0f} "
          f"GFLOP/s, large products {found['product_gflops']:.0f}")
    for family, row in found["families"].items():
        if row["ms"] >= LEAST * found["ms"]:
            print(f"    {family:18}{row['ms']:10.3f} ms  floor {row['floor_ms']:10.3f} ms  {row['share']:4.0%}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default="", help="networks whose names contain this; default: all")
    parser.add_argument("--cores", choices=("1", "all"), help="one pinned core, or all; default: both")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each arm")
    parser.add_argument("--seconds", type=float, default=5.0, help="per network, without building")
    parser.add_argument("--floors", action="store_true", help="only the floors of our steps")
    parser.add_argument("--out", help="where to write the record")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*arguments.serve[:3], Path(arguments.serve[3]))
        return 0
    from common import RESULTS, machine, save, write

    chosen = [name for name in NETWORKS if arguments.networks.lower() in name.lower()]
    if not chosen:
        parser.error(f"no network's name contains {arguments.networks!r}; there are {'; '.join(NETWORKS)}")
    path = Path(arguments.out) if arguments.out else RESULTS / "strongest.json"
    before = json.loads(path.read_text()) if path.exists() else {"networks": {}}
    known, rounds = before["networks"], before.get("rounds", 0) if arguments.floors else arguments.rounds
    networks: dict[str, Any] = {name: known.get(name, {}) for name in NETWORKS if name in known or name in chosen}
    about = machine()
    about["versions"] |= {} if missing("JAX jit") else {"jax": importlib.metadata.version("jax")}
    record: dict[str, Any] = {"machine": about, "rounds": rounds, "networks": networks, "summary": {}}
    begin = time.monotonic()
    kinds = () if arguments.floors else (arguments.cores,) if arguments.cores else tuple(OURS)
    if kinds:
        for name in PEERS:
            if why := missing(name):
                print(f"{name} is left out: {why}", flush=True)
        print(f"{'ours over theirs':36}{'':>4}{'ms':>10}{'eager':>8}{'compile':>8}{'autotune':>8}{'JAX':>8}   the best")
    for name in chosen:
        for cores in kinds:
            entry = networks[name][cores] = measured(name, cores, arguments.rounds, arguments.seconds)
            print(line(name, cores, entry), f"  {time.monotonic() - begin:4.0f} s", flush=True)
            for arm, why in entry["left_out"].items():
                if not missing(arm):
                    print(f"    {arm} is left out: {why}", flush=True)
        if not arguments.cores:
            networks[name]["floors"] = held_back(name)
            show_floors(name, networks[name]["floors"])
        record["summary"] = {cores: found for cores in OURS if (found := summary(networks, cores))}
        write("strongest", record, arguments.out)  # what is finished is in the record
    for cores, found in record["summary"].items():
        where, above = "one core" if cores == "1" else "all cores", ", ".join(found["above"]) or "none"
        print(f"{where}: median {found['median']:.2f}, worst {found['worst']:.2f} ({found['worst_network']}); above "
              f"{TARGETS[cores][0]}: {above}")
    save("strongest", record, arguments.out)
    return int(not all(networks[name][cores]["losses_agree"] for name in chosen for cores in kinds))


if __name__ == "__main__":
    raise SystemExit(main())
