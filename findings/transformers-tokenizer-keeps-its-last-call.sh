#!/usr/bin/env bash
# transformers 5.24.0 with tokenizers, on the CPU, without a network: a tokenizer that is made here.
# One would guess that padding and truncation are arguments of one call, and that save_pretrained writes what the
# tokenizer is: two of them that were made alike are saved alike, whatever they have encoded meanwhile.
# The call leaves its settings in the tokenizer, and save_pretrained writes them: after one call with padding and
# truncation tokenizer.json has both sections, with that call's length. Loaded by the package tokenizers, which is how
# other engines read it, it cuts and fills every text.
# It matters because text is lost in silence: whoever reads the file trains on the first tokens of each piece. Call
# no_truncation() and no_padding() after reading.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "transformers==5.24.0"
cat > "$folder/seen.py" <<'EOF'
import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
import tokenizers
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

TEXT = "a b c d e f g h"


def saved(folder: str, **call: object) -> tuple[list[str], int]:
    """The sections that are set in tokenizer.json, and how many tokens its reader makes of the text."""
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *TEXT.split()])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")
    own([TEXT, "a"], **call)
    own.save_pretrained(folder)
    path = os.path.join(folder, "tokenizer.json")
    content = json.load(open(path))
    return ([name for name in ("truncation", "padding") if content[name] is not None],
            len(Tokenizer.from_file(path).encode(TEXT).ids))


plain = saved(os.path.join(sys.argv[1], "plain"))
after = saved(os.path.join(sys.argv[1], "after"), padding=True, truncation=True, max_length=3)
print(f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}")
print(f"after a call without them: sections {plain[0]}, {plain[1]} tokens of 8 words")
print(f"after a call with padding, truncation and max_length=3: sections {after[0]}, {after[1]} tokens of 8 words")
sys.exit(not (plain == ([], 8) and after == (["truncation", "padding"], 3)))
EOF
if ! "$folder/venv/bin/python" "$folder/seen.py" "$folder/saved" 2> "$folder/err"; then
    echo "changed: a call leaves nothing behind, or the file lacks it, or it failed: $(tail -n 1 "$folder/err")" >&2
    exit 1
fi
