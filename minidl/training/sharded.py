"""Checkpoints of ranks: a folder in Hugging Face's form, whose files are written by the ranks that hold the parts.

`model-00001-of-00004.safetensors` and so on have the network's tensors under published names,
`optimizer-00001-of-00004.safetensors` and so on all others, and `model.safetensors.index.json` says where each tensor
is. Under "minidl", its metadata also have the texts of a checkpoint and the SHA-256 of each file. Each tensor is
written once, by the one of its holders that has least to write; of a tensor of which ranks have shares, the others send
theirs. The folder gets its name when all files are on the disk, so it appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..autograd.tensor import Tensor
from ..core.columns import in_parts
from ..nn.module import in_state_order, state_array, state_shape
from ..system.files import put_in_place, write_new
from .agreement import Disagreement, together
from .tensors import Slot, WeightsError, beginning, doing, in_order, raw
from .weights import INDEX, PT, STANDARDIZE, files_by, in_shards, weight_map

if TYPE_CHECKING:
    from .trainer import Trainer

NETWORK, OTHERS = "model", "optimizer"  #: how the names of files begin
BATCH = 8 << 20  #: bytes of shared tensors that come together at a time: many are small
PREFIX = "model."  #: of the network's tensors in a checkpoint


def writers(sizes: Mapping[str, int], held: Sequence[Collection[str]]) -> dict[str, int]:
    """The rank that writes each tensor. `sizes`: of the tensors in bytes; `held`: the tensors that each rank holds."""
    load, found = [0] * len(held), dict[str, int]()
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        found[name] = min((r for r, names in enumerate(held) if name in names), key=load.__getitem__)
        load[found[name]] += sizes[name]
    return found


def save(folder: Path, tensors: Mapping[str, Tensor], constants: Mapping[str, Any], part: Trainer,
         texts: Mapping[str, str]) -> None:
    """Writes a checkpoint of all ranks, which call it together. `tensors`: by name; `constants`: arrays that all ranks
    have; `part`: this rank's; `texts`: of rank 0. Raises Disagreement on all ranks if one cannot write; then there is
    no folder."""
    communicator, temporary = part.communicator, folder.with_name(f".{folder.name}.part")
    saving = f"save {folder}", "; an earlier checkpoint is unchanged"
    assert communicator is not None
    me = communicator.rank
    layout = {name: (np.dtype(t.dtype), state_shape(t)) for name, t in tensors.items()}
    layout |= {name: (value.dtype, value.shape) for name, value in constants.items()}
    layout = dict(sorted(in_order(layout).items(), key=lambda item: _family(item[0])))  # a file after the other
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in layout.items()}
    writer = writers(sizes, communicator.gather({n for n, t in tensors.items() if part.holds(t)} | {*constants}))
    files = _files(writer)

    def write() -> dict[str, str]:
        arrays = _arrays([n for n in layout if writer[n] == me], writer, layout, tensors, constants, part)
        try:
            with doing(*saving):
                temporary.mkdir(parents=True, exist_ok=True)
                return {file: _written(temporary / file, {n.removeprefix(PREFIX): layout[n] for n in layout
                                                          if files[n] == file}, arrays)
                        for file in dict.fromkeys(files[n] for n in layout if writer[n] == me)}
        finally:
            for _ in arrays:  # the others wait for this rank's shares
                pass

    def finish() -> None:
        network = {name.removeprefix(PREFIX): file for name, file in files.items() if _family(name) == NETWORK}
        about = {"texts": dict(texts), "weight_map": {n: f for n, f in files.items() if _family(n) != NETWORK},
                 "sha256": {name: digest for digests in found for name, digest in digests.items()}}
        if lost := next((name for name in about["sha256"] if not (temporary / name).exists()), None):
            raise WeightsError(f"cannot save {folder}: {lost} of another rank is not there; all ranks must share it")
        total = sum(size for name, size in sizes.items() if _family(name) == NETWORK)
        index = {"metadata": {"total_size": total, "minidl": {**about, "digest": _digest(about, network)}},
                 "weight_map": network}
        with doing(*saving):
            write_new(temporary / INDEX, [json.dumps(index, indent=1).encode()])
            put_in_place(temporary, folder)

    try:
        found = together(communicator, write, WeightsError)
        together(communicator, lambda: finish() if me == 0 else None, WeightsError)
    except Disagreement:  # each rank removes what it sees
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _family(name: str) -> str:
    """The beginning of the names of the files that have a tensor."""
    return OTHERS if name.startswith(("optimizer.", "random.")) else NETWORK


def _files(writer: Mapping[str, int]) -> dict[str, str]:
    """The file of each tensor."""
    found = dict[str, str]()
    for family in (NETWORK, OTHERS):
        own = [name for name in writer if _family(name) == family]
        ranks = sorted({writer[name] for name in own})
        found |= {name: f"{family}-{ranks.index(writer[name]) + 1:05}-of-{len(ranks):05}.safetensors" for name in own}
    return found


def _digest(about: Mapping[str, Any], network: Mapping[str, str]) -> str:
    """The digest of an index."""
    return hashlib.sha256(json.dumps([about, network], sort_keys=True).encode()).hexdigest()


def _written(file: Path, layout: Mapping[str, tuple[Any, tuple[int, ...]]], arrays: Iterator[Any]) -> str:
    """Writes a file of tensors, whose arrays come in their order; its SHA-256. Raises OSError."""
    digest = hashlib.sha256()

    def pieces() -> Iterator[Any]:
        content: Iterator[Any] = (raw(next(arrays)) for _ in layout)
        for piece in chain([beginning(layout, PT)], content):
            digest.update(piece)
            yield piece

    write_new(file, pieces())
    return digest.hexdigest()


def _arrays(own: Sequence[str], writer: Mapping[str, int], order: Iterable[str], tensors: Mapping[str, Tensor],
            constants: Mapping[str, Any], part: Trainer) -> Iterator[Any]:
    """The arrays that this rank writes, in their order. Each rank of a group gets about BATCH bytes of what they share
    out at a time, and goes on to the end of all, since the others need its shares."""
    run, ids = part.run, {name: id(t.storage) for name, t in tensors.items()}
    _ = run.group  # all ranks ask for it together
    shared = [name for name in order if ids.get(name) in run.shared]
    batches = (in_parts(((n, tensors[n].bytes) for n in shared if writer[n] == r), BATCH) for r in run.program.group)
    rounds = zip_longest(*batches, fillvalue=())
    ready = deque[Any]()
    for name in own:
        if ids.get(name) in run.shared:
            if not ready:
                ready.extend(run.together([[ids[n] for n in names] for names in next(rounds)]))
            yield in_state_order(tensors[name], ready.popleft().reshape(tensors[name].shape))
        else:
            yield constants[name] if name in constants else state_array(tensors[name])
    for wanted in rounds:
        run.together([[ids[n] for n in names] for names in wanted])


def read(folder: Path) -> tuple[dict[str, Slot], dict[str, str], dict[str, str]]:
    """A checkpoint's tensors and texts by name, and the digests of its files. Raises WeightsError."""
    network, metadata = weight_map(folder / INDEX)
    try:
        about = metadata["minidl"]
        digest, texts, others, digests = (about.pop("digest"), about["texts"], files_by(about["weight_map"]),
                                          about["sha256"])
        right = digest == _digest(about, network) and {*digests} == {*network.values(), *others.values()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise WeightsError(f"{folder} is not a checkpoint of minidl: {INDEX} lacks minidl's metadata") from None
    found = in_shards(folder / INDEX, network | others)
    if not right or network.keys() & others.keys():  # of such a name one place would not have been looked at
        raise WeightsError(f"{folder / INDEX} is damaged: its digest is wrong")
    own = network.keys() - {*STANDARDIZE}
    return {f"{PREFIX}{name}" if name in own else name: slot for name, slot in found.items()}, texts, digests


def check(folder: Path, digests: Mapping[str, str], part: tuple[int, int] = (0, 1)) -> None:
    """Compares the digests of files, of part `part[0]` of `part[1]` parts. Raises WeightsError if one is another."""
    for name in sorted(digests)[part[0] :: part[1]]:
        with doing(f"read {folder / name}"), open(folder / name, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != digests[name]:
            raise WeightsError(f"{folder / name} is damaged: its digest is wrong")
