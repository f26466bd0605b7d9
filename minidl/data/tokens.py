"""Tokens: how text becomes numbers and back.

`bytes` needs nothing: a token is a byte of UTF-8, and bytes that no text has are the special tokens. A whole number N
is a byte-pair encoding of N tokens, trained on the training text by the `tokenizers` library; FILE.json is a tokenizer
that this library has saved, with its vocabulary.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dataset import MOST, DataError

Ids = NDArray[Any]
LARGEST = 64 << 20  #: the largest file of a tokenizer, in bytes
PIECE = 1 << 20  #: how many bytes of text are encoded at once
#: a special token -> its names in vocabularies, the first one also in those that are trained here
NAMES = {"pad": ("[PAD]", "<pad>", "<|endoftext|>"), "first": ("[CLS]", "<s>", "<|endoftext|>"),
         "separator": ("[SEP]", "</s>", "<|endoftext|>"), "end": ("[END]", "</s>", "[SEP]", "<|endoftext|>"),
         "mask": ("[MASK]", "<mask>")}
BYTES = {"pad": 0, "first": 0xF9, "separator": 0xFA, "end": 0xFB, "mask": 0xFF}
LEAST = 256 + len(NAMES)  #: tokens of the smallest vocabulary that can be trained: all bytes and the special ones


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """`encode(text)`: the tokens of UTF-8 bytes, integers (n,). `decode(tokens)`: their text. `special`: token of each
    of NAMES that the vocabulary has. `saved`: its form in a checkpoint: "bytes", or a library's JSON."""

    vocabulary: int
    encode: Callable[[bytes], Ids]
    decode: Callable[[Sequence[int]], str]
    special: dict[str, int] = field(default_factory=dict)
    saved: str = "bytes"

    def token(self, name: str, purpose: str) -> int:
        """A special token. Raises DataError if the vocabulary lacks it."""
        if name not in self.special:
            raise DataError(f"the tokenizer has no {name} token ({' or '.join(NAMES[name])}), which {purpose} needs")
        return self.special[name]


BYTE_TOKENIZER = Tokenizer(
    256, lambda text: np.frombuffer(text, np.uint8),
    lambda tokens: bytes(t for t in tokens if t not in BYTES.values()).decode("utf-8", "replace"), dict(BYTES))


def tokenizer(name: str, text: bytes) -> Tokenizer:
    """The tokenizer of this name: bytes, a number of tokens, or a file. `text`: to learn from. Raises DataError."""
    if name == "bytes":
        return BYTE_TOKENIZER
    if name.isascii() and name.isdigit():
        return _trained(int(name[:20]), text)
    path = Path(name)
    if not path.is_file():
        raise DataError(f"{name}: there is no such tokenizer; write bytes, a number of tokens, or FILE.json")
    if path.stat().st_size > LARGEST:
        raise DataError(f"{name}: larger than {LARGEST >> 20} MiB, the limit for a tokenizer")
    try:
        return restored(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{name}: not a tokenizer of the tokenizers library: {' '.join(str(error).split())[:200]}"
                        ) from error  # fmt: skip


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise DataError("this tokenizer needs the library tokenizers: pip install 'minidl[data]'; or use bytes"
                        ) from None  # fmt: skip
    return tokenizers


@functools.lru_cache(maxsize=4)
def _trained(size: int, text: bytes) -> Tokenizer:
    if not LEAST <= size <= MOST:
        raise DataError(f"a tokenizer of {size} tokens is too {'small' if size < LEAST else 'large'}; it can have "
                        f"{MOST}, and needs {LEAST} for all bytes and special tokens")
    library = _library()
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[names[0] for names in NAMES.values()], show_progress=False,
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()))
    made.train_from_iterator((piece.decode("utf-8", "replace") for piece in pieces(text)), trainer)
    return _of_library(made)


@functools.lru_cache(maxsize=4)
def restored(saved: str) -> Tokenizer:
    """The tokenizer whose `saved` this is. Raises DataError or ValueError."""
    if saved == "bytes":
        return BYTE_TOKENIZER
    try:
        json.loads(saved)
        return _of_library(_library().Tokenizer.from_str(saved))
    except ValueError:
        raise
    except Exception as error:  # the library raises Exception itself
        raise ValueError(str(error)) from None


def _of_library(made: Any) -> Tokenizer:
    made.no_truncation()  # a saved one may cut or fill each piece of text, as its last use did
    made.no_padding()
    special = {what: found for what, names in NAMES.items()
               if (found := next((i for i in map(made.token_to_id, names) if i is not None), None)) is not None}

    def encode(text: bytes) -> Ids:
        parts = [piece.decode("utf-8", "replace") for piece in pieces(text)]
        try:
            found = made.encode_batch(parts, add_special_tokens=False)
        except Exception as error:  # the library raises Exception itself
            raise DataError(f"the tokenizer cannot read this text: {error}") from None
        return np.concatenate([np.empty(0, np.uint32), *(np.array(e.ids, np.uint32) for e in found)])

    return Tokenizer(1 + max(made.get_vocab().values(), default=-1), encode,
                     lambda ids: made.decode([int(i) for i in ids]), special, made.to_str())


def pieces(text: bytes) -> Iterable[bytes]:
    """The text in pieces of about PIECE bytes, cut after a line's end, so that no character or word is cut."""
    begin = 0
    while begin < len(text):
        end = text.rfind(b"\n", begin, begin + PIECE) + 1 if len(text) - begin > PIECE else len(text)
        if end <= begin:
            end = text.find(b"\n", begin) + 1 or len(text)
        yield text[begin:end]
        begin = end
