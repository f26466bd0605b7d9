"""CUDA: memory, streams, launches, products and convolutions. Nothing here is imported until a CUDA
device is asked for."""
