#!/usr/bin/env bash
# Pillow 13.0.0.
# One would guess: convert("L") and convert("RGB") make 8 bits of 16 in one way, by the upper 8.
# What happens: a PNG of 16-bit colours keeps the upper byte (1000 becomes 3); a PNG of 16-bit gray opens as "I;16", and
# convert cuts each number above 255 to 255, so the picture is white. A PGM of 16 bits is scaled while it is opened (with
# a largest value of 1023, 1 becomes 64), and then cut as well.
# Why it matters: X-rays, depth maps and microscopy are 16-bit gray; a loader that converts to RGB trains on white
# without a warning. Shift by 8 bits before converting.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install -q pillow==13.0.0
cat > seen.py <<'PY'
import io
import struct
import sys
import zlib

from PIL import Image


def png(colour, channels):
    """Two pixels, 1000 and 32768, of 16 bits."""
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    row = b"\0" + struct.pack(">H", 1000) * channels + struct.pack(">H", 32768) * channels
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, colour, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b""))


seen = {}
for name, content in {"colours": png(2, 3), "gray": png(0, 1),
                      "PGM": b"P5 2 1 1023\n" + struct.pack(">HH", 1, 1023)}.items():
    picture = Image.open(io.BytesIO(content))
    seen[name] = [picture.convert("RGB").getpixel((x, 0))[0] for x in range(2)]
    print(f"{name}: mode {picture.mode}, pixels {[picture.getpixel((x, 0)) for x in range(2)]}, in RGB {seen[name]}")
sys.exit(0 if seen == {"colours": [3, 128], "gray": [255, 255], "PGM": [64, 255]} else "this has changed")
PY
env/bin/python seen.py
