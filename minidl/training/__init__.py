"""Training runs that are described by names and numbers, on one device or on several ranks, and their checkpoints."""
