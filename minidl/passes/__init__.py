"""Functions from graph to graph: late tasks, communication between ranks, merged tasks, fused launches."""
