#!/usr/bin/env bash
# Sets up a bare machine with a GPU and runs one stage of what is to be shown there. The machine has CUDA, CuPy, torch and
# pytest, and perhaps no network; what else is needed is carried there as wheels, in .wheels, which git ignores.
#
#     PYTHON=3.12 bench/gpu_machine.sh wheels [PACKAGE ...]      with a network, for the Python there: these packages too
#     bench/gpu_machine.sh STAGE [ARGUMENT ...]                  on the machine
#
# | stage    | what                                                                                            |
# |----------|-------------------------------------------------------------------------------------------------|
# | smoke    | versions, tools, stream priorities; three networks captured and replayed; launches, quickly     |
# | ladder   | minidl against torch, rung by rung: bench/ladder.py, which gets the arguments                   |
# | PART     | that part of bench/gpu_proof.py: tests, kernels, launch, mpi, sanitizer, references             |
#
# Records are written under $OUT (bench/results) as they are found, and a stage goes on with those that lie there; what was
# chosen of the libraries' kernels lies in $OUT/choices.sqlite, for the next stage. A stage ends within $WITHIN seconds (570).
# Nothing is written outside of $OUT but $SITE (a folder under $TMPDIR), where the wheels are installed once.
set -u
cd "$(dirname "$0")/.." || exit 2
out=${OUT:-bench/results} within=${WITHIN:-570} site=${SITE:-${TMPDIR:-/tmp}/minidl-gpu-$(id -u)}
wheels="nvmath-python==1.0.0 nvidia-cudnn-frontend==1.23.0 cuda-core==1.2.2 cuda-pathfinder==1.9.0 mpich==5.0.2"

usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' bench/gpu_machine.sh >&2; exit 2; }

fetch() {
  local platforms=()
  for p in linux_x86_64 manylinux2014_x86_64 manylinux_2_24_x86_64 manylinux_2_27_x86_64 manylinux_2_28_x86_64; do platforms+=(--platform "$p"); done
  # shellcheck disable=SC2086
  exec python3 -m pip download --no-deps --only-binary=:all: --python-version "${PYTHON:-3.12}" "${platforms[@]}" -d .wheels $wheels "$@"
}

install() {
  [ -e "$site/.done" ] && return
  ls .wheels/*.whl > /dev/null 2>&1 || { echo "gpu_machine: .wheels has no wheels; run bench/gpu_machine.sh wheels where there is a network" >&2; exit 2; }
  rm -rf "$site" && mkdir -p "$site/mpi" || exit 2
  for wheel in .wheels/*.whl; do
    case $wheel in  # pip --target loses the libraries of the MPI, which lie among its wheel's data
      .wheels/mpich*) python3 -m zipfile -e "$wheel" "$site/mpi" && chmod +x "$site"/mpi/*.data/data/bin/* ;;
      *) python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site/packages" "$wheel" ;;
    esac || { echo "gpu_machine: $wheel cannot be installed" >&2; exit 2; }
  done
  touch "$site/.done"
}

smoke() {
  local failed=0
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  for tool in git mpiexec nvcc compute-sanitizer g++; do echo "$tool: $(command -v $tool || echo missing)"; done
  python3 - <<'X' || failed=1
import importlib.metadata as metadata

for name in ("cupy-cuda13x cuda-bindings cuda-core cuda-pathfinder nvmath-python nvidia-cudnn-frontend nvidia-cudnn-cu13 nvidia-cublas nvidia-cuda-nvrtc "
             "numba numba-cuda ml-dtypes numpy torch pytest pytest-xdist hypothesis").split():
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "missing")
import minidl as ml

device = ml.device.get("cuda")
found = [device.driver.runtime.streamGetPriority(stream.ptr) for stream in device.streams((0, 1))]
print(device.driver.describe(), "main and beside it:", found, "flash attention:", device.flash)
X
  for model in "lenet" "mobilenet_v3_large --model-arg preset=tiny" "densenet121 --model-arg preset=tiny"; do
    # shellcheck disable=SC2086
    timeout 70 python3 -m minidl train --model $model --device cuda --costs analytic --steps 10 --batch-size 8 --scheduler multi_stream --json || failed=1
    echo
  done
  timeout 60 python3 bench/launch_overhead.py --device cuda --quick --out "$out/launch_quick.json" || failed=1
  return $failed
}

[ $# -gt 0 ] || usage
stage=$1; shift
case $stage in
  wheels) fetch "$@" ;;
  smoke|ladder|tests|kernels|launch|mpi|sanitizer|references) ;;
  *) usage ;;
esac
install
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
mpi=$(echo "$site"/mpi/*.data/data)
export PYTHONPATH="$site/packages${PYTHONPATH:+:$PYTHONPATH}" PATH="$mpi/bin:$PATH:/usr/local/cuda/bin" PYTHONUNBUFFERED=1
export LD_LIBRARY_PATH="$mpi/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" CUPY_CACHE_DIR="${CUPY_CACHE_DIR:-$site/cupy}" MINIDL_CACHE="${MINIDL_CACHE:-$out}"
case $stage in
  smoke) smoke ;;
  ladder) timeout -k 10 "$within" python3 bench/ladder.py --resume --budget "$((within - 30))" --out "$out/ladder.json" "$@" ;;
  *) python3 bench/gpu_proof.py --part "$stage" --within "$within" --out "$out/gpu_proof.json" "$@" ;;
esac
