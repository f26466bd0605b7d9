"""cuDNN's plans for the convolutions of our networks, built without a GPU from the properties of an H200.

So an engine that is missing, for a shape, a type or an arithmetic, is noticed on a machine that cannot run it. Needs
cuDNN's wheels; one of its libraries is linked with the driver, in whose place a library of six empty functions stands.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import CudaOnCpu

import minidl as ml
from minidl import models, nn
from minidl.cuda.convolutions import Key
from minidl.device import strides_of
from minidl.fusion import fused
from minidl.kernels import KERNELS, cuda
from minidl.tape import Tape, use

ROOT = Path(__file__).parent.parent
PROPERTIES = Path(__file__).parent / "data" / "h200_properties.json"
LIBRARIES = {"nvidia-cudnn-cu13": "cudnn/lib/libcudnn.so.9", "nvidia-cublas": "cu13/lib/libcublasLt.so.13"}
#: of libcuda, what cuDNN 9's libraries are linked with: `nm -D --undefined-only libcudnn*.so.9 | grep ' cu[A-Z]'`
DRIVER = ("cuGetErrorString", "cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload", "cuTensorMapEncodeIm2col",
          "cuTensorMapEncodeTiled")
NO_DEVICE = 100  #: CUDA_ERROR_NO_DEVICE
LARGEST = 2**28  #: bytes of workspace that a plan may want

ARITHMETIC = {"float32": {"dtype": "float32", "tf32": False}, "tf32": {"dtype": "float32", "tf32": True},
              "bfloat16": {"dtype": "bfloat16", "tf32": False}}
NETWORKS = {"mobilenet a0.25": ("mobilenet_v3_large", {"width": 0.25}), "mobilenet a1": ("mobilenet_v3_large", {"width": 1.0}),
            "densenet k12": ("densenet121", {"growth": 12}), "densenet k32": ("densenet121", {"growth": 32}),
            "resnet20": ("resnet20", {})}
CASES = [(network, size) for network in NETWORKS for size in (32, 224) if network != "resnet20" or size == 32]

#: two that our networks need not have
def dense(*shape: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A contiguous array, as a key knows it."""
    return shape, strides_of(shape)


SQUARE = Key("forward", dense(32, 8, 8, 64), dense(64, 3, 3, 64), dense(32, 8, 8, 64), (1, 1), (1, 1), (1, 1), "float32", False, True)
STRICT = [replace(SQUARE, what=what, dtype=dtype, tf32=tf32) for what in ("forward", "input_grad", "weight_grad")
          for dtype, tf32 in (("float32", False), ("float32", True), ("bfloat16", False))]
LOOSE = [replace(key, deterministic=False) for key in STRICT]
IMPOSSIBLE = replace(SQUARE, w=dense(63, 3, 3, 32), y=dense(32, 8, 8, 63))  # two groups of 63 outputs

#: reads (properties, keys, those of which all engines are tried) and writes for each key its workspace and engine, or what was
#: said instead, and the engines and settings that were let through
BUILD = """
import json, pickle, re, sys
import cudnn
from minidl.cuda.dnn import plan

properties, keys, tried = pickle.load(sys.stdin.buffer)
device = cudnn.create_device_properties(properties)

def let_through(graph):
    names = []
    for i in range(graph.get_execution_plan_count()):
        try:
            graph.build_plan_at_index(i)
            names.append(graph.get_plan_name_at_index(i))
        except cudnn.cudnnGraphNotSupportedError:
            pass
    return names

found = []
for key in keys:
    try:
        graph = plan(key, device_property=device, sm_version=900, sm_count=132)
        engine = re.search(rb'"engineId":(\\d+)', bytes(graph.serialize()))
        found.append({"workspace": graph.get_workspace_size(), "engine": int(engine[1])})
        found[-1] |= {"through": let_through(graph)} if key in tried else {}
    except RuntimeError as error:
        found.append({"error": str(error)})
print(json.dumps(found))
"""


class Capturing(CudaOnCpu):
    captures = True  # what tells fusion that convolutions take gaps between pixels


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """That of a process in which cuDNN loads without a driver."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    paths = {package: next((f / path for f in folders if (f / path).exists()), None) for package, path in LIBRARIES.items()}
    missing = [package for package, path in paths.items() if path is None]
    missing += [] if importlib.util.find_spec("cudnn") else ["nvidia-cudnn-frontend"]
    if missing:
        pytest.skip(f"no cuDNN plans can be built without {', '.join(missing)}")
    if shutil.which("g++") is None:
        pytest.skip("no stand-in for libcuda can be built: g++ is not installed")
    folder = tmp_path_factory.mktemp("libcuda")
    (folder / "stub.cpp").write_text("".join(f'extern "C" int {name}() {{ return {NO_DEVICE}; }}\n' for name in DRIVER))
    subprocess.run(["g++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "stub.cpp", "-o", "libcuda.so.1"], cwd=folder, check=True)
    search = [str(folder), *(str(path.parent) for path in paths.values() if path), os.environ.get("LD_LIBRARY_PATH", "")]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, search)), "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def plans(environment: dict[str, str]) -> list[dict[Key, dict[str, Any]]]:
    """What became of every key of this file, in one process, which builds them twice. cuDNN says on standard error which
    further functions of the driver it would like."""
    keys = [SQUARE, *(key for case in CASES for joined in (False, True) for key in convolutions(*case, joined=joined))]
    wanted = [*dict.fromkeys([*(replace(key, **given) for key in keys for given in ARITHMETIC.values()), *STRICT, *LOOSE]), IMPOSSIBLE]
    given = pickle.dumps((PROPERTIES.read_text(), wanted * 2, LOOSE + STRICT))
    done = subprocess.run([sys.executable, "-c", BUILD], input=given, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:].decode()
    found = json.loads(done.stdout)
    return [dict(zip(wanted, part, strict=True)) for part in (found[: len(wanted)], found[len(wanted) :])]


@cache
def convolutions(network: str, size: int, batch: int = 32, joined: bool = False) -> frozenset[Key]:
    """The keys of all convolutions that a training step gives to cuDNN; `joined`: which write where outputs are joined."""
    (name, arguments), device = NETWORKS[network], CudaOnCpu()
    with use(Tape(device)):
        ml.seed(0)
        model = models.create(name, image_size=size, classes=10, **arguments)

        def step(x: Any, y: Any) -> None:
            nn.cross_entropy(model(x), y).backward()

        graph = ml.record(step, np.zeros((batch, *model.input_shape), np.float32), np.zeros(batch, np.int64))
    graph = fused(graph, Capturing(), ["slabs"]) if joined else graph
    memory = np.empty(max(s.bytes for s in graph.storages), np.uint8)  # of all arrays: nothing runs
    found = set()
    for launch in (launch for task in graph.launches for launch in task if launch.kernel.startswith("conv2d")):
        reads, writes, work = ([device.array(memory, v) for v in views] for views in (launch.reads, launch.writes, launch.work))
        for call in KERNELS[launch.kernel].cuda_calls(reads, writes, work, dict(launch.constants)):
            if isinstance(call, cuda.Convolution):
                assert joined or cuda.contiguous(call.x, call.w, call.y), "plans are for arrays that lie together"
                found.add(Key.of(call, False, True))
    return frozenset(found)


@pytest.mark.parametrize(("network", "size"), CASES)
def test_every_convolution_of_a_network_has_a_plan(plans: list[dict[Key, dict[str, Any]]], network: str, size: int) -> None:
    keys = convolutions(network, size) | convolutions(network, size, joined=True)
    assert {key.what for key in keys} >= {"forward", "weight_grad"}
    found = {key: plans[0][key] for key in (replace(key, **given) for key in keys for given in ARITHMETIC.values())}
    assert {key: f["error"] for key, f in found.items() if "error" in f} == {}
    assert {key: f["workspace"] for key, f in found.items() if f["workspace"] > LARGEST} == {}


def test_strict_float32_takes_other_engines_than_tf32(plans: list[dict[Key, dict[str, Any]]]) -> None:
    for what in ("forward", "input_grad", "weight_grad"):
        strict, rounded = (plans[0][replace(SQUARE, what=what, tf32=tf32)]["engine"] for tf32 in (False, True))
        assert strict != rounded, f"{what}: engine {strict}"


def test_only_engines_that_repeat_their_bits_unless_others_are_asked_for(plans: list[dict[Key, dict[str, Any]]]) -> None:
    """A forward convolution adds nothing up in two places; gradients may."""
    for strict, loose in zip(STRICT, LOOSE, strict=True):
        fewer, more = set(plans[0][strict]["through"]), set(plans[0][loose]["through"])
        assert fewer == more if strict.what == "forward" else fewer < more, f"{strict}: {more - fewer}"


def test_a_plan_is_the_same_each_time(plans: list[dict[Key, dict[str, Any]]]) -> None:
    assert plans[0] == plans[1]


def test_what_has_no_plan_says_so(plans: list[dict[Key, dict[str, Any]]]) -> None:
    assert "cuDNN has no plan for Key(what='forward'" in plans[0][IMPOSSIBLE]["error"]


def test_growth_is_written_and_read_where_it_is_joined() -> None:
    gaps = [key for key in convolutions("densenet k12", 32, joined=True) if key.y[1] != strides_of(key.y[0])]
    assert {key.what for key in gaps} == {"forward", "input_grad", "weight_grad"}
