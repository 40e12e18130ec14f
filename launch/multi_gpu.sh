#!/usr/bin/env bash
# launch/multi_gpu.sh [--gpus I,J,...] [--image IMAGE] [--dry-run] -- COMMAND...
#
# Runs COMMAND on the GPUs of this host. One process uses all of them, and shards batch and parameters over them by
# --config.mesh.*. One process per host is enough.
#
#   --gpus I,J,...  numbers of the GPUs to use, as in nvidia-smi (default: all)
#   --image IMAGE   run in a container of this image (launch/Dockerfile with JAX=cuda12 or cuda13); runs/ is mounted
#   --dry-run       print the command and do not run it
#
#   launch/multi_gpu.sh -- python -m xfresearch.train --config configs/gpt2.py --workdir runs/g --config.mesh.fsdp=8
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

declare -A option=([gpus]='' [image]='' [dry-run]=no)
parse "$@"
((${#arguments[@]} == 0)) || fail "${arguments[0]}: unexpected argument; write the command after --"
require gpus '([0-9]+(,[0-9]+)*)?' "numbers of GPUs such as 0,1,2"
require image '[^ ]*' "the name of an image"
check_job
if [[ -n ${option[image]} ]]; then
  workdir=$(job_flag --workdir)
  [[ -z $workdir || $workdir == gs://?* || ($workdir == runs/?* && $workdir != *..*) ]] ||
    fail "--workdir='$workdir' is not allowed with --image: the container has and keeps no other directory than runs/," \
      "so it must be runs/NAME or gs://BUCKET/PATH"
  require_program docker
fi

# JAX_PLATFORMS: without a GPU the command fails; it does not run on the CPU.
environment=('JAX_PLATFORMS=cuda,cpu')
[[ -z ${option[gpus]} ]] || environment+=("CUDA_VISIBLE_DEVICES=${option[gpus]}")
if [[ -z ${option[image]} ]]; then
  run_last env "${environment[@]}" "${job[@]}"
else
  # --user: results belong to the caller, and not to root.
  run_last docker run --rm --init --gpus all --ipc host --user "$(id -u):$(id -g)" --volume "$PWD/runs:/xfresearch/runs" \
    "${environment[@]/#/--env=}" "${option[image]}" "${job[@]}"
fi
