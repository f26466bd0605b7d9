#!/usr/bin/env bash
# Sets up a bare machine with a GPU and runs one stage of what is to be shown there. The machine has CUDA, CuPy, torch and
# pytest, and perhaps no network; what else is needed is carried there as wheels, in .wheels, which git ignores.
#
#     PYTHON=3.12 bench/gpu_machine.sh wheels [PACKAGE ...]      with a network, for the Python there: these packages too
#     bench/gpu_machine.sh STAGE [ARGUMENT ...]                  on the machine: A, B and C first
#
# | stage    | what                                                                                            |
# |----------|-------------------------------------------------------------------------------------------------|
# | A, B, C  | the sections of that call in bench/gpu_proof.py, each with a limit of its own, and their table  |
# | ladder   | minidl against torch, rung by rung: bench/ladder.py, which gets the arguments                   |
# | PART     | that part of bench/gpu_proof.py: smoke, tests, kernels, table, nccl, copies, launch, mpi,       |
# |          | sanitizer, references                                                                           |
#
# Records and the choices of the libraries' kernels (choices.sqlite) are kept in $SITE/work, from where a later stage
# continues them, and are copied to $OUT (bench/results) every few seconds and at the end: a machine may empty $OUT before
# every stage. What an earlier machine sent back continues too if it is carried here in .gpu, which git ignores. A stage ends
# within $WITHIN seconds (540). Without wheels, or with an $OUT that cannot be written, a stage says so and goes on. Nothing
# is written outside of $OUT and $SITE (a folder under $TMPDIR), where the wheels are installed once.
set -u
cd "$(dirname "$0")/.." || exit 2
out=${OUT:-bench/results} within=${WITHIN:-540} site=${SITE:-${TMPDIR:-/tmp}/minidl-gpu-$(id -u)}
wheels="nvmath-python==1.0.0 nvidia-cudnn-frontend==1.23.0 cuda-core==1.2.2 cuda-pathfinder==1.9.0 mpich==5.0.2"

say() { echo "gpu_machine: $1" >&2; }
usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' bench/gpu_machine.sh >&2; exit 2; }

fetch() {
  local platforms=()
  for p in linux_x86_64 manylinux2014_x86_64 manylinux_2_24_x86_64 manylinux_2_27_x86_64 manylinux_2_28_x86_64; do platforms+=(--platform "$p"); done
  # shellcheck disable=SC2086
  exec python3 -m pip download --no-deps --only-binary=:all: --python-version "${PYTHON:-3.12}" "${platforms[@]}" -d .wheels $wheels "$@"
}

install() {
  [ -e "$site/.done" ] && return
  ls .wheels/*.whl > /dev/null 2>&1 || { say ".wheels has no wheels; run bench/gpu_machine.sh wheels where there is a network"; return; }
  local whole=1
  rm -rf "$site/packages" "$site/mpi" && mkdir -p "$site/mpi" || exit 2
  for wheel in .wheels/*.whl; do
    case $wheel in  # pip --target loses the libraries of the MPI, which lie among its wheel's data
      .wheels/mpich*) python3 -m zipfile -e "$wheel" "$site/mpi" && chmod +x "$site"/mpi/*.data/data/bin/* ;;
      *) python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site/packages" "$wheel" ;;
    esac || { say "$wheel cannot be installed"; whole=0; }
  done
  [ $whole = 0 ] || touch "$site/.done"
}

[ $# -gt 0 ] || usage
stage=$1; shift
case $stage in
  wheels) fetch "$@" ;;
  A|B|C|ladder|smoke|tests|kernels|table|nccl|copies|launch|mpi|sanitizer|references) ;;
  *) usage ;;
esac
install
within=$((within - SECONDS)) work=$site/work
mkdir -p "$work" || exit 2
[ ! -d .gpu ] || cp -n .gpu/* "$work" 2> /dev/null
send() {  # whole files only: what a full disk cuts off would count as newer
  local file new="$out/.new.$BASHPID" sent=0
  mkdir -p "$out" || sent=1
  for file in "$work"/*.json "$work"/choices.sqlite; do
    [ "$file" -nt "$out/${file##*/}" ] || continue
    { cp -p "$file" "$new" && mv "$new" "$out/${file##*/}"; } || { rm -f "$new"; sent=1; }
  done
  return $sent
}
while sleep 10; do send; done > /dev/null 2>&1 &
sender=$!
trap 'kill $sender 2> /dev/null; send 2> /dev/null || say "not all records could be copied to $out; they are in $work"' EXIT
mpi=$(echo "$site"/mpi/*.data/data)
export PYTHONPATH="$site/packages${PYTHONPATH:+:$PYTHONPATH}" PATH="$mpi/bin:$PATH:/usr/local/cuda/bin" PYTHONUNBUFFERED=1
export LD_LIBRARY_PATH="$mpi/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" CUPY_CACHE_DIR="${CUPY_CACHE_DIR:-$site/cupy}" MINIDL_CACHE="${MINIDL_CACHE:-$work}"
case $stage in
  A|B|C) python3 bench/gpu_proof.py --call "$stage" --within "$within" --out "$work/gpu_proof.json" "$@" ;;
  ladder) timeout -k 10 "$within" python3 bench/ladder.py --resume --budget "$((within - 30))" --out "$work/ladder.json" "$@" ;;
  *) python3 bench/gpu_proof.py --part "$stage" --within "$within" --out "$work/gpu_proof.json" "$@" ;;
esac
