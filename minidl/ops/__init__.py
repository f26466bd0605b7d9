"""The operations, one small class each, and the operators and methods that they give a Tensor."""

from .activation import celu, elu, glu, logsigmoid, prelu, selu, spike
from .along_axis import argsort, cumsum, logsumexp, norm, sort, topk
from .attention import attention
from .batch_norm import batch_norm
from .by_index import bincount, index_add, scatter, scatter_add
from .cast import astype
from .conv import conv1d, conv2d
from .conv_transpose import conv_transpose1d, conv_transpose2d
from .create import (arange, eye, full, full_like, linspace, ones, ones_like, rand, rand_like, randint, randn,
                     randn_like, randperm, zeros, zeros_like)
from .dropout import dropout
from .einsum import einsum
from .elementwise import (absolute, add, ceil, cos, div, exp, floor, gelu, hardsigmoid, hardswish, leaky_relu, log,
                          maximum, minimum, mish, mul, neg, power, relu, relu6, round, sigmoid, sign, silu, sin,
                          softsign, sqrt, sub, tanh, trunc)
from .embedding import embedding
from .experts import combine, dispatch, grouped_linear, route
from .extremes import amax, amin, argmax, argmin
from .index import gather, index
from .join import chunk, concat, cut, split, stack
from .join import concat as cat
from .layer_norm import group_norm, layer_norm, rms_norm
from .linear import linear, matmul
from .loss import cross_entropy, label_weights, log_softmax, mse, softmax
from .masks import all_of, any_of, clamp, compare, logic, masked_fill, where
from .methods import install
from .pair_loss import binary_cross_entropy_with_logits, huber_loss, kl_div, l1_loss, mse_loss, smooth_l1_loss, softplus
from .pairwise import cdist, prod
from .pool import avg_pool1d, avg_pool2d, global_avg_pool, max_pool1d, max_pool2d
from .rearrange import (diagonal, flip, masked_select, movedim, pad, pixel_shuffle, repeat_interleave, roll, tile, tril,
                        triu, unbind)
from .recurrent import gru, lstm, rnn
from .reduce import broadcast_to, mean, total
from .resample import adaptive_avg_pool1d, adaptive_avg_pool2d, interpolate
from .shape import flatten, reshape, squeeze, swap_axes, transpose, unsqueeze

__all__ = ["absolute", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "add", "all_of", "amax", "amin", "any_of",
           "arange", "argmax", "argmin", "argsort", "astype", "attention", "avg_pool1d", "avg_pool2d", "batch_norm",
           "binary_cross_entropy_with_logits", "bincount", "broadcast_to", "cat", "cdist", "ceil", "celu", "chunk",
           "clamp", "combine", "compare", "concat", "conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d", "cos",
           "cross_entropy", "cumsum", "cut", "diagonal", "dispatch", "div", "dropout", "einsum", "elu", "embedding",
           "exp", "eye", "flatten", "flip", "floor", "full", "full_like", "gather", "gelu", "global_avg_pool", "glu",
           "group_norm", "grouped_linear", "gru", "hardsigmoid", "hardswish", "huber_loss", "index", "index_add",
           "interpolate", "kl_div", "l1_loss", "label_weights", "layer_norm", "leaky_relu", "linear", "linspace", "log",
           "log_softmax", "logic", "logsigmoid", "logsumexp", "lstm", "masked_fill", "masked_select", "matmul",
           "max_pool1d", "max_pool2d", "maximum", "mean", "minimum", "mish", "movedim", "mse", "mse_loss", "mul", "neg",
           "norm", "ones", "ones_like", "pad", "pixel_shuffle", "power", "prelu", "prod", "rand", "rand_like",
           "randint", "randn", "randn_like", "randperm", "relu", "relu6", "repeat_interleave", "reshape", "rms_norm",
           "rnn", "roll", "round", "route", "scatter", "scatter_add", "selu", "sigmoid", "sign", "silu", "sin",
           "smooth_l1_loss", "softmax", "softplus", "softsign", "sort", "spike", "split", "sqrt", "squeeze", "stack",
           "sub", "swap_axes", "tanh", "tile", "topk", "total", "transpose", "tril", "triu", "trunc", "unbind",
           "unsqueeze", "where", "zeros", "zeros_like"]

install(globals())
