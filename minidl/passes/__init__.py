"""All that rewrites a step. `every.py` has the passes over a step on several ranks in their order; others are functions
from graph to graph: late tasks, communication between ranks, merged tasks, fused launches."""
