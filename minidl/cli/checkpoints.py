"""`export` and `sample`: a checkpoint's weights for other programs, and text from it."""

from __future__ import annotations

from typing import Any

from ..system.files import check_writable
from ..training import checkpoint, weights
from ..training.sampling import Writer
from . import show


def export(arguments: Any) -> None:
    """Writes the weights and states of a checkpoint's model to a file."""
    if not arguments.shards:
        check_writable(arguments.file)
    values = checkpoint.weights(arguments.checkpoint_file)
    file = weights.save(arguments.file, values, arguments.style, arguments.shards)
    record = {"file": str(file), "tensors": len(values), "values": sum(int(v.size) for v in values.values()),
              "style": arguments.style, "standardized": {*weights.STANDARDIZE} <= values.keys()}
    if arguments.shards:
        record["shards"] = len({*weights.weight_map(file)[0].values()}) if file.suffix == ".json" else 1
    scale = "; the network reads (x - standardize.mean) / standardize.std" if record["standardized"] else ""
    show.emit(arguments, record, f"{file}: {record['tensors']} tensors with {record['values']:,} values{scale}")


def sample(arguments: Any) -> int:
    """Prints the prompt and what the network writes after it, or its translation."""
    writer = Writer.load(arguments.path)
    found = []
    with show.progress("writing", arguments.length) as done:
        for token in writer.tokens(arguments.prompt, arguments.length, temperature=arguments.temperature,
                                   top=arguments.top, seed=arguments.seed):
            found.append(token)
            done(len(found))
    coder, prompt = writer.tokenizer, "" if writer.translates else arguments.prompt
    read = coder.encode(prompt.encode(errors="surrogateescape")).tolist()  # alone, the word after may lose its space
    text = prompt + coder.decode([*read, *found])[len(coder.decode(read)) :]
    return show.emit(arguments, {"prompt": arguments.prompt, "tokens": len(found), "text": text}, text)
