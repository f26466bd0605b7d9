"""Training runs from names and numbers, on one device and on several ranks, and their checkpoints."""
