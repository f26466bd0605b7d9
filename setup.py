"""The packages are listed by hand: `kernels/`, `schedulers/` and `models/` lie at the top level and are linked into
`minidl/`, so a search would install them twice, once under names that collide with other people's."""

from pathlib import Path

from setuptools import setup

FRONTEND, NVMATH = "nvidia-cudnn-frontend>=1.20,<1.27", "nvmath-python>=1.0,<1.1"
CUDA = [FRONTEND, NVMATH, "numba-cuda", "ml_dtypes>=0.5"]  # ml_dtypes: NumPy's bfloat16
TEST = ["pytest>=8.2", "hypothesis>=6.100", "pytest-xdist>=3.5",  # xdist: five thousand tests on two cores in minutes
        "ml-dtypes>=0.5"]  # bfloat16, which is tested on a CUDA runtime that needs no GPU

setup(
    name="minidl",
    version="0.1.0",
    description="A mini deep-learning engine in which the order of the backward pass is a value",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=["minidl", "minidl.autograd", "minidl.cli", "minidl.data", "minidl.kernels", "minidl.models", "minidl.nn",
              "minidl.ops", "minidl.optim", "minidl.passes", "minidl.passes.fusion", "minidl.pricing",
              "minidl.runtime", "minidl.runtime.comm", "minidl.runtime.cuda", "minidl.runtime.native",
              "minidl.schedulers",
              "minidl.schedulers.pipeline", "minidl.training", "minidl.views"],
    package_data={"minidl": ["py.typed"], "minidl.data": ["*.csv.gz", "*.md"], "minidl.kernels": ["*.cu", "*.cuh"],
                  "minidl.cli": ["templates/*/*.txt"],
                  "minidl.views": ["assets/*"]},
    install_requires=[
        "numpy>=2.0",
        "numba>=0.60",
        "mpi4py>=4.0",
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
        "data": ["tokenizers", "pillow", "sacrebleu"],  # vocabularies, pictures, and BLEU as others compute it
        "tensorboard": ["tensorboard"],
        "docs": ["sphinx>=8", "myst-parser>=4", "furo"],  # one site from the pages and the docstrings
        "parity": ["torch==2.13.0"],
        "cuda-check": ["cupy-cuda13x", "nvidia-cuda-nvrtc==13.0.88", "nvidia-cuda-runtime==13.0.96",
                       "cuda-bindings>=13,<14", NVMATH, FRONTEND],
        "notebooks": ["jupytext>=1.16", "nbclient>=0.10", "ipykernel>=6.29"],  # the tutorial's chapters as notebooks
        "browser": ["playwright>=1.48"],  # tests of pages in a real browser, which is Debian's chromium
        "test": TEST,
        "dev": [*TEST, "ruff==0.17.5", "mypy==2.4.1", "pre-commit"],
    },
    entry_points={"console_scripts": ["minidl=minidl.__main__:run"]},
)
