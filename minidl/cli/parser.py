"""The parser: verbs and flags, which override a TOML file, which overrides defaults.

Only the module of the verb that is given is imported, and only its flags are built.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from .. import __version__
from .flags import FLAGS, UsageError, add_flags, check_flags, kind_of, saved, subject_of
from .show import record_alone
from .values import nearest


class _Parser(argparse.ArgumentParser):
    purpose = ""  #: of a verb: its help begins with it, and has the flags only in their list

    def format_help(self) -> str:
        if not self.purpose:
            return super().format_help()
        places = self._get_formatter()
        places.add_usage(None, self._get_positional_actions(), ())
        self.usage = f"{places.format_help().removeprefix('usage: ').strip()} [flags]"
        return f"{self.purpose}\n\n{super().format_help()}"

    def error(self, message: str) -> NoReturn:
        if unknown := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            if flag := FLAGS.get(unknown[1]):
                raise UsageError(f"{unknown[1]} has no effect on `{self.prog}`; it is for {', '.join(flag.serves)}")
            known = [o for action in self._actions for o in action.option_strings]
            near = difflib.get_close_matches(unknown[1], known, 1)
            message += f"; did you mean {near[0]}?" if near else ""
        elif message.startswith("unrecognized arguments: ") and "--model" in self.format_usage():
            message += "; a network is named with --model"
        if choice := re.match(r"argument (\S+): invalid choice: '(.*?)' \(choose from (.*)\)", message):
            known = [c.strip("' ") for c in choice[3].split(",")]
            message = f"unknown {choice[1].split('/')[0].strip('-').lower()} {choice[2]!r}; {nearest(choice[2], known)}"
            message += f"; write --checkpoint {choice[2]} --resume" * (choice[1] == "--resume")
        message = re.sub(r"ignored explicit argument (.*)", r"takes no value, and got \1", message)
        raise UsageError(f"{message} (see {self.prog} --help)")


#: verb -> its function in this folder, and its line of help
VERBS: dict[str, tuple[str, str]] = {
    "info": ("info.info", "devices and versions, or the layers of a network"),
    "models": ("info.models", "all networks with their arguments"),
    "schedulers": ("schedulers.schedulers", "every policy with its source, closed form and arguments"),
    "train": ("training.train", "train a network; without flags, compare two schedules on the digits"),
    "compare": ("training.compare", "run the same training under several schedules, interleaved"),
    "plan": ("planning.plan", "make a schedule without running it"),
    "check": ("planning.check", "validate a saved or edited schedule"),
    "explain": ("planning.explain", "explain why a task is where it is, or which waits the order alone makes"),
    "simulate": ("planning.simulate", "price a network's plan, or a data-parallel or pipeline policy on given times"),
    "arena": ("arena.run", "prove, price and rank orders of pipelines, your own and the published ones"),
    "report": ("report.run", "say where the time of a run went, from traces; or who waits for whom, by --patience"),
    "kernels": ("kernels.run", "list kernels, or check some against their references and time them"),
    "profile": ("profile.profile", "measure what a torch network costs per stage of a pipeline"),
    "export": ("checkpoints.export", "write a checkpoint's weights to a safetensors file under published names"),
    "new": ("new.new", "write a small working op, kernel, scheduler or network with its test, to start from"),
    "sample": ("checkpoints.sample", "write text with a network that has been trained on text"),
    "fuzz": ("fuzz.run", "compare recorded steps with eager ones, bit for bit"),
}
#: verb -> the name, metavar, count and help of each of its positional arguments
POSITIONS: dict[str, list[tuple[str, str, str | None, str | None]]] = {
    "arena": [("problems", "PROBLEMS", None, "a JSON file, all, or names of bundled problems"),
              ("entries", "ENTRY", "*", "FILE.py:FUNCTION, FILE.csv or a policy's name")],
    "check": [("plan", "PLAN.csv", None, None)],
    "explain": [("task", "TASK", "?", "such as 4W0 (default: the largest waits that the order alone makes)")],
    "export": [("checkpoint_file", "CHECKPOINT", None, "a checkpoint's folder or file"),
               ("file", "FILE.safetensors", None, None)],
    "fuzz": [("step", "FILE.py:FUNCTION", "?", "your own training (default: random steps)")],
    "kernels": [("name", "NAME", "?", "a family or a kernel (default: list them all)")],
    "models": [("name", "NAME", "?", "one of the models (default: all)")],
    "new": [("kind", "KIND", None, "one of op, kernel, scheduler, model, assignment"),
            ("folder", "DIR", None, "where to write it; the folder is made if there is none")],
    "profile": [("network", "FILE.py:FUNCTION", None, "returns (layers, x, y, loss) of a network")],
    "report": [("traces", "TRACE", "+", "a trace, traces of all ranks by another profiler, or a folder of --patience")],
    "sample": [("path", "CHECKPOINT", None, None)],
    "schedulers": [("name", "NAME", "?", "one of the schedulers (default: all)")],
}


def _parser(given: str) -> _Parser:
    """The parser for a command with the verb `given`; without one of VERBS, it has a line of help for each."""
    parser = _Parser(prog="minidl",
                     description="A mini deep-learning engine in which the order of the backward pass is a value.")
    parser.add_argument("--version", action="version", version=f"minidl {__version__}")
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=_Parser)
    for name in [given] if given in VERBS else VERBS:
        function, text = VERBS[name]
        verb = verbs.add_parser(name, help=text, allow_abbrev=False)
        verb.purpose = f"{text[:1].upper()}{text[1:]}."
        if name != given:
            continue
        where, _, function = function.partition(".")
        module = import_module(f".{where}", __package__)
        verb.set_defaults(verb=getattr(module, function), command=name, parser=verb)
        for dest, metavar, count, help in POSITIONS.get(name, ()):
            verb.add_argument(dest, metavar=metavar, nargs=count, help=help)
        if about := getattr(module, "ABOUT", ""):
            verb.description, verb.formatter_class = about, argparse.RawDescriptionHelpFormatter
        add_flags(verb, name)
    return parser


def _parsed(parser: _Parser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; a list of names may go on after flags, where argparse leaves it."""
    arguments, rest = parser.parse_known_args(argv)
    lists = [a.dest for a in arguments.parser._actions if not a.option_strings and a.nargs in ("*", "+")]
    if unknown := [word for word in rest if not lists or word.startswith("-")]:
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        getattr(arguments, lists[0]).extend(rest)
    return arguments


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments: flags override a config file, which overrides defaults. `given`: the flags of the first two;
    `subject`: the letter of the command's subject; `line`: the command as one types it. Raises UsageError, also for a
    flag that would have no effect."""
    parser = _parser(next((a for a in argv if not a.startswith("-")), ""))
    arguments = _parsed(parser, argv or ["--help"])
    given, path = _names(argv), arguments.config
    if path:
        try:
            told = _config(path, arguments.parser)
            if given & {"--steps", "--epochs"}:  # only one of them counts, and the command line overrides
                told = [word for word in told if not word.startswith(("--steps=", "--epochs="))]
            arguments = _parsed(parser, [argv[0], *told, *argv[1:]])
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
        given |= _names(told)
    arguments.given, arguments.line = given, shlex.join(["minidl", *argv])
    arguments.subject = subject_of(arguments)
    if arguments.resume == "auto":
        arguments.resume = saved(arguments) and "auto"
    if (kind := kind_of(arguments)) != "none":
        from ..schedulers.registry import COMPARED, USUAL

        if "--scheduler" not in given:
            arguments.scheduler = USUAL[kind]
        if "--schedulers" not in given:
            arguments.schedulers = COMPARED[kind]
    with record_alone(arguments):
        check_flags(arguments)
    if (arguments.memory_limit and arguments.command not in ("check", "arena")
        and not given & {"--recompute", "--offload"}):
        arguments.recompute = arguments.offload = "auto"
    return arguments


def _names(words: Sequence[str]) -> set[str]:
    """The flags among the words of a command."""
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def _config(path: str, parser: argparse.ArgumentParser) -> list[str]:
    """The flags of a TOML file as words of a command. Raises UsageError that names the key, not the file."""
    import tomllib

    from ..system.files import read_text

    try:
        content = tomllib.loads(read_text(path, "config"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(" ".join(str(error).split())[:200]) from None
    except (RecursionError, OverflowError):
        raise UsageError("nested too deeply, or a number too large") from None
    actions = {o.removeprefix("--"): a for a in parser._actions for o in a.option_strings
               if o.startswith("--") and o not in ("--config", "--help")}
    words = list[str]()
    for key, value in content.items():
        if key not in actions:
            if key != "config" and f"--{key}" in FLAGS:
                parser.error(f"unrecognized arguments: --{key}")
            raise UsageError(f"unknown flag {key!r}; {nearest(key, sorted(actions))}")
        if isinstance(value, bool) and actions[key].nargs in (0, "?"):
            words += [f"--{key}"] if value else []
        elif isinstance(value, dict):  # such as [model-arg]
            words += [f"--{key}={name}={argument!r}" for name, argument in value.items()]
        else:
            values = [*map(str, value)] if isinstance(value, list) else [str(value)]
            repeats = FLAGS[f"--{key}"].options.get("action") == "append"
            words += [f"--{key}={word}" for word in (values if repeats else [",".join(values)])]
    return words
