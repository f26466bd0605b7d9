"""cuDNN's plans for the convolutions and attention of our networks, built without a GPU from the properties of an H200.

So an engine that is missing, for a shape, a type or an arithmetic, is noticed on a machine that cannot run it. Needs
cuDNN's wheels. A library of empty functions stands in the place of the driver: of the six that cuDNN's libraries are
linked with, or, since the kernels of attention are compiled for a plan, of those too that such engines look up.
Convolutions do without the latter: compiling engines for them takes long, and there are others for each.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import CudaOnCpu
from helpers import PATIENCE, ROOT

import minidl as ml
from minidl import models, nn
from minidl.autograd.tape import Tape, use
from minidl.core.tasks import strides_of
from minidl.devices.cuda import attention, tuner
from minidl.devices.cuda.convolutions import Key
from minidl.devices.cuda.dnn import LARGEST
from minidl.fusion import fused
from minidl.kernels import KERNELS, cuda

pytestmark = pytest.mark.may_skip
PROPERTIES = Path(__file__).with_name("h200_properties.json")
LIBRARIES = {"nvidia-cudnn-cu13": "cudnn/lib/libcudnn.so.9", "nvidia-cublas": "cu13/lib/libcublasLt.so.13",
             "nvidia-cuda-nvrtc": "cu13/lib/libnvrtc.so.13"}
NO_DEVICE = "() { return 100; }"  #: CUDA_ERROR_NO_DEVICE
#: of libcuda, what cuDNN 9's libraries are linked with: `nm -D --undefined-only libcudnn*.so.9 | grep ' cu[A-Z]'`
LINKED = dict.fromkeys(("cuGetErrorString", "cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload",
                        "cuTensorMapEncodeIm2col", "cuTensorMapEncodeTiled"), NO_DEVICE)
#: what engines that compile their kernels look up, as standard error says where it is missing; what they
#: compiled is "loaded"
LOOKED_UP = {
    **dict.fromkeys(("cuCtxGetCurrent", "cuCtxGetLimit", "cuCtxPopCurrent", "cuCtxPushCurrent", "cuDeviceGet",
                     "cuDeviceGetCount", "cuDriverGetVersion", "cuGetErrorName", "cuLaunchCooperativeKernel",
                     "cuLaunchKernel", "cuLaunchKernelEx", "cuLibraryLoadFromFile", "cuLinkAddData", "cuLinkComplete",
                     "cuLinkCreate", "cuLinkDestroy", "cuOccupancyMaxPotentialClusterSize", "cuStreamGetCtx"),
                    NO_DEVICE),
    **dict.fromkeys(("cuKernelGetAttribute", "cuKernelSetAttribute", "cuLibraryUnload"), "() { return 0; }"),
    **dict.fromkeys(("cuKernelGetFunction", "cuLibraryGetKernel", "cuLibraryLoadData"),
                    "(void** handle) { *handle = handle; return 0; }")}

ARITHMETIC = {"float32": {"dtype": "float32", "tf32": False}, "tf32": {"dtype": "float32", "tf32": True},
              "bfloat16": {"dtype": "bfloat16", "tf32": False}}
NETWORKS = {"mobilenet a0.25": ("mobilenet_v3_large", {"width": 0.25}),
            "mobilenet a1": ("mobilenet_v3_large", {"width": 1.0}), "densenet k12": ("densenet121", {"growth": 12}),
            "densenet k32": ("densenet121", {"growth": 32}), "resnet20": ("resnet20", {})}
CASES = [(network, size) for network in NETWORKS for size in (32, 224) if network != "resnet20" or size == 32]


def dense(*shape: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A contiguous array, as a key knows it."""
    return shape, strides_of(shape)


#: that our networks need not have
SQUARE = Key("forward", dense(32, 8, 8, 64), dense(64, 3, 3, 64), dense(32, 8, 8, 64), (16, 16, 16), (1, 1), (1, 1),
             (1, 1), "float32", False, True)
STRICT = [replace(SQUARE, what=what, dtype=dtype, tf32=tf32) for what in ("forward", "input_grad", "weight_grad")
          for dtype, tf32 in (("float32", False), ("float32", True), ("bfloat16", False))]
LOOSE = [replace(key, deterministic=False) for key in STRICT]
IMPOSSIBLE = replace(SQUARE, w=dense(63, 3, 3, 32), y=dense(32, 8, 8, 63))  # two groups of 63 outputs

#: reads (properties, keys) and writes for each key, of the plans that can be built, their names, workspaces, whether
#: each runs on the tensor cores, and the engine of the first; or what was said instead
BUILD = """
import json, pickle, re, sys
import cudnn
from minidl.devices.cuda.dnn import described, plans

properties, keys = pickle.load(sys.stdin.buffer)
device = cudnn.create_device_properties(json.dumps(properties))
architecture = {"sm_version": properties["deviceVer"], "sm_count": properties["multiProcessorCount"]}

def named(key, *notes):
    graph = described(cudnn, key, device_property=device, **architecture)
    if notes:
        graph.select_numeric_notes(list(notes))
    return graph, list(plans(cudnn, graph))

found = []
for key in keys:
    try:
        graph, built = named(key)
        if not built:
            raise RuntimeError(f"cuDNN has no plan for {key}")
    except RuntimeError as error:
        found.append({"error": str(error)})
        continue
    _, fast = named(key, cudnn.numerical_note.TENSOR_CORE)
    engine = re.search(r"eng(\\d+)", built[0][1])
    found.append({"through": [name for _, name in built], "engine": int(engine[1]),
                  "tensor_cores": [plan in fast for plan in built],
                  "workspace": [graph.get_workspace_size_plan_at_index(place) for place, _ in built]})
print(json.dumps(found))
"""


class Capturing(CudaOnCpu):
    captures = True  # what tells fusion that convolutions take gaps between pixels


Build = Callable[..., list[dict[str, Any]]]
Plans = list[dict[Key, dict[str, Any]]]
Flash = dict[attention.Key, dict[str, Any]]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds plans in a process in which cuDNN loads without a driver:
    `build(functions of the driver, keys, **properties that the device has instead of an H200's)` gives what BUILD
    says."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    paths = {package: next((f / path for f in folders if (f / path).exists()), None)
             for package, path in LIBRARIES.items()}
    missing = [package for package, path in paths.items() if path is None]
    missing += [] if importlib.util.find_spec("cudnn") else ["nvidia-cudnn-frontend"]
    if missing:
        pytest.skip(f"no cuDNN plans can be built without {', '.join(missing)}")
    if shutil.which("g++") is None:
        pytest.skip("no stand-in for libcuda can be built: g++ is not installed")

    def run(functions: dict[str, str], keys: Sequence[Any], **properties: Any) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("libcuda")
        (folder / "stub.cpp").write_text("".join(f'extern "C" int {name}{body}\n' for name, body in functions.items()))
        subprocess.run(["g++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "stub.cpp", "-o", "libcuda.so.1"],
                       cwd=folder, check=True)
        search = [str(folder), *(str(path.parent) for path in paths.values() if path),
                  os.environ.get("LD_LIBRARY_PATH", "")]
        environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, search)),
                       "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        given = pickle.dumps(({**json.loads(PROPERTIES.read_text()), **properties}, keys))
        done = subprocess.run([sys.executable, "-c", BUILD], input=given, env=environment,
                              capture_output=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr[-2000:].decode()
        return list(json.loads(done.stdout))

    return run


@pytest.fixture(scope="module")
def plans(build: Build) -> Plans:
    """What became of every convolution's key of this file, in one process, which builds them twice."""
    keys = [SQUARE, *(key for case in CASES for joined in (False, True) for key in convolutions(*case, joined=joined))]
    wanted = [*dict.fromkeys([*(replace(key, **given) for key in keys for given in ARITHMETIC.values()), *STRICT,
                              *LOOSE]), IMPOSSIBLE]
    found = build(LINKED, wanted * 2)
    return [dict(zip(wanted, part, strict=True)) for part in (found[: len(wanted)], found[len(wanted) :])]


@cache
def convolutions(network: str, size: int, batch: int = 32, joined: bool = False) -> frozenset[Key]:
    """The keys of all convolutions that a training step gives to cuDNN; `joined`: which write where outputs are
    joined."""
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
        reads, writes, work = ([device.array(memory, v) for v in views]
                               for views in (launch.reads, launch.writes, launch.work))
        for call in KERNELS[launch.kernel].cuda_calls(reads, writes, work, dict(launch.constants)):
            if isinstance(call, cuda.Convolution):
                assert joined or cuda.contiguous(call.x, call.w, call.y), "plans are for arrays that lie together"
                found.add(Key.of(call, False, True))
    return frozenset(found)


@pytest.mark.parametrize(("network", "size"), CASES)
def test_every_convolution_of_a_network_has_a_plan(plans: Plans, network: str, size: int) -> None:
    keys = convolutions(network, size) | convolutions(network, size, joined=True)
    assert {key.what for key in keys} >= {"forward", "weight_grad"}
    found = {key: plans[0][key] for key in (replace(key, **given) for key in keys for given in ARITHMETIC.values())}
    assert {key: f["error"] for key, f in found.items() if "error" in f} == {}
    assert max(nbytes for f in found.values() for nbytes in f["workspace"]) <= LARGEST


@pytest.mark.parametrize(("network", "size"), CASES)
def test_every_convolution_may_run_on_the_tensor_cores(plans: Plans, network: str, size: int) -> None:
    """In TF32 and in 16 bits, one of those that are timed does, also where channels are not a multiple of 8 and lie
    with gaps between them: cuDNN pads them in its workspace. What it names first need not, see DenseNet's 12
    channels."""
    keys = convolutions(network, size) | convolutions(network, size, joined=True)
    found = {replace(key, **ARITHMETIC[kind]): plans[0][replace(key, **ARITHMETIC[kind])]["tensor_cores"]
             for key in keys for kind in ("tf32", "bfloat16")}
    assert [key for key, fast in found.items() if not any(fast[: tuner.CANDIDATES])] == []
    first = [key for key, fast in found.items() if not fast[0]]
    assert {key.what for key in first if key.dtype == "float32"} >= ({"input_grad"} if network == "densenet k12"
                                                                     and size == 32 else set())


def test_strict_float32_takes_other_engines_than_tf32(plans: Plans) -> None:
    for what in ("forward", "input_grad", "weight_grad"):
        strict, rounded = (plans[0][replace(SQUARE, what=what, tf32=tf32)]["engine"] for tf32 in (False, True))
        assert strict != rounded, f"{what}: engine {strict}"


def test_only_engines_that_repeat_their_bits_unless_others_are_asked_for(plans: Plans) -> None:
    """A forward convolution adds nothing up in two places; gradients may."""
    for strict, loose in zip(STRICT, LOOSE, strict=True):
        fewer, more = set(plans[0][strict]["through"]), set(plans[0][loose]["through"])
        assert fewer == more if strict.what == "forward" else fewer < more, f"{strict}: {more - fewer}"


def test_a_plan_is_the_same_each_time(plans: Plans) -> None:
    assert plans[0] == plans[1]


def test_what_has_no_plan_says_so(plans: Plans) -> None:
    assert "cuDNN has no plan for Key(what='forward'" in plans[0][IMPOSSIBLE]["error"]


def test_growth_is_written_and_read_where_it_is_joined() -> None:
    gaps = [key for key in convolutions("densenet k12", 32, joined=True) if key.y[1] != strides_of(key.y[0])]
    assert {key.what for key in gaps} == {"forward", "input_grad", "weight_grad"}


# ------------------------------------------------------------------------------------------------------------ attention
class Halves(CudaOnCpu):
    halves = flash = True


#: heads, queries, keys (None: the queries' own), elements of a head, causal
ATTENTION = {"bert": (12, 128, None, 64, False), "gpt": (16, 1024, None, 64, True), "tiny": (2, 7, None, 8, True),
             "wide": (2, 33, None, 128, True), "cross": (3, 5, 77, 40, False), "one query": (2, 1, 9, 16, True)}


@cache
def attentions(shape: str, low: str) -> tuple[attention.Key, ...]:
    """The keys of forward and gradient, as a layer's training step in 16 bits gives them to cuDNN."""
    heads, t, s, width, causal = ATTENTION[shape]
    device = Halves()
    with use(Tape(device)), ml.autocast(low):
        layer = nn.MultiheadAttention(heads * width, heads, causal=causal)

        def step(x: Any, *memory: Any) -> None:
            y = layer(x, *memory)
            (y * y).sum().backward()

        graph = ml.record(step, *(np.zeros((2, n, heads * width), np.float32) for n in (t, s) if n))
    graph = fused(graph, device, ["flash_attention"])
    memory = np.empty(max(s.bytes for s in graph.storages), np.uint8)
    found = []
    for launch in (launch for task in graph.launches for launch in task if "attention" in launch.kernel):
        reads, writes = ([device.array(memory, v) for v in views] for views in (launch.reads, launch.writes))
        (call,) = KERNELS[launch.kernel].cuda_calls(reads, writes, [], dict(launch.constants))
        assert isinstance(call, cuda.Attention)
        found.append(attention.Key.of(call, False, True))
    return tuple(found)


KEYS = [(shape, "float16" if shape in ("gpt", "cross") else "bfloat16") for shape in ATTENTION]


@pytest.fixture(scope="module")
def flash(build: Build) -> Flash:
    """What became of every key of attention."""
    wanted = [*(key for case in KEYS for key in attentions(*case)),
              *(replace(key, deterministic=False) for key in attentions("gpt", "float16"))]
    return dict(zip(wanted, build(LINKED | LOOKED_UP, wanted), strict=True))


@pytest.mark.parametrize(("shape", "low"), KEYS)
def test_attention_that_fusion_takes_has_plans(flash: Flash, shape: str, low: str) -> None:
    keys = attentions(shape, low)
    assert [key.what for key in keys] == ["forward", "grad"]
    assert {key: flash[key]["error"] for key in keys if "error" in flash[key]} == {}
    assert all(max(flash[key]["workspace"]) <= LARGEST for key in keys)


def test_attention_need_not_repeat_its_bits(flash: Flash) -> None:
    assert all("error" not in found for key, found in flash.items() if not key.deterministic)


@pytest.mark.slow
def test_flash_kernels_begin_with_ampere(build: Build) -> None:
    """As `Cuda.flash` says. Shared memory and multiprocessors of an A100 and a T4."""
    keys = attentions("bert", "bfloat16")
    ampere = build(LINKED | LOOKED_UP, keys, deviceVer=800, multiProcessorCount=108,
                   maxSharedMemoryPerBlockOptin=166912, maxSharedMemoryPerSM=167936)
    turing = build(LINKED | LOOKED_UP, keys, deviceVer=750, multiProcessorCount=40, maxSharedMemoryPerBlockOptin=65536,
                   maxSharedMemoryPerSM=65536)
    assert ["error" in found for found in (*ampere, *turing)] == [False, False, True, True]
    assert "cuDNN has no plan for Key(what='forward'" in turing[0]["error"]
