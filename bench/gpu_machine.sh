#!/usr/bin/env bash
# Sets up a bare machine with a GPU and runs one stage of what is to be shown there. The machine has CUDA, CuPy, torch and
# pytest, and perhaps no network; what else is needed is carried there as wheels, in .wheels, which git ignores.
#
#     PYTHON=3.12 bench/gpu_machine.sh wheels [PACKAGE ...]      with a network, for the Python there: these packages too
#     bench/gpu_machine.sh STAGE [ARGUMENT ...]                  on the machine: A, right after it B
#
# | stage  | what                                                                                              |
# |--------|---------------------------------------------------------------------------------------------------|
# | A, B   | the sections of that call in bench/gpu_proof.py, each with a limit of its own, and their table    |
# | ladder | minidl against torch, rung by rung: bench/ladder.py, which gets the arguments                     |
# | PART   | that part of bench/gpu_proof.py: smoke, tests, kernels, table, nccl, copies, launch, shares, mpi, |
# |        | sanitizer, references                                                                             |
#
# A call ends within $WITHIN seconds: 290, other stages 540. B needs no install, compile or tuning: A leaves them in
# $SITE (a folder under $TMPDIR). There records are kept, the choices of libraries' kernels, and the kernels that CuPy has
# compiled. All are copied to $OUT (bench/results) every few seconds and at the end: *.json, choices_CARD.sqlite for each
# kind of GPU, cupy.tgz. Carried back in .gpu, which git ignores, the next machine goes on from them. Carry .wheels and
# .gpu, two of 8 paths; with the tree they must fit 64 MiB: .wheels has 22 and the tree 9. A machine may empty $OUT before
# every stage. Without wheels, or with an $OUT that cannot be written, a stage says so and goes on. Nothing is written
# outside of $OUT and $SITE.
set -u
cd "$(dirname "$0")/.." || exit 2
out=${OUT:-bench/results} site=${SITE:-${TMPDIR:-/tmp}/minidl-gpu-$(id -u)}
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
stage=$1 within=${WITHIN:-540}; shift
case $stage in
  wheels) fetch "$@" ;;
  A|B) within=${WITHIN:-290} ;;
  ladder|smoke|tests|kernels|table|nccl|copies|launch|shares|mpi|sanitizer|references) ;;
  *) usage ;;
esac
install
card=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | head -n 1 | tr -c 'A-Za-z0-9\n' -)
work=$site/work cupy=${CUPY_CACHE_DIR:-$site/cupy} choices=choices_${card:-none}.sqlite
export MINIDL_CACHE="${MINIDL_CACHE:-$site/${card:-none}}" CUPY_CACHE_DIR="$cupy"
mkdir -p "$work" "$cupy" "$MINIDL_CACHE" || exit 2

whole() { cp -p "$1" "$2/.new.$BASHPID" && mv "$2/.new.$BASHPID" "$2/$3" || { rm -f "$2/.new.$BASHPID"; return 1; }; }
newer() { [ ! "$1" -nt "$2/$3" ] || whole "$1" "$2" "$3"; }  # never a part of a file, which would count as newer
pack() {  # CuPy's compiled kernels
  [ -n "$(find "$cupy" -type f ! -name '.*' -newer "$work/cupy.tgz" -print -quit 2> /dev/null || ls "$cupy")" ] || return 0
  touch "$work/.begun" && tar -czf "$work/.cupy" -C "$cupy" . && touch -r "$work/.begun" "$work/.cupy" &&
    mv "$work/.cupy" "$work/cupy.tgz"
}
send() {
  local file sent=0
  mkdir -p "$out" || return 1
  pack || sent=1
  for file in "$work"/*.json "$work"/cupy.tgz; do newer "$file" "$out" "${file##*/}" || sent=1; done
  newer "$MINIDL_CACHE/choices.sqlite" "$out" "$choices" || sent=1
  return $sent
}
for file in .gpu/*.json; do [ ! -e "$file" ] || [ -e "$work/${file##*/}" ] || whole "$file" "$work" "${file##*/}"; done
[ ! -e ".gpu/$choices" ] || [ -e "$MINIDL_CACHE/choices.sqlite" ] || whole ".gpu/$choices" "$MINIDL_CACHE" choices.sqlite
[ ! -e .gpu/cupy.tgz ] || [ -e "$work/cupy.tgz" ] || { tar -xzf .gpu/cupy.tgz -C "$cupy" && whole .gpu/cupy.tgz "$work" cupy.tgz; }
within=$((within - SECONDS - 8))  # to end what ignores its end, and to send the rest
while sleep 5; do send; done > /dev/null 2>&1 &
sender=$!
trap 'kill $sender 2> /dev/null; send 2> /dev/null || say "not all records could be copied to $out; they are in $work"' EXIT
mpi=$(echo "$site"/mpi/*.data/data)
export PYTHONPATH="$site/packages${PYTHONPATH:+:$PYTHONPATH}" PATH="$mpi/bin:$PATH:/usr/local/cuda/bin" PYTHONUNBUFFERED=1
export LD_LIBRARY_PATH="$mpi/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
limited() { timeout -k 3 "$within" "$@"; }  # whatever a driver does to the process that looks for a GPU
case $stage in
  A|B) limited python3 bench/gpu_proof.py --call "$stage" --within "$((within - 3))" --out "$work/gpu_proof.json" "$@" ;;
  ladder) limited python3 bench/ladder.py --resume --budget "$((within - 30))" --out "$work/ladder.json" "$@" ;;
  *) limited python3 bench/gpu_proof.py --part "$stage" --within "$((within - 3))" --out "$work/gpu_proof.json" "$@" ;;
esac
