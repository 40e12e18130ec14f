#!/usr/bin/env bash
# launch/multi_gpu.sh [--gpus I,J,...] [--image IMAGE] [--dry-run] -- COMMAND...
#
# Runs COMMAND on the GPUs of this host. One process sees all of them and cuts its batch and parameters over them as
# --config.mesh.* says: on one host there is nothing to launch N times.
#
#   --gpus I,J,...  numbers of the GPUs to use, as nvidia-smi lists them (default: all)
#   --image IMAGE   run in a container of this image (launch/Dockerfile built with JAX=cuda12 or cuda13); runs/ is shared
#   --dry-run       print what would run
#
#   launch/multi_gpu.sh -- python -m xfresearch.train --config configs/gpt2.py --workdir runs/g --config.mesh.fsdp=8
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

declare -A option=([gpus]='' [image]='' [dry-run]=no)
parse "$@"
((${#arguments[@]} == 0)) || fail "${arguments[0]}: not understood; the command goes after --"
require gpus '([0-9]+(,[0-9]+)*)?' "numbers of GPUs such as 0,1,2"
require image '[^ ]*' "the image to run in"
check_job
[[ -z ${option[image]} ]] || need docker

# JAX_PLATFORMS: without a GPU this is an error, not a run on the CPU.
environment=('JAX_PLATFORMS=cuda,cpu')
[[ -z ${option[gpus]} ]] || environment+=("CUDA_VISIBLE_DEVICES=${option[gpus]}")
if [[ -z ${option[image]} ]]; then
  run env "${environment[@]}" "${job[@]}"
else
  run docker run --rm --init --gpus all --ipc host --volume "$PWD/runs:/xfresearch/runs" "${environment[@]/#/--env=}" \
    "${option[image]}" "${job[@]}"
fi
