#!/bin/sh
# The first program in a container: `sh enter.sh COMMAND…` becomes COMMAND, and sees that nothing outlives its use.
# `sh enter.sh --interactive COMMAND…` leaves it alone: it belongs to the person at the terminal.
#
# Its standard input is a lifeline that says nothing. It ends when whoever started the container has gone, by
# whatever cause (a job that was killed runs no trap of its own), and then COMMAND is ended, and with it the container.
set -u

# Compiled kernels, where the run has put its folder for them: on the node, under a path that is the same in every
# run, since some of what is kept there names its own path.
if [ -w /mnt ]; then
  export VLLM_CACHE_ROOT="${VLLM_CACHE_ROOT:-/mnt/vllm}"
  export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/mnt/triton}"
  export DG_JIT_CACHE_DIR="${DG_JIT_CACHE_DIR:-/mnt/deep_gemm}"
  export FLASHINFER_WORKSPACE_BASE="${FLASHINFER_WORKSPACE_BASE:-/mnt/flashinfer}"
  export TILELANG_CACHE_DIR="${TILELANG_CACHE_DIR:-/mnt/tilelang}"
  export HUMMING_CACHE_DIR="${HUMMING_CACHE_DIR:-/mnt/humming}"
  export HUMMING_TMP_DIR="${HUMMING_TMP_DIR:-/tmp/humming}"
  export CUDA_CACHE_PATH="${CUDA_CACHE_PATH:-/mnt/cuda}"
fi
# The node's own folder for temporary files is not in here, and neither are the packages in the user's home.
export TMPDIR=/tmp PYTHONNOUSERSITE=1

# An image whose CUDA is newer than the node's driver brings compatibility libraries, named after the driver that
# they stand for. They serve an older driver only: beside a newer one CUDA would not start.
driver=$(sed -n '1s/^.* \([0-9][0-9][0-9]*\)\.[0-9][0-9.]* .*$/\1/p' /proc/driver/nvidia/version 2>/dev/null)
for library in /usr/local/cuda/compat/libcuda.so.[0-9]*.*; do
  stands_for=${library##*/libcuda.so.}
  if [ -n "$driver" ] && [ -e "$library" ] && [ "${stands_for%%.*}" -gt "$driver" ]; then
    export LD_LIBRARY_PATH="${library%/*}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    echo "isambard-serve: the node's driver is $driver, CUDA comes from ${library%/*} ($stands_for)" >&2
  fi
done

if [ "$1" = --interactive ]; then
  shift
  exec "$@"
fi

exec 3<&0
# A process of its own line: what COMMAND starts is looked at, and this is none of it.
( (
  trap '' HUP INT TERM
  while read -r _; do :; done
  kill -TERM $$
  sleep 10
  kill -KILL $$
) <&3 3<&- >/dev/null 2>&1 & )
exec "$@" </dev/null 3<&-
