#!/usr/bin/env bash
# launch/gke.sh --cluster CLUSTER --workload NAME --tpu-type TYPE --image IMAGE [options] -- COMMAND...
#
# Runs COMMAND on TPUs of a GKE cluster through XPK (pip install xpk), in the image of launch/Dockerfile. If machines
# are preempted, GKE restarts the job, and COMMAND resumes from its newest checkpoint.
#
#   --cluster CLUSTER    name of the cluster
#   --workload NAME      name of the job: lowercase letters, digits and dashes
#   --tpu-type TYPE      v5litepod-16, v5p-128, v6e-256, tpu7x-128, ...
#   --image IMAGE        REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG
#   --slices N           number of slices (default: 1)
#   --zone ZONE          (default: from `gcloud config`)
#   --project PROJECT    (default: from `gcloud config`)
#   --create CAPACITY    first create the cluster, with spot, on-demand, flex or reservation=NAME machines
#   --build              first build the image from this checkout and push it
#   --max-restarts N     (default: 10)
#   --wait               wait for the end; exit code 0 if the job finished, otherwise XPK's (125: the job failed)
#   --dry-run            print the commands, one per line, and do not run them
#
# Without XPK: launch/gke.yaml.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

declare -A option=([cluster]='' [workload]='' [tpu-type]='' [image]='' [slices]=1 [zone]='' [project]='' [create]=''
  [build]=no [max-restarts]=10 [wait]=no [dry-run]=no)
parse "$@"
((${#arguments[@]} == 0)) || fail "${arguments[0]}: unexpected argument; write the command after --"
name='[a-z]([-a-z0-9]{0,38}[a-z0-9])?'
require cluster "$name" "lowercase letters, digits and dashes, at most 40"
require workload "$name" "lowercase letters, digits and dashes, at most 40"
require tpu-type '(v4|v5p|v5litepod|v6e|tpu7x)-[0-9]+(x[0-9]+)*' "a type such as v5litepod-16, v6e-256 or tpu7x-128"
require image '[^ ]+' "the name of an image"
require slices '[1-9][0-9]*' "a number of slices, 1 or more"
require zone '([a-z]+-[a-z]+[0-9]+-[a-z])?' "a zone such as europe-west4-b"
require create '(spot|on-demand|flex|reservation=[^ ]+)?' "spot, on-demand, flex or reservation=NAME"
require max-restarts "$number" "a number, 0 or more"
check_job
case ${option[tpu-type]} in # one host with one process: 4 chips of v4 and v5p (8 cores), up to 8 of v5e and v6e
  v4-8 | v5p-8 | v4-2x2x1 | v5p-2x2x1 | v5litepod-[148] | v6e-[148] | v6e-1x1 | v6e-2x2 | v6e-2x4) ((option[slices] == 1)) || require_distributed ;;
  *) require_distributed ;;
esac
require_bucket "a container's disk is deleted with it"
require_program xpk
[[ ${option[build]} == no ]] || require_program docker # checked before the cluster is created

location=(--cluster "${option[cluster]}")
[[ -z ${option[zone]} ]] || location+=(--zone "${option[zone]}")
[[ -z ${option[project]} ]] || location+=(--project "${option[project]}")
slices=(--tpu-type "${option[tpu-type]}" --num-slices "${option[slices]}")

[[ -z ${option[create]} ]] || run xpk cluster create "${location[@]}" "${slices[@]}" "--${option[create]}"
if [[ ${option[build]} == yes ]]; then
  run docker build --platform linux/amd64 --build-arg JAX=tpu --build-arg COMMIT="$(commit)" --tag "${option[image]}" \
    --file launch/Dockerfile .
  run docker push "${option[image]}"
fi
# exec: XPK signals the process that it started, so that process must not be a shell. JAX_PLATFORMS: on a host without
# its TPU the command fails; it does not run on the CPU.
run xpk workload create "${location[@]}" --workload "${option[workload]}" "${slices[@]}" \
  --docker-image "${option[image]}" --env JAX_PLATFORMS=tpu,cpu --max-restarts "${option[max-restarts]}" --termination-grace-period-seconds 120 \
  --command "exec launch/entrypoint.sh $(quoted "${job[@]}")"
[[ ${option[wait]} == no ]] || run xpk workload list "${location[@]}" --wait-for-job-completion "${option[workload]}"
