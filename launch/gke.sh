#!/usr/bin/env bash
# launch/gke.sh --cluster CLUSTER --workload NAME (--tpu-type TYPE | --gpu-type TYPE) --image IMAGE [options] -- COMMAND...
#
# Runs COMMAND on TPUs or GPUs of a GKE cluster through XPK (pip install xpk), in the image of launch/Dockerfile. If
# machines are preempted, GKE restarts the job, and COMMAND resumes from its newest checkpoint.
#
#   --cluster CLUSTER    name of the cluster
#   --workload NAME      name of the job: lowercase letters, digits and dashes
#   --tpu-type TYPE      v5litepod-16, v5p-128, v6e-256, tpu7x-128, ...; several --slices
#   --gpu-type TYPE      XPK's name of a node: h100-mega-80gb-8 (A3 Mega), h200-141gb-8 (A3 Ultra), b200-8 (A4), ...
#   --slices N           number of TPU slices (default: 1)
#   --nodes N            number of GPU nodes, with one process each (default: 1)
#   --image IMAGE        REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME; without a tag it has that of the checkout's commit
#   --zone ZONE          (default: from `gcloud config`)
#   --project PROJECT    (default: from `gcloud config`)
#   --create CAPACITY    first create the cluster, with spot, on-demand, flex or reservation=NAME machines
#   --build              first build the image from this checkout and push it
#   --env NAME,...       variables of this shell that COMMAND gets. Who may read the cluster's jobs can read them: for a
#                        secret, use a manifest with secretKeyRef (launch/gke.yaml)
#   --ramdisk NAME       mount the RAM disk of the nodes at /NAME, for emergency checkpoints (docs/launch.md), on a cluster
#                        that `xpk cluster create --enable-mtc` made
#   --max-restarts N     (default: 10)
#   --join-timeout S     seconds that processes wait for each other, e.g. for the machines of another slice (default: 3600)
#   --wait               wait for the end; exit code 0 if the job finished, otherwise XPK's (125: the job failed)
#   --dry-run            print the commands, one per line, and do not run them
#
# A job of this name that has ended is replaced. One that runs or waits is left alone. Without XPK: launch/gke.yaml.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

declare -A option=([cluster]='' [workload]='' [tpu-type]='' [gpu-type]='' [image]='' [slices]=1 [nodes]=1 [zone]=''
  [project]='' [create]='' [build]=no [env]='' [ramdisk]='' [max-restarts]=10 [join-timeout]=3600 [wait]=no [dry-run]=no)
parse "$@"
((${#arguments[@]} == 0)) || fail "${arguments[0]}: unexpected argument; write the command after --"
name='[a-z]([-a-z0-9]{0,38}[a-z0-9])?'
require cluster "$name" "lowercase letters, digits and dashes, at most 40"
require workload "$name" "lowercase letters, digits and dashes, at most 40"
[[ -z ${option[tpu-type]} || -z ${option[gpu-type]} ]] || fail "--tpu-type and --gpu-type: give exactly one of the two"
if [[ -n ${option[gpu-type]} ]]; then
  require gpu-type '[a-z]+[0-9]+(-[a-z0-9]+)*-[1248]' "XPK's name of a node, such as h100-mega-80gb-8 or b200-8"
  ((option[slices] == 1)) || fail "--slices='${option[slices]}' is not allowed with --gpu-type: give --nodes"
else
  require tpu-type '(v4|v5p|v5litepod|v6e|tpu7x)-[0-9]+(x[0-9]+)*' "a type such as v5litepod-16, v6e-256 or tpu7x-128"
  [[ ! ${option[tpu-type]} =~ ^v5litepod-([124]|1x1|2x2)$ ]] ||
    fail "--tpu-type='${option[tpu-type]}' is not allowed: XPK's smallest v5litepod is v5litepod-8"
  ((option[nodes] == 1)) || fail "--nodes='${option[nodes]}' is not allowed with --tpu-type: give --slices"
fi
require image '[^ ]+' "the name of an image"
require slices '[1-9][0-9]*' "a number of slices, 1 or more"
require nodes '[1-9][0-9]*' "a number of nodes, 1 or more"
require zone '([a-z]+-[a-z]+[0-9]+-[a-z])?' "a zone such as europe-west4-b"
require create '(spot|on-demand|flex|reservation=[^ ]+)?' "spot, on-demand, flex or reservation=NAME"
require ramdisk '([a-z][-a-z0-9]*)?' "the name of a directory, such as memory"
for name in max-restarts join-timeout; do require "$name" "$number" "a number, 0 or more"; done
require_variables
check_job
# On TPUs one host has one process: XPK's hosts have 1 chip or 4, so 4 chips of v4 and v5p (8 cores), 1 or 4 of v6e. Those
# of tpu7x have two processes each.
case ${option[tpu-type]} in
  '') single=$((option[nodes] == 1)) ;;
  v4-8 | v5p-8 | v4-2x2x1 | v5p-2x2x1 | v6e-[14] | v6e-1x1 | v6e-2x2) single=$((option[slices] == 1)) ;;
  *) single=0 ;;
esac
((single)) || require_distributed
require_bucket "a container's disk is deleted with it"
if ((!single)) && [[ -n $(job_module) && -z $(job_flag --join-timeout) ]]; then
  job+=(--join-timeout "${option[join-timeout]}")
fi
command="exec launch/entrypoint.sh $(quoted "${job[@]}")"
platforms=tpu,cpu jax=tpu machines=(--tpu-type "${option[tpu-type]}" --num-slices "${option[slices]}")
if [[ -n ${option[gpu-type]} ]]; then
  platforms=cuda,cpu jax=cuda12 machines=(--device-type "${option[gpu-type]}" --num-nodes "${option[nodes]}")
  # XPK sets these variables, and writes the command between double quotes into YAML.
  ((single)) || command+=" --coordinator \$JAX_COORDINATOR_ADDRESS:\$JAX_COORDINATOR_PORT --processes \$NNODES --process \$NODE_RANK"
  [[ $command != *[\"\\]* ]] || fail "a \" or \\ in the command is not allowed with --gpu-type, because XPK does not quote them"
fi
command=${command//\$/\$\$} # Kubernetes puts values, also secret ones, in place of $(NAME), and $ in place of $$
require_program xpk
[[ ${option[build]} == no ]] || require_program docker # checked before the cluster is created
image=$(image_name)

ramdisk=()
[[ -z ${option[ramdisk]} ]] || ramdisk=(--ramdisk-directory "${option[ramdisk]}")
location=(--cluster "${option[cluster]}")
[[ -z ${option[zone]} ]] || location+=(--zone "${option[zone]}")
[[ -z ${option[project]} ]] || location+=(--project "${option[project]}")

# Makes room for the job: XPK would ask whether to delete one of its name, also one that runs. A job that has ended is
# only a record, and is deleted.
replace_ended() {
  local said state
  run xpk workload list "${location[@]}" --filter-by-job "${option[workload]}" >"$folder/list" || {
    said=$?
    cat "$folder/list" >&2
    exit "$said"
  }
  [[ ${option[dry-run]} == no ]] || { cat "$folder/list" && return; }
  state=$(awk -F '   *' -v name="${option[workload]}" '$1 == name { state = $7 } END { print state }' "$folder/list")
  case $state in
    '') ;;
    Finished) run xpk workload delete "${location[@]}" --workload "${option[workload]}" --force </dev/null ;;
    *) fail "--workload=${option[workload]}: this job already exists ($state):" \
      "$(quoted xpk workload list "${location[@]}" --wait-for-job-completion "${option[workload]}") waits for its end," \
      "$(quoted xpk workload delete "${location[@]}" --workload "${option[workload]}") deletes it" ;;
  esac
}

folder=$(mktemp -d "${TMPDIR:-/tmp}/xfresearch-XXXXXX")
trap 'rm -rf "$folder"' EXIT
environment=(--env JAX_PLATFORMS="$platforms")
if [[ -n ${option[env]} ]]; then # XPK takes a name without a value from its own environment, but only in a file
  environment=(--env-file "$folder/xfresearch.env")
  printf '%s\n' "JAX_PLATFORMS=$platforms" "${option[env]//,/$'\n'}" >"$folder/xfresearch.env"
fi

[[ -z ${option[create]} ]] || run xpk cluster create "${location[@]}" "${machines[@]}" "--${option[create]}"
replace_ended
[[ ${option[build]} == no ]] || build_image "$image" "$jax"
# exec: XPK signals the process that it started, so that process must not be a shell. JAX_PLATFORMS: on a host without
# its chips the command fails; it does not run on the CPU. XPK restarts after 42 and 127 to 255 by itself; 1 and 75 may
# pass, too (docs/launch.md). No terminal: XPK must not ask.
run xpk workload create "${location[@]}" --workload "${option[workload]}" "${machines[@]}" --docker-image "$image" \
  "${environment[@]}" "${ramdisk[@]}" --max-restarts "${option[max-restarts]}" --restart-on-exit-codes 1,75 \
  --termination-grace-period-seconds 120 --command "$command" </dev/null
[[ ${option[wait]} == no ]] || run xpk workload list "${location[@]}" --wait-for-job-completion "${option[workload]}"
