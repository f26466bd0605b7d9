"""`python -m minidl`."""

import sys

from .cli import main

sys.exit(main())
