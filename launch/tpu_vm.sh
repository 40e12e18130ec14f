#!/usr/bin/env bash
# launch/tpu_vm.sh --name NAME --zone ZONE --accelerator TYPE (--spot | --guaranteed) [options] -- COMMAND...
#
# Creates Cloud TPU VMs as one queued resource, copies this checkout to every host, runs COMMAND on all hosts of all
# slices, and deletes the machines at the end. If machines are preempted, the script requests new ones, and the same
# COMMAND resumes from its newest checkpoint.
#
#   --name NAME          name of the queued resource: lowercase letters, digits and dashes
#   --zone ZONE          e.g. europe-west4-b
#   --project PROJECT    (default: from `gcloud config`)
#   --accelerator TYPE   v4-8, v5litepod-16, v5p-128, v6e-256, ... (tpu7x: launch/gke.sh)
#   --slices N           number of slices (default: 1)
#   --spot               cheap machines that can be preempted at any time
#   --guaranteed         machines that cannot be preempted
#   --runtime VERSION    software version of the machines (default: the one for TYPE)
#   --service-account A  service account of the machines (default: the project's)
#   --network NETWORK    (default: default)
#   --retries N          how often to retry after lost machines or failed runs (default: 10)
#   --poll SECONDS       time between two checks of the queued resource (default: 30)
#   --attach             continue with an existing queued resource NAME
#   --keep               do not delete the machines at the end; they cost money until you delete them
#   --dry-run            print the commands of a run without failures, one per line, and do not run them
#
# Exit code: 0 finished, 1 given up, 2 a mistake in the arguments or in COMMAND, 3 the loss is not finite. Ctrl-C deletes
# the machines. If gcloud itself fails, they are not deleted, because the run may be healthy.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

declare -A option=([name]='' [zone]='' [project]='' [accelerator]='' [slices]=1 [spot]=no [guaranteed]=no [runtime]=''
  [service-account]='' [network]=default [retries]=10 [poll]=30 [attach]=no [keep]=no [dry-run]=no)
parse "$@"
((${#arguments[@]} == 0)) || fail "${arguments[0]}: unexpected argument; write the command after --"
require name '[a-z][-a-z0-9]{0,38}[a-z0-9]' "lowercase letters, digits and dashes, 2 to 40 characters"
require zone '[a-z]+-[a-z]+[0-9]+-[a-z]' "a zone such as europe-west4-b"
require slices '[1-9][0-9]*' "a number of slices, 1 or more"
require retries "$number" "a number, 0 or more"
require poll "$number" "a number of seconds"
[[ ${option[accelerator]} != tpu7x* ]] ||
  fail "--accelerator='${option[accelerator]}' is not allowed: tpu7x is available only on GKE (launch/gke.sh)"
require accelerator '(v4|v5p|v5litepod|v6e)-[1-9][0-9]*' \
  "v4-N or v5p-N (N cores, 2 per chip), v5litepod-N or v6e-N (N chips)"
[[ ${option[spot]} != "${option[guaranteed]}" ]] || fail "--spot and --guaranteed: give exactly one of the two"
check_job
require_program gcloud

# TYPE decides the software version, and whether the slice is one host (v5e, v6e: 8 chips; v4, v5p: 4 chips of 2 cores).
generation=${option[accelerator]%%-*} size=${option[accelerator]#*-}
declare -A runtimes=([v4]=tpu-ubuntu2204-base [v5p]=v2-alpha-tpuv5 [v5litepod]=v2-alpha-tpuv5-lite [v6e]=v2-alpha-tpuv6e)
if ((size > 8 || option[slices] > 1)); then
  require_distributed
  require_bucket "each host has its own disk"
elif [[ ${option[keep]} == no ]]; then
  require_bucket "the disk is deleted with the machine (--keep keeps both)"
fi

location=(--zone "${option[zone]}")
[[ -z ${option[project]} ]] || location+=(--project "${option[project]}")
tpus=(gcloud compute tpus queued-resources)
# All hosts in one batch: in smaller batches, the first would wait for the second.
everywhere=(--worker=all --node=all --batch-size=all "${location[@]}")
archive=${TMPDIR:-/tmp}/xfresearch-${option[name]}.tar.gz
failures=0 assumed=''
attempts=1 # no retry of the first query: nothing is lost yet, and the cause is probably a mistake of the user

log() { printf '[launch] %s\n' "$*" >&2; }

# query COMMAND...: runs COMMAND, up to `attempts` times, and puts its output into `output`. With --dry-run, `output` is
# `assumed`.
query() {
  local i
  if [[ ${option[dry-run]} == yes ]]; then
    run "$@" && output=$assumed
    return
  fi
  for ((i = 1; i <= attempts; i++)); do
    output=$("$@") && return
    ((i == attempts)) || sleep "${option[poll]}"
  done
  ((attempts == 1)) || trap - EXIT # the machines may be healthy: they are not deleted
  give_up "gcloud failed${kept:-}"
}

# Puts the state of the queued resource into `state`; empty if it does not exist, PREEMPTED if one of its nodes is gone.
# The queued resource itself may report that later than its nodes.
read_state() {
  query "${tpus[@]}" list "${location[@]}" "--filter=name~/${option[name]}$" "--format=value(state.state)"
  state=$output
  [[ $state == ACTIVE ]] || return 0
  query gcloud compute tpus tpu-vm list "${location[@]}" "--filter=name~/${option[name]}(-[0-9]+)?$" "--format=value(state)"
  [[ ! $output =~ PREEMPTED|TERMINATED ]] || state=PREEMPTED
}

create() {
  local kind=--spot nodes=(--node-count "${option[slices]}" --node-prefix "${option[name]}")
  [[ ${option[spot]} == yes ]] || kind=--guaranteed
  ((option[slices] > 1)) || nodes=(--node-id "${option[name]}")
  local account=()
  [[ -z ${option[service-account]} ]] || account=(--service-account "${option[service-account]}")
  run "${tpus[@]}" create "${option[name]}" "${location[@]}" --accelerator-type "${option[accelerator]}" \
    --runtime-version "${option[runtime]:-${runtimes[$generation]}}" "${nodes[@]}" "$kind" --network "${option[network]}" \
    --scopes=https://www.googleapis.com/auth/cloud-platform "${account[@]}"
  assumed=ACTIVE
}

delete() { run "${tpus[@]}" delete "${option[name]}" "${location[@]}" --force --quiet; }

give_up() {
  log "$1: giving up"
  exit 1
}

# count_failure REASON: counts one failure, and gives up after too many.
count_failure() {
  ((failures++ < option[retries])) || give_up "$1, all --retries=${option[retries]} used"
  log "$1: retry $failures of ${option[retries]}"
  sleep "${option[poll]}"
}

# Waits until the machines are active. Requests new ones if they were preempted.
wait_until_active() {
  local logged=''
  while read_state && [[ $state != ACTIVE ]]; do
    case $state in
      SUSPENDED | FAILED | PREEMPTED) count_failure "the queued resource is $state" && delete && create ;;
      '') give_up "the queued resource ${option[name]} is gone: somebody deleted it" ;;
      *) [[ $state == "$logged" ]] || log "${option[name]} is $state" ;;
    esac
    logged=$state
    sleep "${option[poll]}"
  done
}

# The Python of the machines may be too old, so uv installs another one.
# shellcheck disable=SC2016 # expanded on the machines
prepare='mkdir -p xfresearch && tar -xzf xfresearch.tar.gz -C xfresearch && cd xfresearch &&
  export PATH=$HOME/.local/bin:$PATH PIP_BREAK_SYSTEM_PACKAGES=1 && python3 -m pip install --quiet --user uv &&
  { [ -x .venv/bin/python ] || uv venv --quiet --python 3.12 .venv; } &&
  uv pip install --quiet --python .venv/bin/python -r requirements.txt -r requirements-cloud.txt -c requirements.lock "jax[tpu]"'
prepare=$(tr -s '\n ' ' ' <<<"$prepare")

set_up_hosts() {
  run "${tpus[@]}" scp "$archive" "${option[name]}:xfresearch.tar.gz" "${everywhere[@]}" &&
    run "${tpus[@]}" ssh "${option[name]}" "${everywhere[@]}" --command "${prepare% }"
}

# JAX_PLATFORMS: on a host without its TPU the command fails; it does not run on the CPU.
run_job() {
  run "${tpus[@]}" ssh "${option[name]}" "${everywhere[@]}" --command \
    "cd xfresearch && PATH=\$PWD/.venv/bin:\$PATH bash launch/detached.sh /tmp/xfresearch-job $(quoted env JAX_PLATFORMS=tpu,cpu "${job[@]}")"
}

[[ ${option[attach]} == no ]] || assumed=ACTIVE
read_state
attempts=5 kept=" $attempts times; the machines are not deleted: the same command with --attach continues"
if [[ -n $state && ${option[attach]} == no ]]; then
  fail "--name=${option[name]}: this queued resource already exists ($state): --attach continues with it," \
    "$(quoted "${tpus[@]}" delete "${option[name]}" "${location[@]}" --force) deletes it"
fi
run bash launch/pack.sh "$archive" # only once, so that a retry runs the same code
[[ ${option[keep]} == yes ]] || trap delete EXIT # from here on machines may exist, whatever happens
trap 'exit 130' INT
trap 'exit 143' TERM
[[ -n $state ]] || create
while :; do
  wait_until_active
  code=0
  set_up_hosts || code=1
  ((code)) || run_job || code=$?
  ((code != 2 && code != 3)) || exit "$code" # a mistake in the command, or a loss that is not finite: no retry helps
  ((code != 4)) || { trap - EXIT && fail "another command was started on these machines: they are not deleted"; }
  read_state
  ((code)) || [[ $state != ACTIVE ]] || break
  count_failure "the run ended with $code, the queued resource is ${state:-gone}"
done
