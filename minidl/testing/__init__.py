"""Proofs by trial: gradients against finite differences, kernels against references, steps in random orders."""
