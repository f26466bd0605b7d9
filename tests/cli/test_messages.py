"""Mistakes on the command line: each is one line that says what to do, exit code 2, and nothing is done. Many were a
riddle, a traceback, or were taken without a word."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from command_line import SMALL, refusal

from minidl.cli import main

OWN = '''
import numpy as np
from minidl import nn

class Net(nn.Module):
    input_shape, classes = (2,), 3
    def __init__(self, outputs=3):
        self.layer = nn.Linear(2, outputs)
    def forward(self, x):
        y = self.layer(x)
        return y * 2 if looks and y.sum() > 0 else y

looks = False
def net(): return Net()
def needs(width): return Net()
def number(): return 3
def bare(): return nn.Linear(2, 3)
def fails(): raise RuntimeError("no such thing")
def five(): return Net(5)
def looking():
    global looks
    looks = True
    return Net()
def points(split, seed): return np.zeros((100, 2)), np.zeros(100, int)
def values(split, seed): return np.zeros((100, 2)), np.zeros(100)
def one_argument(graph): return None
def leaves(*_): raise SystemExit(0)
class Shaped(Net):
    def __init__(self, shape, classes=3):
        super().__init__()
        self.input_shape, self.classes = shape, classes
def number_as_shape(): return Shaped(2)
def list_as_shape(): return Shaped([2])
def array_as_shape(): return Shaped(np.array([2, 2]))
def open_shape(): return Shaped((None, 2))
def text_as_classes(): return Shaped((2,), '3')
'''
#: words of the cases below that stand for several
WORDS = {"STAGED": "SMALL --steps 3 --micro-batches 4 --parallel pipeline --ranks 2",
         "HINT": "plan STAGES --scheduler zb_h1 --order hint",
         "SHARES": "plan STAGES --scheduler zb_h1 --replicas 2 --shard",
         "SHARED": "SMALL --parallel data --scheduler priority", "RESTARTS": "--max-restarts 1 --checkpoint c",
         "STAGES": "--model mlp --model-arg layers=5 --costs analytic --parallel pipeline --ranks 2 --micro-batches 4",
         "SMALL": shlex.join(SMALL), "NET": "--model own.py:net --data own.py:points --steps 1",
         "DENSE": "--model densenet121 --model-arg preset=tiny --batch-size 4 --costs analytic",
         "FIFO": "simulate --parallel data --scheduler fifo", "GPIPE": "--scheduler gpipe --ranks 2 --micro-batches 4",
         "NINES": "9" * 5000, "BRACKETS": "(" * 5000, "MINUSES": "-" * 100_000, "MANY": "1," * 5000 + "1"}
CASES = """
train --model own.py => own.py: name its function as well: own.py:FUNCTION
train --model mlp --data own.py => own.py: name its function as well: own.py:FUNCTION
train NET --scheduler own.py => own.py: name its function as well: own.py:FUNCTION
train --model own.py:nett => own.py has no function nett; it has Net, net, needs, number,
train --model own.py:needs => its argument width has no default; give it one, as in width=64
train --model own.py:number => own.py:number is a int; its function must return an nn.Module
train --model own.py:bare => lacks input_shape and classes; set on its class: input_shape =
train --model own.py:fails => own.py, line 18: RuntimeError: no such thing
train --model own.py:leaves => own.py, line 27: SystemExit: 0
train NET --scheduler own.py:leaves => own.py:leaves failed: SystemExit: 0 (own.py, line 27)
train --model own.py:number_as_shape => input_shape is 2; it must be a tuple of whole numbers above 0, such as
train --model own.py:list_as_shape => input_shape is [2]; it must be a tuple
info --model own.py:array_as_shape => input_shape is array([2, 2]); it must be a tuple
info --model own.py:open_shape => input_shape is (None, 2); it must be a tuple
train --model own.py:text_as_classes => text_as_classes: classes is '3'; it must be a whole number above 0
train --model own.py:five --data own.py:points => gives (64, 5) for a batch of 64; expected (64, 3)
train --model own.py:looking --data own.py:points => in another step: return it from the step instead, choose
train --model own.py:net --data own.py:values => own.py:net gives 3; if y are classes, make them whole numbers
train NET --scheduler own.py:one_argument => a scheduler is a function of (graph, cost, machine)
train NET --scheduler none.csv => none.csv: No such file
train NET --parallel tensor => unknown parallel 'tensor'; known: none, data, pipeline
train NET --lr-schedule step => known: constant, cosine
train NET --lr fast => 'fast' must be a finite number of at least 0
train NET --checkpoint own.py => cannot save to own.py: it is a file, and a folder is needed
train NET --tensorboard own.py => own.py: a folder is needed, and this is a file
new op own.py => own.py: a folder is needed, and this is a file
new nothing x => unknown kind 'nothing'
train own.py:net => unrecognized arguments: own.py:net; a network is named with --model
trian => 'trian'; similar names: train
compare --model mlp --schedulers in_order, --steps 1 => in_order,: a name between the commas is empty
compare SMALL --schedulers in_order => give at least two different ones
compare SMALL --schedulers in_order,nope => nope
compare SMALL --schedulers in_order,partime --scheduler-arg foo=1 => none of in_order,partime takes it
simulate => give --model NAME (see `minidl models`); or --ranks P for a pipeline on given times
plan => --model
simulate --model mlp --forward 2 => leave one out
train --model mpl => mlp
train --model mlp --model-arg widht=3 => widht
train --model mlp --model-arg hidden => name=value
train --model mlp --model-arg hidden=NINES => hidden
train --model mlp --model-arg hidden=BRACKETS => hidden
train --model mlp --model-arg hidden=MINUSES1 => hidden
train SMALL --scheduler multistream => multi_stream
train SMALL --scheduler-arg streems=3 --scheduler multi_stream => streems
plan SMALL --scheduler multi_stream --scheduler-arg cost=5 => --scheduler-arg cost has no effect here; use --costs
plan SMALL --scheduler multi_stream --scheduler-arg streams=2.5 => streams
plan SMALL --scheduler multi_stream --scheduler-arg streams=many => streams
train SMALL --scheduler multi_stream --streams 1 => 2 to 1024 streams
train SMALL --scheduler multi_stream --streams 100000 => at most 1024
train SMALL --steps 0 => at least 1
train SMALL --steps NINES => too large
train SMALL --steps -NINES => at least 1
train SMALL --steps 99999999999 => too large
train SMALL --stes 3 => --steps
train SMALL --seed 18446744073709551616 => too large
train SMALL --lr nan => must be a finite number
train SMALL --lr -1 => must be a finite number
train SMALL --lr 1e300 => learning rate
train SMALL --micro-batches 3 => divide
train SMALL --data digitz => digits
train SMALL --data nothere.npz => no such file
train SMALL --data mnist --root nothere => the folder for data does not exist
train SMALL --workers 2 => --workers has no effect on digits: it is for pictures
train SMALL --tokenizer 300 => --tokenizer has no effect on digits: it is for text
train SMALL --batch-size 100000 => 100000
train SMALL --device tpu => tpu
train SMALL --device cuda => cuda
train SMALL --memory-limit 1kB => limit
train SMALL --memory-limit much => size
train SMALL --memory-limit 0 => at least 1 byte
train SMALL --memory-limit NINES => 4 EiB
train SMALL --trace /nowhere/x.json => /nowhere
train SMALL --trace x.txt => .json
plan SMALL --svg / => is a folder
plan SMALL --save /proc/x.csv => /proc/x.csv
train SMALL --save-costs /nowhere/c.json => /nowhere
plan SMALL --save x.csv --html x.csv => x.csv: --save and --html would write the same file
train SMALL --save-costs x.json --log ./x.json => ./x.json: --save-costs and --log would write the same file
kernels line => similar names: linear, sin, neg
train SMALL --costs /nowhere.json => /nowhere.json
train SMALL --config /nowhere.toml => /nowhere.toml
check /nowhere.csv SMALL => /nowhere.csv
explain 99W0 SMALL => 99W0
explain W SMALL => task name
plan SMALL --recompute 99 => there is no layer '99' to keep
train SMALL --recompute 1,-1 => there is no layer '-1' to keep
plan SMALL --recompute auto => within a memory limit; give one
plan SMALL --scheduler in_order --recompute all --memory-limit 1K => the limit of 1,000
FIFO SMALL --ranks 4 --memory-limit 1KB => the limit of 1,000
FIFO SMALL --ranks 4 --bandwidth 0 => at least 1 byte
plan DENSE --scheduler multi_region --curve --save x.csv => --save
plan DENSE --scheduler multi_region --curve --memory-limit 1GB => --memory-limit
plan DENSE --scheduler multi_region --curve --recompute all => --curve tries every --recompute; leave it out
plan SMALL --scheduler multi_region --streams 3 => 2 streams, not 3
plan DENSE --scheduler multi_region --scheduler-arg crossing=maybe => crossing is 'maybe'; it must be true or false
simulate --ranks 2 --micro-batches 4 --scheduler-arg fetch=1 => takes no argument 'fetch'; it takes lag, cap
plan SMALL --scheduler multi_region --scheduler-arg memory_limit=2GiB => takes no argument 'memory_limit'
plan SMALL --scheduler multi_region --scheduler-arg map=densenet121 => takes no argument 'map'
simulate --scheduler zb_h3 --ranks 2 => zb_h
simulate --scheduler zb_h2 --ranks 4 --micro-batches 3 => micro-batches
simulate --scheduler gpipe --ranks 4 --forward -1 => -1
simulate --scheduler gpipe --ranks 4 --forward 0 => positive
simulate --scheduler gpipe --ranks 4 --forward nan => nan
simulate --scheduler zb_h1 --ranks 2 --forward 1e308 => 1e+308
simulate --scheduler zb_h1 --ranks 2 --forward 1e400 => number
simulate --scheduler zb_h1 --ranks 2 --forward x => 'x' must be a number
simulate --ranks 2 --scheduler gpipe --forward MANY => stages
simulate --ranks 2 --table --forward inf => no policy accepts these numbers
simulate --scheduler gpipe --ranks 0 => at least 1
simulate --scheduler gpipe --ranks 2 --latency nan => finite
simulate --ranks 2 --latency -1 --table => finite
simulate --scheduler optimal --ranks 2 --time-limit inf => finite
simulate --scheduler gpipe --ranks 2 --activation-cap nan => finite
simulate --scheduler gpipe --ranks 1000000 --micro-batches 500000 => 16,777,216
plan SMALL --save '' => argument --save: the name is empty (see minidl plan --help)
plan SMALL --svg '' => argument --svg: the name is empty (see minidl plan --help)
plan SMALL --save-costs '' => argument --save-costs: the name is empty (see minidl plan --help)
plan SMALL --costs '' => argument --costs: the name is empty (see minidl plan --help)
plan SMALL --config '' => argument --config: the name is empty (see minidl plan --help)
plan SMALL --data '' => argument --data: the name is empty (see minidl plan --help)
simulate SMALL --trace '' => argument --trace: the name is empty (see minidl simulate --help)
train SMALL --checkpoint '' => argument --checkpoint: the name is empty (see minidl train --help)
arena nothing => 'nothing' is neither a .json file nor a bundled problem; known: all, unit,
arena none.json => none.json
arena unit zbh1 => entry 'zbh1' is neither
arena unit --alone => --alone leaves the published policies out
arena unit --alone gpipe --bogus => unrecognized arguments: --bogus
plan GPIPE --scheduler-arg x=1 => gpipe takes no argument 'x'; it takes lag, cap
simulate GPIPE --topology nodes=2 => nodes=2 of 2 ranks lacks the link across nodes; give across=LATENCY:BANDWIDTH
simulate GPIPE --topology nodes=1 => nodes=1 of 2 ranks lacks the link inside nodes; give inside=LATENCY:BANDWIDTH
plan GPIPE --activation-cap 0 => the activation cap is 0
plan GPIPE SMALL --activation-cap 0 => the activation cap is 0
plan STAGES --scheduler gpipe --replicas 3 => a batch of 64 does not divide into 4 micro-batches on each of 3 replicas
plan STAGES --scheduler zb_h1 --shard 1 => several replicas, keeps a share
plan STAGES --scheduler pipedream --replicas 2 --shard 1 => pipedream updates stages beside the next step
SHARES 1 --scheduler-arg part_bytes=20000 => its sums at any element, and a rank's share begins at others
SHARES 3,keep=7 => no sum of gradients 7A0
SHARES 3,prefetch=1+0+1 => prefetch has 3 numbers for 2 ranks
plan STAGES --shard 3,prefetch=2,1 => for each rank, as in ,prefetch=2+1+1+0
plan STAGES --shard 3,prefetch=1+-1 => for each rank, as in ,prefetch=2+1+1+0
plan STAGES --shard 2,prefetch=all => 2 or 3 with ,prefetch=N, full, auto or
HINT --scheduler-arg cap=0 => cap=0 is 0 on rank 0; a rank keeps at least 1 micro-batch
HINT --scheduler-arg cap=p-2s => cap='p-2s' is 0 on rank 1
HINT --scheduler-arg cap=4/0 => is no number of micro-batches; give one as in cap=4 or cap=2p-s
HINT --scheduler-arg cap=1e9 => cap=1000000000.0 is no number of micro-batches; give one as in cap=4
HINT --scheduler-arg 'cap=(3, 2)' => scheduler zb_h1: cap is (3, 2); it must be a number or text
HINT --scheduler-arg lag=auto => scheduler zb_h1: lag is 'auto'; it must be a whole number
HINT --scheduler dualpipe_v => order=hint: dualpipe_v: it runs pairs of tasks as one action
HINT --scheduler roundpipe => order=hint: roundpipe: other ranks keep what a forward has made
HINT --scheduler pipedream => order=hint: pipedream: its order says which weights tasks read
HINT --split 2 => order=hint: zb_h1: its tasks are in parts; leave --split out
HINT --offload activations => order=hint: copies of memory that leaves have their place in an order
HINT --activation-cap 2 --scheduler-arg cap=3 => rank 0 holds 3 activations; the cap is 2
HINT --activation-cap 2.999999 --scheduler-arg cap=3 => rank 0 holds 3 activations; the cap is 2.999999
plan SMALL --scheduler-arg cap=2 => takes no argument 'cap'
train SMALL --parallel pipeline --scheduler zb_h1 --ranks 65 => at most 64 ranks
train SMALL --parallel pipeline --scheduler zb_h1 --ranks 9 --replicas 8 => at most 64 ranks
train SMALL --parallel pipeline --scheduler zb_h1 --ranks 9 --micro-batches 4 => blocks to cut between
train SMALL --parallel pipeline --scheduler zb_h1 --ranks 1 => at least 2 ranks
train SMALL --parallel pipeline --scheduler zb_h1 --ranks 2 --device cuda => with mpiexec
compare SMALL --parallel pipeline => the number of ranks is missing; give --ranks P
compare STAGED --ranks 1 => a pipeline needs at least 2 ranks; give --ranks P
compare SMALL --parallel data --ranks 65 => at most 64 ranks run as threads of one process, not 65
compare STAGED --device cuda => on the CPU
compare STAGED --schedulers gpipe,nope => 'nope' for a pipeline; similar names: roundpipe, petra, gpipe
compare SMALL --parallel data --ranks 2 --schedulers fifo,gpipe => gpipe is for a pipeline, not for data-parallel ranks
compare STAGED --schedulers gpipe => give at least two different ones
compare STAGED --schedulers gpipe,chimera --ranks 3 => chimera: needs even numbers
compare STAGED --update-every 1 => a scheduler of your own
compare STAGED --lr 1e30 => try a smaller lr
train SHARED --ranks 2 --launch no-such RESTARTS => --launch no-such: No such file or directory
train SHARED --ranks 2 --launch "my 'mpiexec" RESTARTS => No closing quot
train SHARED --ranks 2 --launch ' ' RESTARTS => the command is empty
train SHARED --ranks 2 --least-ranks 3 RESTARTS => at most --ranks
train SMALL --init none.safetensors => there is no file none.safetensors
train SMALL --init . => the folder has neither model.safetensors nor
export none x.safetensors => there is no checkpoint
export none nowhere/x.safetensors => nowhere
export none x --shards 0 => at least 1 byte
"""
#: the condition of a flag that does not hold, and in words
WITHOUT_EFFECT = """
train SMALL --root . => data sets that are found by name
train SMALL --data x.npz --root . => data sets that are found by name
train SMALL --steps 3 --epochs 2 => runs without --steps; leave one out
train SMALL --nondeterministic => --device cuda
train SMALL --dependent-launch => --device cuda
train SMALL --scheduler multi_region --side-sms 32 => --device cuda
compare SMALL --device cpu --nondeterministic => --device cuda
train SMALL --parallel data --ranks 2 --transport nccl => --device cuda
train SMALL --streams 1 => --scheduler multi_stream or multi_region
compare SMALL --schedulers in_order,in_order --streams 1 => --scheduler multi_stream or multi_region
train SMALL --pairs measured => schedulers of several streams, and --save-costs
plan SMALL --pairs none => schedulers of several streams
train SMALL --dry-run --trace x.json => runs; --dry-run runs nothing
train SMALL --dry-run --log-every 3 => runs; --dry-run runs nothing
train SMALL --resume => --checkpoint DIR
train SMALL --resume --checkpoint x --init y => a run that begins; --resume has all weights
info --model-arg classes=3 => a network; name it with --model
info --model mlp --each-rank => info without --model
sample x --temperature 0 --top 3 => a --temperature above 0
sample x --temperature 0 --seed 3 => a --temperature above 0
simulate --ranks 2 --scheduler gpipe --time-limit 3 => --scheduler optimal
plan GPIPE --objective span => --scheduler optimal
simulate --ranks 2 --table --scheduler gpipe => one policy; --table shows all published ones, and one of your own
simulate --ranks 2 --table --svg x.svg => plans; --table shows figures
simulate --ranks 2 --table --trace x.json => one plan; --table and --curve show many
FIFO --parts 3 => --scheduler
FIFO --buckets 3 => --scheduler buckets
FIFO --model mlp --ranks 4 --servers 2 => --collective parameter_server
FIFO --model mlp --ranks 4 --collective tree => a link that takes time, by --latency, --bandwidth or --topology
simulate GPIPE --bandwidth 1GB => bytes: a network, or --costs FILE
plan GPIPE --costs analytic => a network; times of a pipeline without --model come from FILE
check x.csv GPIPE --forward 1 => --scheduler layerpipe or roundpipe, which cuts by them
simulate GPIPE --topology nodes=2 --latency 3 => one kind of link; --topology has its own
simulate GPIPE --message-bytes 1MB => --topology
simulate GPIPE --topology nodes=2 --replicas 2 => --gradient-bytes on given times
simulate GPIPE --topology nodes=2 --gradient-bytes 1MB => --topology, and --parallel data or --replicas
FIFO --topology nodes=2 => --gradient-bytes on given times
FIFO --topology nodes=2 --ranks 4 => --gradient-bytes or --loads on given times
check x.csv --ranks 2 --scheduler-arg kept=0.5 => one policy, by --scheduler
plan STAGES --scheduler gpipe --collective tree => --parallel data, and --replicas
plan GPIPE --replicas 2 => --gradient-bytes on given times
train SMALL --max-restarts 1 => --checkpoint DIR
train SHARED --ranks 2 --checkpoint c --launch m => --max-restarts
train SHARED RESTARTS --least-ranks 2 => --ranks P
"""
#: verbs and subjects on which a flag has no effect
ELSEWHERE = """
models --model mlp
plan SMALL --seed 3
plan SMALL --lr 0.3
check x.csv SMALL --seed 3
check x.csv SMALL --scheduler gpipe
explain 0F0 SMALL --svg x.svg
plan GPIPE --memory-limit 1GB
explain 0F0 GPIPE --memory-limit 1GB
plan GPIPE --curve
arena unit --ranks 2
plan GPIPE SMALL --pairs none
plan SMALL --order hint
train SMALL --ranks 2
check x.csv --ranks 2 --latency 1
"""


def last_flag(command: str) -> str:
    return [word for word in command.split() if word.startswith("--")][-1]


ROWS = [tuple(row.split(" => ")) for row in CASES.strip().splitlines()]
ROWS += [(command, f"{last_flag(command)} has no effect here; it goes with {says}")
         for command, says in (row.split(" => ") for row in WITHOUT_EFFECT.strip().splitlines())]
ROWS += [(command, f"{last_flag(command)} has no effect on ") for command in ELSEWHERE.strip().splitlines()]


@pytest.mark.few(80)
@pytest.mark.parametrize(("command", "says"), ROWS)
def test_a_mistake_is_one_line_that_says_what_to_do(command: str, says: str, tmp_path: Path, monkeypatch: Any,
                                                    capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    if "--tensorboard" in command:
        pytest.importorskip("tensorboard")
    for word, meaning in WORDS.items():
        command = command.replace(word, meaning)
    line = refusal(capsys, *shlex.split(command))
    assert says in line
    assert len(line) < 600
    assert {path.name for path in tmp_path.iterdir()} <= {"own.py", "__pycache__"}


@pytest.mark.parametrize(("flags", "says"), [
    ("--model lenet", "is it the plan of another network, or of another number of micro-batches?"),
    ("--ranks 2", "micro-batches are 0..0 (--micro-batches)")])
def test_a_plan_of_something_else_says_so(flags: str, says: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    made = "--model mlp --costs analytic" if "model" in flags else "--ranks 2 --micro-batches 4 --scheduler zb_h1"
    assert main(shlex.split(f"plan {made} --save plan.csv")) == 0
    capsys.readouterr()
    assert main(shlex.split(f"check plan.csv {flags}")) == 1
    assert says in capsys.readouterr().out


def test_without_a_verb_the_help_is_shown(capsys):
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    assert "usage: minidl" in capsys.readouterr().out
