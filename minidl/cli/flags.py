"""All flags, and where each has an effect. minidl rejects a flag without an effect."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from .values import (BACKWARD, DTYPES, MOMENTUM, OPTIMIZERS, RULES, STORED, Names, every, number, numbers, pair,
                     parts_of, path, real, rules, shards_of, size, slow_rank, whole)

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
    its effect, in words and as a test of the arguments; `options`: argparse's, whose help may have `%(terms)s`."""

    serves: Mapping[str, str]
    options: Mapping[str, Any]
    needs: tuple[Condition, ...] = ()
    terms: Names | None = None


def _flag(serves: str, *needs: Condition, terms: Names | None = None, **options: Any) -> Flag:
    return Flag(dict(part.partition(":")[::2] for part in serves.split()), options, needs, terms)


EVERY = "info:* models:* train:src compare:src plan:srlcp check:srcp explain:srlcp simulate:srlcp"
NETWORK = "train:src compare:src plan:src check:src explain:src simulate:src"
RUN = "train:src compare:src"
UNCUT = "train:sr compare:sr plan:sr check:sr explain:sr simulate:sr"
PRICED = "train:src compare:src plan:src explain:src simulate:src"


def _stale(arguments: Any) -> bool:
    found, _ = _known(arguments.scheduler)
    return found is not None and (found.each or (found.parallel == "pipeline" and found.staged.stale))


def asynchronous(arguments: Any) -> bool:
    """Whether each micro-batch has an update of its own on one device or on ranks that are all alike."""
    found, _ = _known(arguments.scheduler)
    return found is not None and found.each


def _known(name: str) -> tuple[Scheduler | None, dict[str, Any]]:
    """The built-in scheduler of this name, or the one that made the order of this file, with its options."""
    from ..schedulers.pipeline import read_file
    from ..schedulers.registry import SCHEDULERS, made_by

    return made_by(read_file(name)) if name.endswith(".csv") else (SCHEDULERS.get(name), {})


def _own(arguments: Any) -> bool:
    """Whether a scheduler of the command is a function of the user's."""
    return ":" in (arguments.schedulers if arguments.command == "compare" else arguments.scheduler)


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

    names = arguments.schedulers.split(",") if arguments.command == "compare" else [arguments.scheduler]
    for name in map(str.strip, names):
        try:
            found = schedulers.find(name)
        except ValueError:
            return True
        if option in found.options:
            return True
    return False


def saved(arguments: Any) -> bool:
    """Whether the run has a checkpoint."""
    from ..training import checkpoint

    return bool(arguments.checkpoint) and checkpoint.exists(arguments.checkpoint)


CPU = ("--device cpu", lambda a: a.device == "cpu")
CUDA = ("--device cuda", lambda a: a.device.startswith("cuda"))
OLD = ("a scheduler that trains on older weights", lambda a: _stale(a) or (a.subject == "c" and ":" in a.scheduler))
SAVING = ("--checkpoint DIR", lambda a: a.checkpoint)
RUNNING = ("runs; --dry-run runs nothing", lambda a: not a.dry_run)
ONE_PLAN = ("one plan; --table and --curve show many", lambda a: not (a.table or a.curve))
NO_TABLE = ("plans; --table shows figures", lambda a: not a.table)
PRICED_LINK = ("a link that takes time, by --latency or --bandwidth", lambda a: a.latency or a.bandwidth)
PRICING = ("prices; check needs --costs for them", lambda a: a.command != "check" or "--costs" in a.given)
CHOOSING = ("a --temperature above 0; at 0 nothing is drawn", lambda a: a.temperature > 0)
#: the transports that sum gradients over ranks
SUMMING = ("--parallel data, and --replicas", lambda a: a.subject == "r" or a.replicas > 1)


def _cutting() -> list[str]:
    """The policies that cut a network into stages themselves."""
    from ..schedulers import find, names

    return [name for name in names("pipeline") if find(name).staged.parted]


BY_TIMES = (lambda: f"{_any_of(_cutting())}, which cuts by them",
            lambda a: a.command != "check" or a.scheduler in _cutting())

FLAGS: dict[str, dict[str, Flag]] = {
    "network and data": {
        "--model": _flag("info:* " + NETWORK, metavar="NAME", help="a network; see `minidl models`"),
        "--model-arg": _flag("info:* " + NETWORK, ("a network; name it with --model", lambda a: a.model), type=pair,
                             action="append", default=[], metavar="K=V",
                             help="an argument of the network, such as classes=10, width=64, preset=tiny"),
        "--data": _flag(NETWORK, type=path,
                        help="a data set's name or a path (default: the embedded digits; for a network that takes "
                             "tokens, the embedded text)"),
        "--root": _flag(NETWORK, ("data sets that are found by name", lambda a: a.data in STORED), type=path,
                        help="the folder with the files of named data sets (default: ./data)"),
        "--tokenizer": _flag(NETWORK, type=path, default="bytes", metavar="bytes|N|FILE.json",
                             help="the tokens of text: bytes (default), N tokens of a byte-pair encoding learned "
                                  "from it, or a tokenizer of the tokenizers library"),
        "--standardize": _flag(RUN, action="store_true",
                               help="scale numbers or images of your own to mean 0 and variance 1 over the training "
                                    "part; checkpoints and exported weights carry the mean and deviation"),
        "--workers": _flag(RUN, type=whole(0, 256), metavar="N",
                           help="processes that decode pictures (default: one for each core but one; 0: none)"),
        "--feed": _flag("train:s compare:s", default="batches", metavar="batches|ring|hold=K",
                        help="how training data come: as batches (default); as a ring of a batch, in which each step "
                             "has one new sample; or each batch K times in a row"),
        "--batch-size": _flag(NETWORK, type=whole(1), default=64, metavar="B",
                              help="samples of a step, over all ranks together (default 64)"),
        "--micro-batches": _flag("train:src compare:src plan:srcp check:srcp explain:srcp simulate:srcp",
                                 type=whole(1, 1 << 20), default=1, metavar="M",
                                 help="cut each batch into M parts, whose gradients are added"),
        "--optimizer": _flag(NETWORK + " profile:*", default="sgd", choices=OPTIMIZERS, metavar="NAME",
                             help="the optimizer: %(choices)s (default sgd)"),
        "--lr": _flag(RUN, type=real, metavar="X",
                      help="learning rate (default: by network and optimizer, mostly 0.05 for sgd, 0.003 "
                           "for the others)"),
        "--lr-schedule": _flag("train:src", default="constant", choices=["constant", "cosine"],
                               help="the learning rate after --warmup; cosine ends at 0 (default: constant)"),
        "--warmup": _flag("train:src", type=whole(0), default=0, metavar="N",
                          help="let the learning rate rise over the first N steps"),
        "--rates-by-delay": _flag("train:c", OLD, RUNNING, type=whole(1), metavar="N",
                                  help="divide each stage's rate by its delay, less and less over N steps (PipeMare)"),
        "--momentum": _flag(NETWORK, (lambda: f"--optimizer {MOMENTUM}", lambda a: a.optimizer in MOMENTUM),
                            type=number(0), metavar="X", help="momentum, below 1 (default: %(terms)s)",
                            terms=Names(MOMENTUM.where, lambda found: ", ".join(
                                f"{value:g} for {name}" for name, value in found.items()))),
        "--weight-decay": _flag(RUN, type=number(0), metavar="X",
                                help="weight decay (default: 0.01 for adamw, else 0)"),
        "--dither": _flag(NETWORK, type=number(0), default=0.0, metavar="S",
                          help="round the gradients of pre-activations at random to multiples of S standard deviations "
                               "(default 0: no rounding)"),
        "--newton": _flag(UNCUT, type=whole(1), metavar="K",
                          help="compute the forward pass of narrow layers by K Newton iterations (DeepPCR)"),
        "--backward": _flag(UNCUT, choices=BACKWARD, default="exact", metavar="NAME",
                            help="the backward pass, %(choices)s: the chain of layers (default); in sweeps in which "
                                 "all layers or time steps work at once; or all residual blocks, with sums along "
                                 "their skips; or products of the Jacobians of narrow layers, by doubling"),
        "--sweeps": _flag(UNCUT, ("--backward jacobi or highway", lambda a: a.backward in ("jacobi", "highway")),
                          type=whole(0), metavar="K", help="the number of sweeps (default: until they are exact)"),
        "--block": _flag(UNCUT, ("--backward jacobi", lambda a: a.backward == "jacobi"), type=whole(1), metavar="B",
                         help="layers or time steps through which a sweep goes in order (default 1; with all of them, "
                              "one sweep is the exact backward pass)"),
        "--clip": _flag(NETWORK, type=number(1e-12), metavar="X",
                        help="scale all gradients down if their global norm is larger than X"),
        "--seed": _flag(RUN + " fuzz:* sample:*", CHOOSING, type=whole(0, (1 << 64) - 1), default=0, metavar="S",
                        help="the seed of weights, data order and dropout (default 0)"),
    },
    "device": {
        "--device": _flag(NETWORK + " profile:* kernels:*", default="cpu",
                          help="cpu or cuda[:N] (default: cpu; for kernels, all devices that are there)"),
        "--tf32": _flag(NETWORK, CUDA, action="store_true",
                        help="on cuda: products and convolutions may round float32 for the tensor cores"),
        "--nondeterministic": _flag(NETWORK, CUDA, action="store_true",
                                    help="on cuda: allow cuDNN kernels whose last bits vary from call to call"),
        "--dtype": _flag(NETWORK, default="float32", choices=DTYPES, metavar="TYPE",
                         help="float type: %(choices)s (default float32); bf16 and fp16 (on cuda): products in 16 "
                              "bits, parameters in float32"),
        "--lanes": _flag(RUN, CPU, metavar="KIND",
                         choices=Names("devices.device:LANES"),
                         help="%(choices)s: on the CPU, who makes the calls of tasks: compiled code, without the "
                              "interpreter (native, the default on Linux on x86-64 and aarch64), or Python"),
        "--fusion": _flag(NETWORK, type=rules, metavar="all|none|RULE,..", terms=RULES,
                          help="merge launches by these rules: %(terms)s (default: all on cuda, none on cpu)"),
        "--memory-limit": _flag(NETWORK + " arena:*", type=size, metavar="SIZE",
                                help="the most memory that a plan may need, per rank, such as 2GiB; the fastest plan "
                                     "below it is chosen, also one that computes activations again; in the arena, the "
                                     "memory that an entry may use (default 1GiB)"),
        "--recompute": _flag(PRICED, ("one policy; --table shows them all", lambda a: not a.table),
                             metavar="none|all|sqrt|auto|I,J,..",
                             help="compute activations again instead of keeping all (none); keep those between all "
                                  "blocks, between sqrt(L) parts, the best in --memory-limit, or of layers I, J, .. "
                                  "(default: auto with --memory-limit, else none)"),
        "--offload": _flag(PRICED, ("one policy; --table shows them all", lambda a: not a.table),
                           choices=Names("passes.offload:EACH"), default="none", metavar="WHAT",
                           help="%(choices)s: keep these in a file, on cuda in the host's memory, while no task needs "
                                "them; with --memory-limit only as many as it needs, and what is fastest if nothing "
                                "else is said (default none)"),
        "--offload-to": _flag(PRICED, ("--offload", lambda a: a.offload != "none"), CPU, type=path,
                              metavar="FILE",
                              help="a new file for it, on a disk with room; it has no name while it is used, and "
                                   "goes with the process (default: in the folder for temporary files)"),
        "--shard": _flag("train:rc compare:rc plan:rc check:rc explain:rc simulate:rc", type=shards_of, default=0,
                         metavar="1|2|3[,prefetch=N][,keep=none|I+J]",
                         help="each rank has a share of the optimizer's states (1, ZeRO 1), of gradients as well (2), "
                              "of parameters as well (3, FSDP); if left out, a search sets how many layers (stages) "
                              "ahead are whole (prefetch), and which stay whole within a step (keep); with --replicas "
                              "or --scheduler barrier, buckets or no_overlap (default 0)"),
    },
    "schedule": {
        "--split": _flag("train:src compare:src plan:src explain:src simulate:src", type=parts_of, default=1,
                         metavar="none|K|auto",
                         help="cut each task that can be cut into K parts, which several streams share, or K lanes of "
                              "each rank; auto, on one device or data-parallel ranks: only if that is predicted to be "
                              "faster, into as many as there are streams (default: none)"),
        "--parallel": _flag("schedulers:* train:src compare:src plan:srlcp check:srcp explain:srlcp simulate:srlcp",
                            default="none", choices=["none", "data", "pipeline"],
                            help="how ranks share the training (default: none, one device)"),
        "--scheduler": _flag("train:src plan:srlcp check:rcp explain:srlcp simulate:srlcp",
                             ("one policy; --table shows all published ones, and one of your own",
                              lambda a: not a.table or ":" in a.scheduler or a.scheduler.endswith(".csv")),
                             metavar="S", default="in_order",
                             help="the policy, see `minidl schedulers` (default: in_order; priority with --parallel "
                                  "data, one_f_one_b with pipeline); for check, the policy of a pipeline's plan, for "
                                  "its placement and weight versions; with --table, one of your own"),
        "--schedulers": _flag("compare:src", default="in_order,multi_stream", metavar="A,B,C",
                              help="the policies to compare (default: in_order,multi_stream; barrier,priority with "
                                   "--parallel data, gpipe,one_f_one_b with pipeline)"),
        "--scheduler-arg": _flag("train:src compare:src plan:srlcp check:rcp explain:srlcp simulate:srlcp",
                                 ("one policy, by --scheduler; --table shows them all",
                                  lambda a: not a.table and (a.command != "check" or "--scheduler" in a.given)),
                                 type=pair, action="append", default=[], metavar="K=V",
                                 help="an argument of the policy, see `minidl schedulers`"),
        "--streams": _flag("train:s compare:s plan:s explain:s simulate:s", _told("streams"),
                           type=whole(1, 1024), metavar="N",
                           help="how many streams the policy uses (default: 2; multi_stream also tries more, up to the "
                                "machine's cores, if costs were measured)"),
        "--costs": _flag("train:src compare:src plan:srcp explain:srcp simulate:srcp check:src",
                         ("a network; times of a pipeline without --model come from FILE",
                          lambda a: a.subject != "p" or a.costs not in ("measured", "analytic")),
                         type=path, metavar="measured|analytic|FILE", default="measured",
                         help="task costs for plans and predictions (default: measured); a pipeline's stages are cut "
                              "by FILE's, else by analytic ones, so that check cuts them equally"),
        "--pairs": _flag("train:s compare:s plan:s explain:s simulate:s",
                         ("schedulers of several streams, and --save-costs",
                          lambda a: takes(a, "streams") or a.save_costs),
                         choices=["measured", "estimated", "none"],
                         help="source of the slowdown factors for tasks on two streams (default: as "
                              "--costs for multi_region, else none)"),
        "--save-costs": _flag(PRICED + " profile:*", type=path, metavar="FILE.json",
                              help="write costs and pairs to a file for --costs"),
        "--curve": _flag("plan:src", action="store_true",
                         help="print the plans that no other one beats in both predicted step and planned peak, over "
                              "all that --memory-limit searches and policies (of one device all, or --scheduler)"),
    },
    "run": {
        "--steps": _flag(RUN, type=whole(1), metavar="N", help="train for N steps"),
        "--epochs": _flag(RUN, ("runs without --steps; leave one out", lambda a: not a.steps),
                          type=whole(1), metavar="N", help="train for N epochs"),
        "--checkpoint": _flag("train:src", RUNNING, type=path, metavar="DIR",
                              help="save parameters and everything that --resume needs"),
        "--resume": _flag("train:src", SAVING, action="store_true",
                          help="continue from the checkpoint; a given --lr overrides the saved one"),
        "--reorder-sums": _flag("train:src", ("a run that goes on; add --resume", lambda a: a.resume),
                                action="store_true", help="resume although the schedule adds up gradients in another "
                                "order than the checkpoint's, and so gives other bits"),
        "--cases": _flag("fuzz:*", type=whole(1), metavar="N",
                         help="how many cases, with consecutive seeds (default: 100 random steps, 3 of your own)"),
        "--init": _flag(RUN, ("a run that begins; --resume has all weights", lambda a: not a.resume or saved(a)),
                        type=path, metavar="FILE|INDEX|FOLDER",
                        help="start from weights in safetensors, with torchvision's, timm's or Hugging Face's names: a "
                             "file, an index of shards, or a folder that has either, as save_pretrained writes it"),
        "--shards": _flag("export:*", type=size, metavar="SIZE",
                          help="write files of at most SIZE each and their index, as save_pretrained does, into the "
                               "folder FILE, or beside FILE.safetensors"),
        "--style": _flag("export:*", choices=Names("training.weights:STYLES"), metavar="NAME", default="state",
                         help="%(choices)s: names in the file: as in a state dict, which are torchvision's and Hugging "
                              "Face's (the default), or timm's"),
        "--checkpoint-every": _flag("train:src", SAVING, type=every,
                                    metavar="N|Nmin", help="save after every N steps or minutes (default: each epoch)"),
        "--keep": _flag("train:src", SAVING, type=whole(1), metavar="K",
                        help="also keep the last K checkpoints, and the best one on test data (default: the newest)"),
        "--log-every": _flag("train:src", RUNNING, type=whole(1), metavar="N",
                             help="print loss, learning rate, samples a second and time left every N steps"),
        "--log": _flag("train:src", RUNNING, type=path, metavar="FILE.jsonl",
                       help="write these and the metrics on test data to a file, a JSON object a line"),
        "--tensorboard": _flag("train:src", RUNNING, type=path, metavar="DIR", help="write them for TensorBoard"),
        "--dry-run": _flag("train:src", action="store_true", help="plan and predict, but do not train"),
    },
    "text": {
        "--prompt": _flag("sample:*", default="The ", metavar="TEXT", help="the beginning of the text (default: The)"),
        "--length": _flag("sample:*", type=whole(1, 1 << 20), default=200, metavar="N",
                          help="how many tokens to write (default 200)"),
        "--temperature": _flag("sample:*", type=number(0), default=0.8, metavar="X",
                               help="below 1: prefers likely tokens; 0: always takes the likeliest (default 0.8)"),
        "--top": _flag("sample:*", CHOOSING, type=whole(1), metavar="K", help="draw among the K likeliest tokens"),
    },
    "pipelines": {
        "--ranks": _flag("train:rc compare:rc plan:rcp check:rcp explain:rcp simulate:rcp", type=whole(1, 1 << 20),
                         metavar="P",
                         help="the number of ranks of each replica; compare, and train without a launcher, run them as "
                              "threads of this process"),
        "--replicas": _flag("train:c compare:c plan:c check:c explain:c simulate:c", type=whole(1, 1 << 20), default=1,
                            metavar="R", help="copies of the pipeline, each on its share of every batch, whose ranks "
                                              "sum their gradients; R times as many ranks run (default 1)"),
        "--chunks": _flag("train:c plan:cp check:cp explain:cp simulate:cp", type=whole(1, 1 << 20), metavar="V",
                          help="stages per rank"),
        "--stages": _flag("profile:*", type=whole(1, 1 << 12), metavar="N",
                          help="cut the layers into N stages of about equal time (default: each layer is a stage)"),
        "--forward": _flag("plan:lp check:p explain:lp simulate:lp", BY_TIMES, type=numbers, metavar="F",
                           help="time of a forward: one number for a rank, or one per stage or layer"),
        "--output-grad": _flag("plan:lp check:p explain:lp simulate:lp", BY_TIMES, type=numbers, metavar="O",
                               help="time of an output gradient, as --forward"),
        "--weight-grad": _flag("plan:lp check:p explain:lp simulate:lp", BY_TIMES, type=numbers, metavar="W",
                               help="time of a weight gradient, as --forward"),
        "--latency": _flag("plan:rcp check:r explain:rcp simulate:rcp", PRICING, type=number(0), default=0.0,
                           metavar="C",
                           help="the latency of a link between two ranks: with a network in microseconds, else in the "
                                "unit of the given times"),
        "--bandwidth": _flag("plan:rcp check:r explain:rcp simulate:rcp", PRICING,
                             ("bytes: a network, or --costs FILE",
                              lambda a: a.subject != "p" or "--costs" in a.given), type=size, metavar="BYTES",
                             help="the bandwidth of a link, per second, such as 1.25GB (default: unlimited)"),
        "--update-every": _flag("train:c compare:c plan:c check:c explain:c simulate:c",
                                ("a scheduler of your own, file.py:function; the others have their own number",
                                 _own), type=whole(1), metavar="A",
                                help="update weights after every A micro-batches, for a scheduler of your own that "
                                     "trains on older weights (default: at the end of a step)"),
        "--slices": _flag("train:c compare:c plan:c check:c explain:c simulate:c",
                          ("a scheduler of your own, file.py:function; seq1f1b has its --scheduler-arg slices=Q",
                           _own), type=whole(1),
                          metavar="Q", help="cut the sequences of each micro-batch into Q slices, for a scheduler of "
                                            "your own that orders them as seq1f1b does (default 1)"),
        "--activation-cap": _flag("train:c compare:c plan:cp check:cp explain:cp simulate:cp", type=number(0),
                                  metavar="K",
                                  help="the most live activations on a rank, in units of its whole part of the model"),
        "--table": _flag("simulate:p", action="store_true", help="price all pipeline policies, and mark the best"),
        "--objective": _flag("plan:cp explain:cp simulate:cp", _told("objective"), default="makespan",
                             choices=["makespan", "span", "period"], help="optimal minimises it (default: makespan)"),
        "--time-limit": _flag("plan:cp explain:cp simulate:cp arena:*", _told("time_limit"), type=number(0),
                              default=60.0, metavar="S",
                              help="the most seconds that `optimal` may search (default 60), or that an entry of the "
                                   "arena may take for a problem (default 10)"),
        "--alone": _flag("arena:*", action="store_true", help="rank the entries without the published policies"),
    },
    "data parallelism": {
        "--k": _flag("train:r compare:r plan:rl explain:rl simulate:rl", _told("k"), metavar="K|auto",
                     type=lambda text: None if text == "auto" else whole(0)(text),
                     help="how many layers' weight gradients wait for the end of the backward pass (default: auto, "
                          "which searches it)"),
        "--buckets": _flag("train:r compare:r plan:rl check:r explain:rl simulate:rl", _told("buckets"), type=whole(1),
                           metavar="N", help="N buckets with equal numbers of layers (default: 2 on given times; for "
                                             "a network, buckets of 25 MB)"),
        "--slow": _flag("train:r compare:r plan:r", _told("slow"), type=slow_rank, action="append",
                        metavar="RANK=FACTOR",
                        help="this rank is FACTOR times slower on the simulated clock, as in 0=4; may be repeated"),
        "--parts": _flag("plan:l explain:l simulate:l", _told("part_bytes", "data"), type=whole(1, 1 << 16), default=8,
                         metavar="N", help="parts into which a layer's gradient is cut, on given times (default 8)"),
        "--comm": _flag("plan:l explain:l simulate:l", type=numbers, metavar="C0,C1,..",
                        help="time of each layer's all-reduce; give --forward, --output-grad, --weight-grad with it"),
        "--collective": _flag("plan:rc check:r explain:rc simulate:rc", SUMMING, PRICED_LINK, PRICING, metavar="NAME",
                              choices=Names("pricing.collectives:SHAPES"), default="ring",
                              help="the algorithm by which ranks sum: %(choices)s (default: ring)"),
        "--servers": _flag("plan:rc check:r explain:rc simulate:rc",
                           ("--collective parameter_server", lambda a: a.collective == "parameter_server"),
                           type=whole(0), default=0, metavar="N", help="machines of a parameter_server"),
        "--transport": _flag("train:rc", CUDA, choices=Names("training.same:TRANSPORTS"), metavar="NAME",
                             default="staged",
                             help="how gradients on CUDA travel, %(choices)s: MPI through pinned host memory "
                                  "(staged, the default), an MPI that was built for CUDA, or NCCL"),
    },
    "files": {
        "--save": _flag("plan:srlcp", ONE_PLAN, type=path,
                        metavar="FILE.csv", help="write the schedule"),
        "--format": _flag("plan:cp", ("--save FILE", lambda a: a.save), choices=["minidl", "torch"], default="minidl",
                          help="the notation of --save's file: minidl's, or the grid that torch's pipeline runtime "
                               "loads (default: minidl)"),
        "--svg": _flag("plan:srlcp simulate:srlcp", NO_TABLE, type=path,
                       metavar="FILE.svg", help="draw the predicted timeline, or the curve of --curve"),
        "--html": _flag("train:src compare:src plan:srlcp explain:srlcp simulate:srlcp arena:* report:*",
                        NO_TABLE, RUNNING, type=path,
                        metavar="FILE.html", help="write one page that needs no other file: the timeline, predicted "
                                                  "over measured, every task explained, memory, waits, all figures; "
                                                  "a run is traced for it, which adds some microseconds a task"),
        "--trace": _flag("train:src simulate:srlcp", ONE_PLAN, RUNNING, type=path, metavar="FILE",
                         help="write the timeline of the last step, or the predicted one, for ui.perfetto.dev"),
        "--log-versions": _flag("train:src", OLD, RUNNING, type=path, metavar="FILE.jsonl",
                                help="write which weight version each task read, a line per task"),
        "--replay": _flag("train:sr", ("an asynchronous scheduler", asynchronous), RUNNING, type=path,
                          metavar="FILE.jsonl",
                          help="repeat a run from its --log-versions, without the schedule or the clock"),
        "--against": _flag("report:*", type=path, metavar="TRACE", help="another trace, to compare with"),
        "--config": _flag(EVERY.removeprefix("info:* models:* "), type=path, metavar="FILE.toml",
                          help="read flags from a file, as in batch-size = 32; the command line overrides them"),
        "--json": _flag(EVERY + " export:* fuzz:* new:* schedulers:* sample:* profile:* arena:* kernels:* report:*",
                        action="store_true",
                        help="print one JSON object, and nothing else, on standard output"),
    },
    "ranks": {
        "--each-rank": _flag("info:*", ("info without --model", lambda a: not a.model), action="store_true",
                             help="under mpiexec: print the setup of every rank, and whether they agree"),
    },
}


def add_flags(parser: argparse.ArgumentParser, verb: str) -> None:
    """Adds the flags of this verb; for all other flags, only their defaults."""
    for title, flags in FLAGS.items():
        mine = {name: flag for name, flag in flags.items() if verb in flag.serves}
        group = parser.add_argument_group(title) if mine else parser
        for name, flag in mine.items():
            group.add_argument(name, **flag.options).terms = flag.terms  # type: ignore[attr-defined]
        parser.set_defaults(**{name[2:].replace("-", "_"):
                               flag.options.get("default", False if "action" in flag.options else None)
                               for name, flag in flags.items() if name not in mine})


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
    for flags in FLAGS.values():
        for name, flag in flags.items():
            if name not in arguments.given:
                continue
            subjects = flag.serves[arguments.command]
            if "*" not in subjects and arguments.subject not in subjects:
                raise UsageError(f"{name} has no effect on {SUBJECTS[arguments.subject]}; it is for "
                                 f"{' or '.join(SUBJECTS[s] for s in subjects)}")
            for words, hold in flag.needs:
                if not hold(arguments):
                    raise UsageError(f"{name} has no effect here; it goes with "
                                     f"{words if isinstance(words, str) else words()}")
    for name, other in {"cost": "--costs", "streams": "--streams", "memory_limit": "--memory-limit"}.items():
        if name in dict(arguments.scheduler_arg) and (name == "cost" or other in arguments.given):
            raise UsageError(f"--scheduler-arg {name} has no effect here; use {other}")
    for name in dict(arguments.scheduler_arg):
        if arguments.command == "compare" and not takes(arguments, name):
            raise UsageError(f"--scheduler-arg {name} has no effect here; none of {arguments.schedulers} takes it")
    ranks, chunks, parts = arguments.ranks or 1, arguments.chunks or 1, arguments.micro_batches
    if arguments.replicas > 1 and arguments.batch_size % (arguments.replicas * parts):
        raise UsageError(f"a batch of {arguments.batch_size} does not divide into {parts} micro-batches on each of "
                         f"{arguments.replicas} replicas")
    if arguments.subject in "cp" and ranks * chunks * parts > MOST:
        raise UsageError(f"{ranks:,} ranks with {chunks:,} chunks each and {parts:,} micro-batches have "
                         f"{ranks * chunks * parts:,} forward tasks; at most {MOST:,} can be planned")


def job(arguments: argparse.Namespace, under: str | None = None) -> Job:
    """The job that the flags describe. Raises UsageError without a model."""
    from .. import models
    from ..training.checkpoint import file_of
    from ..training.job import Job

    if not arguments.model:
        given_times = ("; or --ranks P for a pipeline on given times"
                       if arguments.command in ("plan", "check", "explain", "simulate") else "")
        raise UsageError(f"the network is missing; give --model NAME (see `minidl models`){given_times}")
    found, noted = _known(under or arguments.scheduler)
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
        "model_args": dict(arguments.model_arg), "deterministic": not arguments.nondeterministic,
        "scaling_from": str(file_of(arguments.checkpoint)) if arguments.resume else None,
        "update_every": every, "slices": slices, "groups": groups, "lr": float(lr),
        "scheduler": under or arguments.scheduler, "parallel": kind_of(arguments),
        "scheduler_args": dict(arguments.scheduler_arg) | ({"slow": arguments.slow} if arguments.slow else {}),
        "recompute": chosen if arguments.recompute is None else arguments.recompute, "lanes": arguments.lanes or ""}
    return Job(**{f.name: getattr(arguments, f.name) for f in fields(Job) if f.name not in own} | own)
