"""`sample`: text from a trained network."""

from __future__ import annotations

from typing import Any

from ..training.sampling import Writer
from . import show


def sample(arguments: Any) -> int:
    """Prints the prompt and what the network writes after it, or its translation."""
    writer = Writer.load(arguments.path)
    found = []
    with show.progress("writing", arguments.length) as done:
        for token in writer.tokens(arguments.prompt, arguments.length, temperature=arguments.temperature,
                                   top=arguments.top, seed=arguments.seed):
            found.append(token)
            done(len(found))
    text = writer.tokenizer.decode(found)
    text = text if writer.translates else arguments.prompt + text
    show.emit(arguments, {"prompt": arguments.prompt, "tokens": len(found), "text": text}, text)
    return 0
