"""The packages are listed by hand: `kernels/`, `schedulers/` and `models/` lie at the top level and are linked into
`minidl/`, so a search would install them twice, once under names that collide with other people's."""

import re
from pathlib import Path

from setuptools import setup

FRONTEND, NVMATH = "nvidia-cudnn-frontend>=1.20,<1.27", "nvmath-python>=1.0,<1.1"
CUDA = [FRONTEND, NVMATH, "numba-cuda", "ml_dtypes>=0.5"]  # ml_dtypes: NumPy's bfloat16
TEST = ["pytest>=8.2", "hypothesis>=6.100", "pytest-xdist>=3.5",  # xdist: five thousand tests on two cores in minutes
        "ml-dtypes>=0.5"]  # bfloat16, which is tested on a CUDA runtime that needs no GPU

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "minidl" / "__init__.py").read_text("utf-8"), re.MULTILINE)[1]

setup(
    name="minidl",
    version=VERSION,
    description="A mini deep-learning engine in which the order of the backward pass is a value",
    long_description=(HERE / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=["minidl", "minidl.arena", "minidl.autograd", "minidl.cli", "minidl.core", "minidl.data", "minidl.devices",
              "minidl.devices.cuda", "minidl.devices.native", "minidl.fusion", "minidl.kernels", "minidl.measuring",
              "minidl.models", "minidl.nn", "minidl.ops", "minidl.optim", "minidl.passes", "minidl.plans",
              "minidl.pricing", "minidl.runtime", "minidl.runtime.comm", "minidl.schedulers",
              "minidl.schedulers.pipeline", "minidl.schedulers.search", "minidl.system", "minidl.testing",
              "minidl.training", "minidl.views"],
    package_data={"minidl": ["py.typed", "*.pyi"], "minidl.arena": ["*.json"], "minidl.autograd": ["*.md"],
                  "minidl.data": ["*.csv.gz", "*.md"],
                  "minidl.kernels": ["*.cu", "*.cuh"],
                  "minidl.cli": ["templates/*/*.txt"],
                  "minidl.views": ["assets/*"]},
    install_requires=[
        "numpy>=2.0",
        "numba>=0.60",
        "mpi4py>=4.1",  # the first whose wheels need no MPI
        "threadpoolctl>=3.5",  # one BLAS thread per stream
        "safetensors>=0.4.5",  # checkpoints that execute nothing when they are read
        "rich>=13",  # progress bars
    ],
    extras_require={
        "mpich": ["mpich>=5"],
        "cuda13": ["cupy-cuda13x[ctk]", "nvidia-cudnn-cu13", *CUDA],
        "cuda12": ["cupy-cuda12x[ctk]", "nvidia-cudnn-cu12", *CUDA],
        "plot": ["matplotlib"],
        "optimal": ["ortools"],
        "data": ["tokenizers", "pillow>=10.1", "sacrebleu"],  # vocabularies, pictures, and BLEU as others compute it
        "tensorboard": ["tensorboard"],
        "docs": ["sphinx>=8", "myst-parser>=4", "furo"],  # one site from the pages and the docstrings
        "parity": ["torch==2.13.0"],
        "strong": ["torch==2.13.0", "jax==0.10.2"],  # the fastest peers on a CPU; torch.compile also needs gcc
        "huggingface": ["transformers==5.24.0"],  # judges of weights in its form; with parity
        "cuda-check": ["cupy-cuda13x", "nvidia-cuda-nvrtc==13.0.88", "nvidia-cuda-runtime==13.0.96",
                       "cuda-bindings>=13,<14", NVMATH, FRONTEND],
        "notebooks": ["jupytext>=1.16", "nbclient>=0.10", "ipykernel>=6.29"],  # the tutorial's chapters as notebooks
        "browser": ["playwright>=1.48"],  # tests of pages in a real browser, which is Debian's chromium
        "test": TEST,
        "dev": [*TEST, "ruff==0.17.5", "mypy==2.4.1", "pre-commit"],
    },
    entry_points={"console_scripts": ["minidl=minidl.__main__:run"]},
)
