"""All that rewrites a step: see README.md. `every.py` has the passes of a plan in their order."""
