"""Tensors, the ops that make them, and the tape that either runs their tasks at once or keeps them as a graph."""
