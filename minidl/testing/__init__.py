"""Proofs by trial: gradients against finite differences, kernels against references, random steps in random orders."""
