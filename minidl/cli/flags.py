"""All flags, and where each has an effect. minidl rejects a flag without an effect."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..system import launcher
from .values import (MOMENTUM, STORED, Names, command, every, number, numbers, pair, parts_of, path, patience, rules,
                     shards_of, size, sizes, slow_rank, topology, whole)

if TYPE_CHECKING:
    from ..schedulers.registry import Scheduler
    from ..training.job import Job


class UsageError(ValueError):
    """Arguments are wrong. The message is one line."""


#: the subject of a command, by letters: it follows from the verb, --model, --parallel and the flags of pipelines
SUBJECTS = {
    "s": "a network's step on one device",
    "r": "a network on data-parallel ranks (--parallel data)",
    "l": "data-parallel ranks on given layer times (--parallel data without --model)",
    "c": "a network cut into a pipeline (--parallel pipeline)",
    "p": "a pipeline on given times (--ranks without --model)",
}
MOST = 1 << 24  #: the most forward tasks of a pipeline; they take about 13 GiB
PIPELINE = {"--ranks", "--chunks", "--latency", "--activation-cap", "--forward", "--output-grad",
            "--weight-grad", "--table"}


#: the use of a flag: in words, or as a function that returns them, and as a test of the arguments
Condition = tuple[str | Callable[[], str], Callable[[Any], bool]]


@dataclass(frozen=True)
class Flag:
    """A flag. `serves`: verb that accepts it -> the subjects on which it has an effect; `needs`: other conditions for
    its effect, in words and as a test of the arguments; `options`: argparse's."""

    serves: Mapping[str, str]
    options: Mapping[str, Any]
    needs: tuple[Condition, ...] = ()


def _flag(serves: str, read: Callable[[str], Any] | Names | None, metavar: str, *needs: Condition, help: str,
          default: Any = None, **more: Any) -> Flag:
    """A row of the table. `serves`: verbs with their subjects, as in `train,plan:sr info:*`. `read`: reads the value,
    or has the names that it may be; None: those in `metavar`."""
    help += "" if default in (None, []) or "default" in help else f" (default: {str(default).strip()})"
    names = metavar.split("|") if read is None else read if isinstance(read, Names) else None
    kind = {"type": read} if names is None else {"choices": names}
    return Flag(_served(serves), {**kind, "metavar": metavar, "default": default, "help": help, **more}, needs)


def _switch(serves: str, *needs: Condition, help: str) -> Flag:
    """A flag without a value."""
    return Flag(_served(serves), {"action": "store_true", "help": help}, needs)


def _served(text: str) -> dict[str, str]:
    return {verb: subjects for part in text.split() for verbs, _, subjects in [part.partition(":")]
            for verb in verbs.split(",")}


EVERY = "info,models:* train,compare:src check:srcp plan,explain,simulate:srlcp"
STEP = "train,compare,plan,check,explain,simulate"
NETWORK, UNCUT = f"{STEP}:src", f"{STEP}:sr"
RUN = "train,compare:src"
PRICED = "train,compare,plan,explain,simulate:src"


def _stale(arguments: Any) -> bool:
    found, _ = _known(arguments.scheduler)
    return found is not None and (found.each or (found.parallel == "pipeline" and found.staged.stale))


def asynchronous(arguments: Any) -> bool:
    """Whether each micro-batch has an update of its own on one device or on ranks that are all alike."""
    found, _ = _known(arguments.scheduler)
    return found is not None and found.each


def _known(name: str, kept: str | None = None) -> tuple[Scheduler | None, dict[str, Any]]:
    """The built-in scheduler of this name, or the one that made the order of this file, or `kept`; with its options."""
    from ..schedulers.pipeline import read_file, read_schedule
    from ..schedulers.registry import SCHEDULERS, made_by

    order = None if not name.endswith(".csv") else read_file(name) if kept is None else read_schedule(kept)
    return (SCHEDULERS.get(name), {}) if order is None else made_by(order)


def chosen(arguments: Any) -> list[str]:
    """The names of the command's schedulers."""
    several = arguments.command == "compare"
    return [name.strip() for name in arguments.schedulers.split(",")] if several else [arguments.scheduler]


def _own(arguments: Any) -> bool:
    """Whether a scheduler of the command is a function of the user's."""
    return any(":" in name for name in chosen(arguments))


def _told(option: str, parallel: str | None = None) -> Condition:
    """The condition of a flag that sets an option of schedulers: a scheduler (of this kind) that has the option."""
    def words() -> str:
        from .. import schedulers

        return _any_of(s.name for s in schedulers.SCHEDULERS.values()
                       if option in s.options and parallel in (None, s.parallel))

    return words, lambda a: a.command == "arena" or takes(a, option)


def _any_of(names: Iterable[str]) -> str:
    return f"--scheduler {' or '.join(names)}"


def takes(arguments: Any, option: str) -> bool:
    """Whether one of the chosen schedulers, built-in or the user's own, has this option; True for an unknown name."""
    from .. import schedulers

    try:
        return any(option in schedulers.find(name).options for name in chosen(arguments))
    except ValueError:
        return True


def saved(arguments: Any) -> bool:
    """Whether the run has a checkpoint."""
    from ..training import checkpoint

    return bool(arguments.checkpoint) and checkpoint.exists(arguments.checkpoint)


def hinted(arguments: Any) -> bool:
    """Whether the order is a hint, by the flags or by the plan of a file."""
    from ..schedulers.pipeline import read_file
    from ..schedulers.saved import ORDER

    return arguments.order == "hint" or (arguments.scheduler.endswith(".csv")
                                         and ORDER in read_file(arguments.scheduler).notes)


HINT = ("--order hint", hinted)
VARYING = ("--order hint or --loads", lambda a: hinted(a) or a.loads is not None)
CPU = ("--device cpu", lambda a: a.device == "cpu")
CUDA = ("--device cuda", lambda a: a.device.startswith("cuda"))
OLD = ("a scheduler that trains on older weights", lambda a: _stale(a) or (a.subject == "c" and ":" in a.scheduler))
SAVING = ("--checkpoint DIR", lambda a: a.checkpoint)
NO_LAUNCHER = ("a command that starts its ranks itself: in place of mpiexec -n P, give --ranks P --launch mpiexec",
               lambda a: launcher.size() == 1 or not a.max_restarts)
RESTARTING = ("--max-restarts N", lambda a: a.max_restarts is not None)
RUNNING = ("runs; --dry-run runs nothing", lambda a: not a.dry_run)
ONE_PLAN = ("one plan; --table and --curve show many", lambda a: not (a.table or a.curve))
NO_TABLE = ("plans; --table shows figures", lambda a: not a.table)
PRICED_LINK = ("a link that takes time, by --latency, --bandwidth or --topology",
               lambda a: a.latency or a.bandwidth or a.topology)
NO_NODES = ("one kind of link; --topology has its own", lambda a: not a.topology)
SUMMED = "--gradient-bytes on given times"
PRICING = ("prices; check needs --costs for them", lambda a: a.command != "check" or "--costs" in a.given)
ONE_POLICY = ("one policy; --table shows them all", lambda a: not a.table)
MADE = ("policies; the plan of a file has its own", lambda a: (a.recompute in (None, "none") and a.split == 1)
        or not all(name.endswith(".csv") for name in chosen(a)))
CHOOSING = ("a --temperature above 0; at 0 nothing is drawn", lambda a: a.temperature > 0)
#: the transports that sum gradients over ranks
SUMMING = ("--parallel data, and --replicas", lambda a: a.subject in "rl" or a.replicas > 1)


def _cutting() -> list[str]:
    """The policies that cut a network into stages themselves."""
    from ..schedulers import find, names

    return [name for name in names("pipeline") if find(name).staged.parted]


BY_TIMES = (lambda: f"{_any_of(_cutting())}, which cuts by them",
            lambda a: a.command != "check" or a.scheduler in _cutting())

FLAGS: dict[str, Flag] = {
    "--model": _flag("info:* " + NETWORK, str, "NAME", help="a network; see `minidl models`"),
    "--model-arg": _flag("info:* " + NETWORK, pair, "K=V", ("a network; name it with --model", lambda a: a.model),
        default=[], action="append", help="an argument of the network, such as classes=10, width=64, preset=tiny"),
    "--data": _flag(NETWORK, path, "NAME|PATH",
        help="a data set's name or a path (default: the embedded digits; for tokens, the embedded text)"),
    "--root": _flag(NETWORK, path, "DIR", ("data sets that are found by name", lambda a: a.data in STORED),
        help="the folder with the files of named data sets (default: ./data)"),
    "--tokenizer": _flag(NETWORK, path, "bytes|N|FILE.json", default="bytes",
        help="the tokens of text: bytes (default), N learned byte pairs, or a file of the tokenizers library"),
    "--standardize": _switch(RUN,
        help="scale numbers or images of your own to mean 0 and variance 1; checkpoints carry the scale"),
    "--workers": _flag(RUN, whole(0, 256), "N",
        help="processes that decode pictures (default: one for each core but one; 0: none)"),
    "--feed": _flag("train,compare:s", str, "batches|ring|hold=K", default="batches",
        help="how training data come: as batches (default); as a ring of a batch, in which each step has one new "
             "sample; or each batch K times in a row"),
    "--batch-size": _flag(NETWORK, whole(1), "B", default=64, help="samples of a step, over all ranks together"),
    "--micro-batches": _flag("train,compare:src check:srcp plan,explain,simulate:srlcp", whole(1, 1 << 19), "M",
        default=1, help="cut each batch into M parts, whose gradients are added"),
    "--optimizer": _flag(NETWORK + " profile:*", Names("training.job:OPTIMIZERS"), "NAME", default="sgd",
        help="the optimizer: %(choices)s"),
    "--optimizer-arg": _flag(NETWORK, pair, "K=V", default=[], action="append",
        help="another argument of the optimizer, such as eps=1e-6, nesterov=true, adjust_lr_fn=original"),
    "--lr": _flag(RUN, number(0), "X",
        help="learning rate (default: by network and optimizer, mostly 0.05 for sgd, 0.003 for the others)"),
    "--lr-schedule": _flag("train:src", None, "constant|cosine", default="constant",
        help="the learning rate after --warmup; cosine ends at 0"),
    "--warmup": _flag("train:src", whole(0), "N", default=0, help="let the learning rate rise over the first N steps"),
    "--rates-by-delay": _flag("train:c", whole(1), "N", OLD, RUNNING,
        help="divide each stage's rate by its delay, less and less over N steps (PipeMare)"),
    "--momentum": _flag(NETWORK, number(0), "X", (lambda: f"--optimizer {' or '.join(MOMENTUM)}",
        lambda a: a.optimizer in MOMENTUM),
        help="momentum, below 1 (default: 0.9 for sgd, 0 for rmsprop, 0.95 for muon)"),
    "--weight-decay": _flag(RUN, number(0), "X",
        help="weight decay (default: 0.01 for adamw and nadamw, 0.1 for muon, else 0)"),
    "--dither": _flag(NETWORK, number(0), "S", default=0.0,
        help="round gradients of pre-activations at random to multiples of S standard deviations (default 0: not)"),
    "--newton": _flag(UNCUT, whole(1), "K",
        help="compute the forward pass of narrow layers by K Newton iterations (DeepPCR)"),
    "--backward": _flag(UNCUT, Names("passes.sweeps:BACKWARD"), "NAME", default="exact",
        help="the backward pass, %(choices)s: the chain of layers (default); sweeps of all layers or time steps at "
             "once; all residual blocks, with sums along their skips; products of Jacobians, by doubling"),
    "--sweeps": _flag(UNCUT, whole(0), "K",
        ("--backward jacobi or highway", lambda a: a.backward in ("jacobi", "highway")),
        help="the number of sweeps (default: until they are exact)"),
    "--block": _flag(UNCUT, whole(1), "B", ("--backward jacobi", lambda a: a.backward == "jacobi"),
        help="layers or time steps through which a sweep goes in order (default 1; all of them: the exact pass)"),
    "--clip": _flag(NETWORK, number(1e-12), "X", help="scale all gradients down if their global norm is larger than X"),
    "--seed": _flag(RUN + " fuzz,sample:*", whole(0, (1 << 64) - 1), "S", CHOOSING, default=0,
        help="the seed of weights, data order and dropout"),
    "--device": _flag(NETWORK + " profile,kernels:*", str, "cpu|cuda[:N]", default="cpu",
        help="cpu or cuda[:N] (default: cpu; for kernels, all devices that are there)"),
    "--tf32": _switch(NETWORK, CUDA, help="on cuda: products and convolutions may round float32 for the tensor cores"),
    "--nondeterministic": _switch(NETWORK, CUDA,
        help="on cuda: allow cuDNN kernels whose last bits vary from call to call"),
    "--dependent-launch": _switch(NETWORK, CUDA,
        help="on cuda, from Hopper on: in a captured step, a kernel may start before the one before it has ended, and "
             "waits for it before it touches memory"),
    "--dtype": _flag(NETWORK, Names("training.job:DTYPES"), "TYPE", default="float32",
        help="float type: %(choices)s (default float32); bf16 and fp16, on cuda, are of products alone"),
    "--lanes": _flag(RUN, Names("devices.device:LANES"), "KIND", CPU,
        help="%(choices)s: on the CPU, compiled code (the default if it can be) or Python calls the kernels of tasks"),
    "--fusion": _flag(NETWORK, rules, "all|none|RULE,..",
        help="merge launches: casts, batch_norm_act, batch_norm_grad, squeeze_excite, flash_attention, epilogue, "
             "slabs, additions, slopes, weight_updates, updates, in_place (default: all on cuda, none on cpu)"),
    "--memory-limit": _flag(NETWORK + " arena:*", size, "SIZE",
        help="the most memory per rank, such as 2GiB: the fastest plan within it is chosen, also one that computes "
             "activations again; in the arena, the most memory of an entry (default 1GiB)"),
    "--order": _flag("train,compare:rc plan,explain,simulate:rcp", None, "fixed|hint", ONE_PLAN, default="fixed",
        help="hint: each rank runs its first ready task of the order, and keeps at most --scheduler-arg cap=K "
             "micro-batches, such as 2p-s (default: as many as the order does); data-parallel ranks choose the next "
             "sum together"),
    "--jitter": _flag("simulate:rlcp", number(0, 10), "SIGMA", VARYING,
        help="draw the times of tasks, with this spread from micro-batch to micro-batch, and half of it by themselves; "
             "with --loads, the loads of experts, from layer to layer and step to step"),
    "--draws": _flag("simulate:rlcp", whole(1, 1 << 16), "N", ("--jitter SIGMA", lambda a: a.jitter), default=100,
        help="how many draws"),
    "--recompute": _flag(PRICED, str, "none|all|sqrt|auto|I,J,..", ONE_POLICY, MADE,
        help="compute activations again, but keep all (none), those between all blocks (all), between sqrt(L) parts, "
             "the best in --memory-limit (auto, the default with it), or of layers I, J, .."),
    "--offload": _flag(PRICED, Names("passes.offload:EACH"), "WHAT", ONE_POLICY, default="none",
        help="%(choices)s: keep these in a file, on cuda in the host's memory, while no task needs them; with "
             "--memory-limit only as many as it needs, or what is fastest"),
    "--offload-to": _flag(PRICED, path, "FILE", ("--offload", lambda a: a.offload != "none"), CPU,
        help="a new file for it, on a disk with room, which goes with the process (default: a temporary one)"),
    "--shard": _flag(STEP + ":rc", shards_of, "LEVEL[,prefetch=N|full|auto|N+N+..][,keep=I+J]", default=0,
        help="what ranks share out: the optimizer's states (1, ZeRO 1), gradients too (2), parameters too (3, FSDP); "
             "how many layers (stages) ahead are whole (prefetch; in a pipeline a number for each rank, or auto: "
             "min(r + 2, all) stages on rank r, the used one among them), and which stay whole (keep), is searched if "
             "it is left out; with --replicas or --scheduler barrier, buckets or no_overlap"),
    "--experts-over": _flag(f"{STEP}:r", None, "none|data", default="none",
        help="data: each data-parallel rank has a share of the experts, and rows travel to the rank of theirs "
             "(default: none, each has all)"),
    "--split": _flag(PRICED, parts_of, "none|K|auto", MADE, default=1,
        help="cut each task that can be cut into K parts, for several streams, or K lanes of each rank; auto, not in "
             "pipelines: if that is predicted to be faster, into as many as there are streams (default: none)"),
    "--group-weights": _flag("train,compare,plan,explain,simulate:sr", parts_of, "auto|N|none", default=1,
        help="let up to N weight gradients that are alike wait for each other, to be one launch; auto: if that is "
             "predicted to be faster, as many as are fastest (default: none)"),
    "--parallel": _flag("schedulers:* train,compare:src plan,explain,simulate:srlcp check:srcp", None,
        "none|data|pipeline", default="none",
        help="how ranks share the training (default: none, one device)"),
    "--scheduler": _flag("train:src plan,explain,simulate:srlcp check:rcp", str, "S",
        ("one policy; --table shows all published ones, and one of your own",
         lambda a: not a.table or ":" in a.scheduler or a.scheduler.endswith(".csv")), default="in_order",
        help="the policy, see `minidl schedulers` (default: in_order; priority with --parallel data, one_f_one_b "
             "with pipeline); for check, the one of a pipeline's plan; with --table, one of your own"),
    "--schedulers": _flag("compare:src", str, "A,B,C", default="in_order,multi_stream",
        help="the policies to compare (default: in_order,multi_stream; barrier,priority with --parallel data, "
             "gpipe,one_f_one_b with pipeline)"),
    "--scheduler-arg": _flag("train,compare:src plan,explain,simulate:srlcp check:rcp", pair, "K=V",
        ("one policy, by --scheduler; --table shows them all",
         lambda a: not a.table and (a.command != "check" or "--scheduler" in a.given)), default=[], action="append",
        help="an argument of the policy, see `minidl schedulers`"),
    "--streams": _flag("train,compare,plan,explain,simulate:s", whole(1, 1024), "N", _told("streams"),
        help="how many streams it uses (default: 2; multi_stream tries up to the cores, if costs were measured)"),
    "--side-sms": _flag("train,compare,plan,explain,simulate:s",
        lambda text: text if text == "auto" else whole(1)(text), "N|auto", CUDA, _told("side_sms"),
        help="on cuda: so many SMs for the second stream, and the others for the main one; auto: the fastest of some "
             "shares, or none (default: each may use all)"),
    "--costs": _flag("train,compare,check:src plan,explain,simulate:srcp", path, "measured|analytic|FILE",
        ("a network; times of a pipeline without --model come from FILE",
         lambda a: a.subject != "p" or a.costs not in ("measured", "analytic")), default="measured",
        help="costs of tasks (default: measured); stages are cut by FILE's, else by analytic ones, also for check"),
    "--pairs": _flag("train,compare,plan,explain,simulate:s", None, "measured|estimated|none",
        ("schedulers of several streams, and --save-costs", lambda a: takes(a, "streams") or a.save_costs),
        help="the slowdown of tasks on two streams (default: as --costs for multi_region, else none)"),
    "--save-costs": _flag(PRICED + " profile:*", path, "FILE.json", help="write costs and pairs to a file for --costs"),
    "--curve": _switch("plan:src",
        help="print the plans that no other one beats in predicted step and planned peak, over what --memory-limit "
             "searches"),
    "--steps": _flag(RUN, whole(1), "N", help="train for N steps"),
    "--epochs": _flag(RUN, whole(1), "N", ("runs without --steps; leave one out", lambda a: not a.steps),
        help="train for N epochs"),
    "--steps-per-launch": _flag("train:s", whole(1), "K", RUNNING,
        ("runs without --trace and --html, which describe single steps", lambda a: not (a.trace or a.html)),
        help="run up to K steps in one launch, on batches that lie in memory: for networks whose steps are so short "
             "that the host binds (default 1)"),
    "--checkpoint": _flag("train:src", path, "DIR", RUNNING, help="save parameters and everything that --resume needs"),
    "--resume": _flag("train:src", None, "auto", SAVING, nargs="?", const=True,
        help="continue from the checkpoint; auto: if there is one; a given --lr overrides the saved one"),
    "--max-restarts": _flag("train:src", whole(0), "N", SAVING, RUNNING, NO_LAUNCHER,
        help="supervise the run: if it fails, start it again from its last checkpoint, at most N times"),
    "--launch": _flag("train:rc", command, "COMMAND", RESTARTING, ("--ranks P", lambda a: a.ranks),
        help="what starts the ranks of a supervised run, such as mpiexec or \"srun --mpi=pmix\", which gets -n P "
             "(default: threads of one process)"),
    "--least-ranks": _flag("train:rc", whole(1), "P", RESTARTING, ("--ranks P", lambda a: a.ranks),
        ("a number of at most --ranks", lambda a: not a.ranks or a.least_ranks is None or a.least_ranks <= a.ranks),
        help="if a restart comes no further, start fewer ranks, but at least P"),
    "--reorder-sums": _switch("train:src", ("a run that goes on; add --resume", lambda a: a.resume),
        help="resume although the schedule adds up gradients in another order, and so gives other bits"),
    "--cases": _flag("fuzz:*", whole(1), "N",
        help="how many cases, with consecutive seeds (default: 100 random steps, 3 of your own)"),
    "--init": _flag(RUN, path, "FILE|INDEX|FOLDER",
        ("a run that begins; --resume has all weights", lambda a: not a.resume or saved(a)),
        help="start from weights in safetensors with torchvision's, timm's or Hugging Face's names: a file, an index "
             "of shards, or a folder that has either"),
    "--shards": _flag("export:*", size, "SIZE",
        help="write files of at most SIZE and their index, into the folder FILE or beside FILE.safetensors"),
    "--style": _flag("export:*", Names("training.weights:STYLES"), "NAME", default="state",
        help="%(choices)s: names as in a state dict, torchvision's and Hugging Face's (the default), or timm's"),
    "--checkpoint-every": _flag("train:src", every, "N|Nmin", SAVING,
        help="save after every N steps or minutes (default: each epoch)"),
    "--keep": _flag("train:src", whole(1), "K", SAVING,
        help="also keep the last K checkpoints, and the best one on test data (default: the newest)"),
    "--log-every": _flag("train:src", whole(1), "N", RUNNING,
        help="print loss, learning rate, samples a second and time left every N steps"),
    "--log": _flag("train:src", path, "FILE.jsonl", RUNNING,
        help="write these and the metrics on test data to a file, a JSON object a line"),
    "--tensorboard": _flag("train:src", path, "DIR", RUNNING, help="write them for TensorBoard"),
    "--patience": _flag("train:src", patience, "S[,DIR]", RUNNING,
        help="after S seconds without progress, or on SIGUSR2, each rank writes what it does and waits for into DIR "
             "(default: standstill), for `minidl report DIR`"),
    "--status": _flag("train:src", path, "FILE|URL|kubeflow", RUNNING,
        help="write progress, remaining time, loss and throughput as one JSON object: to a file every second, or by "
             "POST every five; kubeflow: to the TrainJob that runs this"),
    "--dry-run": _switch("train:src", help="plan and predict, but do not train"),
    "--prompt": _flag("sample:*", str, "TEXT", default="The ", help="the beginning of the text"),
    "--length": _flag("sample:*", whole(1, 1 << 20), "N", default=200, help="how many tokens to write"),
    "--temperature": _flag("sample:*", number(0), "X", default=0.8,
        help="below 1: prefers likely tokens; 0: always takes the likeliest"),
    "--top": _flag("sample:*", whole(1), "K", CHOOSING, help="draw among the K likeliest tokens"),
    "--ranks": _flag("train,compare:rc check:rcp plan,explain,simulate:rlcp", whole(1, 1 << 20), "P",
        ("--gradient-bytes or --loads on given times", lambda a: a.subject != "l" or a.gradient_bytes or a.loads),
        help="the number of ranks of each replica; compare, and train without a launcher, run them as threads"),
    "--replicas": _flag("train,compare,check:c plan,explain,simulate:cp", whole(1, 1 << 20), "R",
        (SUMMED, lambda a: a.subject != "p" or a.gradient_bytes),
        default=1, help="copies of the pipeline, on R times as many ranks, each on its share of every batch"),
    "--chunks": _flag("train:c plan,check,explain,simulate:cp", whole(1, 1 << 20), "V", help="stages per rank"),
    "--stages": _flag("profile:*", whole(1, 1 << 12), "N",
        help="cut the layers into N stages of about equal time (default: each layer is a stage)"),
    "--forward": _flag("plan,explain,simulate:lp check:p", numbers, "F", BY_TIMES,
        help="time of a forward: one number for a rank, or one per stage or layer"),
    "--output-grad": _flag("plan,explain,simulate:lp check:p", numbers, "O", BY_TIMES,
        help="time of an output gradient, as --forward"),
    "--weight-grad": _flag("plan,explain,simulate:lp check:p", numbers, "W", BY_TIMES,
        help="time of a weight gradient, as --forward"),
    "--gradient-bytes": _flag("plan,explain,simulate:lp", sizes, "BYTES",
        ("--topology, and --parallel data or --replicas",
         lambda a: a.topology and (a.subject == "l" or a.replicas > 1)),
        help="bytes of gradients that ranks sum, of all layers or stages alike or of each, on given times"),
    "--message-bytes": _flag("plan,explain,simulate:p", size, "BYTES", ("--topology", lambda a: a.topology), default=0,
        help="bytes of an activation or its gradient between two stages, on given times"),
    "--topology": _flag("plan,explain,simulate:rlcp", topology, "nodes=N,inside=L:B,across=L:B,..",
        (SUMMED, lambda a: a.subject != "l" or a.gradient_bytes),
        help="nodes of equal size and their links: latency in microseconds, bandwidth per second, as in "
             "nodes=8,inside=2:300GB,across=10:50GB,rails=8; fill=replicas if neighbours are replicas of a stage, not "
             "ranks of a pipeline"),
    "--latency": _flag("plan,explain,simulate:rcp check:r", number(0), "C", PRICING, NO_NODES, default=0.0,
        help="the latency of a link between two ranks: of a network in microseconds, else as the given times"),
    "--bandwidth": _flag("plan,explain,simulate:rcp check:r", size, "BYTES", PRICING, NO_NODES,
        ("bytes: a network, or --costs FILE", lambda a: a.subject != "p" or "--costs" in a.given),
        help="the bandwidth of a link, per second, such as 1.25GB (default: unlimited)"),
    "--update-every": _flag(STEP + ":c", whole(1), "A",
        ("a scheduler of your own, file.py:function; the others have their own number", _own),
        help="update weights after every A micro-batches, on older weights (default: at the end of a step)"),
    "--slices": _flag(STEP + ":c", whole(1), "Q",
        ("a scheduler of your own, file.py:function; seq1f1b has its --scheduler-arg slices=Q", _own),
        help="cut the sequences of each micro-batch into Q slices, ordered as seq1f1b does (default 1)"),
    "--activation-cap": _flag("train,compare:c plan,check,explain,simulate:cp", number(0), "K",
        help="the most live activations on a rank, in units of its whole part of the model"),
    "--table": _switch("simulate:p", help="price all pipeline policies, and mark the best"),
    "--objective": _flag("plan,explain,simulate:cp", None, "makespan|span|period", _told("objective"),
        help="what optimal minimises (default: makespan)"),
    "--time-limit": _flag("plan,explain,simulate:cp arena:*", number(0), "S", _told("time_limit"),
        help="the most seconds for a search by `optimal` (default 60), or an entry of the arena (default 10)"),
    "--alone": _switch("arena:*", help="rank the entries without the published policies"),
    "--k": _flag("train,compare:r plan,explain,simulate:rl", lambda text: None if text == "auto" else whole(0)(text),
        "K|auto", _told("k"),
        help="how many layers' weight gradients wait for the end of the backward pass (default: auto, a search)"),
    "--buckets": _flag("train,compare,check:r plan,explain,simulate:rl", whole(1), "N", _told("buckets"),
        help="N buckets with equal numbers of layers (default: 2 on given times; for a network, buckets of 25 MB)"),
    "--slow": _flag("train,compare,plan:r", slow_rank, "RANK=FACTOR", _told("slow"), action="append",
        help="this rank is FACTOR times slower on the simulated clock, as in 0=4; may be repeated"),
    "--parts": _flag("plan,explain,simulate:l", whole(1, 1 << 10), "N", _told("part_bytes", "data"), default=8,
        help="parts into which a layer's gradient is cut, on given times"),
    "--comm": _flag("plan,explain,simulate:l", numbers, "C0,C1,..",
        help="time of each layer's all-reduce; give --forward, --output-grad, --weight-grad with it"),
    "--exchange": _flag("plan,explain,simulate:lp", numbers, "X0,X1,..",
        help="time of each of the four exchanges of a layer with experts on all ranks, 0 without: tokens to experts "
             "and back, forward and backward; of a pipeline, as --forward, of a stage's exchanges one way (default: no "
             "experts)"),
    "--loads": _flag("simulate:rl", numbers, "L0,L1,..",
        help="tokens of each expert, as a run logs them: the times of its rank's tasks follow them"),
    "--collective": _flag("plan,explain,simulate:rlcp check:r", Names("pricing.collectives:SHAPES"), "NAME", SUMMING,
        PRICED_LINK, PRICING, default="ring", help="the algorithm by which ranks sum: %(choices)s"),
    "--servers": _flag("plan,explain,simulate:rc check:r", whole(0), "N",
        ("--collective parameter_server", lambda a: a.collective == "parameter_server"), default=0,
        help="machines of a parameter_server"),
    "--transport": _flag("train:rc", Names("training.same:TRANSPORTS"), "NAME", CUDA, default="staged",
        help="how gradients travel on CUDA, %(choices)s: by MPI through the host (the default), by MPI, by NCCL"),
    "--save": _flag("plan:srlcp", path, "FILE.csv", ONE_PLAN, help="write the schedule"),
    "--format": _flag("plan:srlcp", None, "minidl|torch|chakra", ("--save FILE", lambda a: a.save), default="minidl",
        help="what --save writes: minidl's notation (the default); of a pipeline, the grid of torch's runtime; "
             "or a folder with execution traces of MLCommons Chakra, one for each rank"),
    "--svg": _flag("plan,simulate:srlcp", path, "FILE.svg", NO_TABLE,
        help="draw the predicted timeline, or the curve of --curve"),
    "--html": _flag("train,compare:src plan,explain,simulate:srlcp arena,report:*", path, "FILE.html", NO_TABLE,
        RUNNING, help="write one page: the timeline, predicted over measured, every task explained, memory, waits, all "
                      "figures; a run is traced for it, which adds some microseconds a task"),
    "--trace": _flag("train:src simulate:srlcp", path, "FILE", ONE_PLAN, RUNNING,
        help="write the timeline of the last step, or the predicted one, for ui.perfetto.dev; NAME.et: one file for "
             "each rank in the form of MLCommons Chakra"),
    "--trace-factor": _flag("train:src plan,simulate:srlcp", number(1e-9), "X",
        ("--trace NAME.et or --format chakra", lambda a: (a.trace or "").endswith(".et") or a.format == "chakra"),
        help="multiply the times of a Chakra trace, which has whole microseconds"),
    "--log-versions": _flag("train:src", path, "FILE.jsonl", OLD, RUNNING,
        help="write which weight version each task read, a line per task"),
    "--log-order": _flag("train:rc", path, "FILE.jsonl", HINT, RUNNING,
        help="write in which order each rank ran its tasks, or its sums, a line per step and rank"),
    "--replay": _flag("train:src", path, "FILE.jsonl",
        ("an asynchronous scheduler, or --order hint", lambda a: asynchronous(a) or hinted(a)), RUNNING,
        help="repeat a run from its --log-versions, without the schedule or the clock, or from its --log-order"),
    "--against": _flag("report:*", path, "TRACE", help="another trace, to compare with"),
    "--config": _flag(EVERY.removeprefix("info,models:*"), path, "FILE.toml",
        help="read flags from a file, as in batch-size = 32; the command line overrides them"),
    "--json": _switch(EVERY + " export,fuzz,new,schedulers,sample,profile,arena,kernels,report:*",
        help="print one JSON object, and nothing else, on standard output"),
    "--each-rank": _switch("info:*", ("info without --model", lambda a: not a.model),
        help="under mpiexec: print the setup of every rank, and whether they agree"),
}
#: the first flag of each group in the help -> the group's title
TITLES = {"--model": "network and data", "--device": "device", "--split": "schedule", "--steps": "run",
          "--prompt": "text", "--ranks": "pipelines", "--k": "data parallelism", "--save": "files",
          "--each-rank": "ranks"}


def add_flags(parser: argparse.ArgumentParser, verb: str) -> None:
    """Adds the flags of this verb; for all other flags, only their defaults."""
    title, group = "", parser.add_argument_group()
    for name, flag in FLAGS.items():
        title = TITLES.get(name, title)
        if verb in flag.serves:
            if group.title != title:
                group = parser.add_argument_group(title)
            group.add_argument(name, **flag.options)
        else:
            parser.set_defaults(**{name[2:].replace("-", "_"): flag.options.get("default", False)})


def subject_of(arguments: Any) -> str:
    """The letter of the subject of the command. Raises UsageError for flags that contradict each other."""
    times = arguments.given & {"--forward", "--output-grad", "--weight-grad", "--table"}
    if arguments.command in ("train", "compare"):
        return {"data": "r", "pipeline": "c"}.get(arguments.parallel, "s")
    if arguments.parallel == "data":
        return "r" if arguments.model else "l"
    if times and arguments.model:
        raise UsageError(f"{min(times)} goes with a pipeline on given times, --model with a network: leave one out")
    if arguments.parallel == "pipeline" or arguments.given & PIPELINE:
        return "c" if arguments.model else "p"
    return "s"


def kind_of(arguments: Any) -> str:
    """How the subject of the command is spread over ranks: none, data or pipeline."""
    return {"r": "data", "l": "data", "c": "pipeline", "p": "pipeline"}.get(arguments.subject, "none")


def check_flags(arguments: Any) -> None:
    """Raises UsageError for a flag that would have no effect, for a --scheduler-arg that has its own flag or that none
    of the compared schedulers takes, and for a pipeline that is too large."""
    for name in (name for name in FLAGS if name in arguments.given):
        subjects = FLAGS[name].serves[arguments.command]
        if "*" not in subjects and arguments.subject not in subjects:
            raise UsageError(f"{name} has no effect on {SUBJECTS[arguments.subject]}; it is for "
                             f"{' or '.join(SUBJECTS[s] for s in subjects)}")
        for words, hold in FLAGS[name].needs:
            if not hold(arguments):
                raise UsageError(f"{name} has no effect here; it goes with "
                                 f"{words if isinstance(words, str) else words()}")
    for name, other in {"cost": "--costs", "streams": "--streams", "memory_limit": "--memory-limit", "k": "--k",
                        "objective": "--objective", "time_limit": "--time-limit", "buckets": "--buckets"}.items():
        if name in dict(arguments.scheduler_arg) and (name == "cost" or other in arguments.given):
            raise UsageError(f"--scheduler-arg {name} has no effect here; use {other}")
    for name in dict(arguments.scheduler_arg):
        if arguments.command == "compare" and not takes(arguments, name):
            raise UsageError(f"--scheduler-arg {name} has no effect here; none of {arguments.schedulers} takes it")
    ranks, chunks, parts = arguments.ranks or 1, arguments.chunks or 1, arguments.micro_batches
    if arguments.subject == "c" and arguments.replicas > 1 and arguments.batch_size % (arguments.replicas * parts):
        raise UsageError(f"a batch of {arguments.batch_size} does not divide into {parts} micro-batches on each of "
                         f"{arguments.replicas} replicas")
    if arguments.subject in "cp" and ranks * chunks * parts > MOST:
        raise UsageError(f"{ranks:,} ranks with {chunks:,} chunks each and {parts:,} micro-batches have "
                         f"{ranks * chunks * parts:,} forward tasks; at most {MOST:,} can be planned")


def job(arguments: argparse.Namespace, under: str | None = None, kept: str | None = None) -> Job:
    """The job of the flags, `under` another scheduler, whose order is `kept`. Raises UsageError without a model."""
    from .. import models
    from ..training.checkpoint import place_of
    from ..training.job import Job

    if not arguments.model:
        given_times = ("; or --ranks P for a pipeline on given times"
                       if arguments.command in ("plan", "check", "explain", "simulate") else "")
        raise UsageError(f"the network is missing; give --model NAME (see `minidl models`){given_times}")
    found, noted = _known(under or arguments.scheduler, kept)
    each = found is not None and found.each
    every, groups, slices = 1 if each else arguments.update_every, 1, arguments.slices or 1
    if arguments.subject == "c" and found is not None and found.parallel == "pipeline":
        policy, options = found.staged, noted or dict(arguments.scheduler_arg)
        every = policy.update_every(arguments.micro_batches, options.get("mini_batches", 1)) if policy.stale else every
        groups, slices = policy.groups, arguments.slices or options.get("slices", policy.slices)
    chosen = ("auto" if arguments.memory_limit and arguments.command != "check" and arguments.offload == "none"
              else "none")
    lr = models.learning_rate(arguments.model, arguments.optimizer) if arguments.lr is None else arguments.lr
    own: dict[str, Any] = {
        "model_args": dict(arguments.model_arg), "optimizer_args": dict(arguments.optimizer_arg),
        "deterministic": not arguments.nondeterministic,
        "scaling_from": str(place_of(arguments.checkpoint)) if arguments.resume else None,
        "update_every": every, "slices": slices, "groups": groups, "lr": float(lr),
        "scheduler": under or arguments.scheduler, "parallel": kind_of(arguments),
        "scheduler_args": dict(arguments.scheduler_arg) | {
            name: value for name in ("slow", "side_sms") if (value := getattr(arguments, name))},
        "recompute": chosen if arguments.recompute is None else arguments.recompute, "lanes": arguments.lanes or ""}
    return Job(**{f.name: getattr(arguments, f.name) for f in fields(Job) if f.name not in own} | own)
