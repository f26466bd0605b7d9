"""Kernels, one file per family: for each a reference over any array module, its CPU form and its CUDA form.

A kernel is looked up by name, so that every executor picks the same one for the same launch. Kernels know arrays and
nothing else of the engine.
"""

from __future__ import annotations

from importlib import import_module

from .registry import KERNELS, Kernel, KernelError, Thunk, Work, kernel

for _family in ("elementwise", "masks", "linear", "reduce", "loss", "pair_loss", "dropout", "sgd", "adam", "nadam",
                "rmsprop", "gradients", "muon", "gelu", "layer_norm", "rms_norm", "embedding", "join", "attention",
                "flash_attention", "recurrent", "conv", "conv_cuda", "norm", "norm_grad", "norm_eval", "norm_act",
                "norm_both", "product_add", "product_slope", "product_update", "pool", "activation",
                "squeeze_excite", "along_axis", "dither", "experts", "group"):
    import_module(f"{__name__}.{_family}")

__all__ = ["KERNELS", "Kernel", "KernelError", "Thunk", "Work", "kernel"]
