#!/usr/bin/env bash
# launch/tpu_vm.sh --name NAME --zone ZONE --accelerator TYPE (--spot | --guaranteed) [options] -- COMMAND...
#
# Gets Cloud TPU VMs as one queued resource, puts this checkout on every host, runs COMMAND on all hosts of all slices,
# and deletes the machines at the end. Machines that were taken away are requested again, and the same COMMAND goes on
# from its newest checkpoint.
#
#   --name NAME          of the queued resource: small letters, digits and dashes
#   --zone ZONE          e.g. europe-west4-b
#   --project PROJECT    (default: that of `gcloud config`)
#   --accelerator TYPE   v4-8, v5litepod-16, v5p-128, v6e-256, ... (tpu7x: launch/gke.sh)
#   --slices N           slices of that type (default: 1)
#   --spot               cheap machines that can be taken away at any time
#   --guaranteed         machines that are not
#   --runtime VERSION    of the machines' software (default: the one for TYPE)
#   --service-account A  that the machines act as (default: the project's own)
#   --network NETWORK    (default: default)
#   --retries N          how often lost machines or failed runs are tried again (default: 10)
#   --poll SECONDS       between two looks at the request (default: 30)
#   --attach             go on with a queued resource NAME that is there already
#   --keep               leave the machines at the end; they cost until you delete them
#   --dry-run            print what would run where nothing goes wrong, one command per line
#
# Exit code: 0 finished, 2 a mistake in the arguments or in COMMAND, 1 given up. Ctrl-C deletes the machines.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

declare -A option=([name]='' [zone]='' [project]='' [accelerator]='' [slices]=1 [spot]=no [guaranteed]=no [runtime]=''
  [service-account]='' [network]=default [retries]=10 [poll]=30 [attach]=no [keep]=no [dry-run]=no)
parse "$@"
((${#arguments[@]} == 0)) || fail "${arguments[0]}: not understood; the command goes after --"
require name '[a-z][-a-z0-9]{0,38}[a-z0-9]' "small letters, digits and dashes, 2 to 40 of them"
require zone '[a-z]+-[a-z]+[0-9]+-[a-z]' "a zone such as europe-west4-b"
require slices '[1-9][0-9]*' "a number of slices, 1 or more"
require retries "$number" "a number, 0 or more"
require poll "$number" "a number of seconds"
[[ ${option[accelerator]} != tpu7x* ]] ||
  fail "--accelerator='${option[accelerator]}' is not allowed: tpu7x is had on GKE alone (launch/gke.sh)"
require accelerator '(v4|v5p|v5litepod|v6e)-[1-9][0-9]*' "v4-N or v5p-N (N cores, 2 a chip), v5litepod-N or v6e-N (N chips)"
[[ ${option[spot]} != "${option[guaranteed]}" ]] || fail "--spot and --guaranteed: give one of the two"
check_job
need gcloud

# Facts of TYPE: its software, and whether it is one host (8 chips of v5e and v6e, 4 chips of 2 cores of v4 and v5p).
generation=${option[accelerator]%%-*} size=${option[accelerator]#*-}
declare -A runtimes=([v4]=tpu-ubuntu2204-base [v5p]=v2-alpha-tpuv5 [v5litepod]=v2-alpha-tpuv5-lite [v6e]=v2-alpha-tpuv6e)
if ((size > 8 || option[slices] > 1)); then
  require_bucket "each host has its own disk"
elif [[ ${option[keep]} == no ]]; then
  require_bucket "the disk is deleted with the machine (--keep keeps both)"
fi

place=(--zone "${option[zone]}")
[[ -z ${option[project]} ]] || place+=(--project "${option[project]}")
tpus=(gcloud compute tpus queued-resources)
everywhere=(--worker=all --node=all --batch-size=all "${place[@]}") # in batches, the first would wait for the second
archive=${TMPDIR:-/tmp}/xfresearch-${option[name]}.tar.gz
lost=0 assumed='' looks=1 # the first look is not repeated: nothing is lost, and the mistake is most likely ours

say() { printf '[launch] %s\n' "$*" >&2; }

# look COMMAND...: what the command prints, in `seen`, tried `looks` times; with --dry-run it sees `assumed`.
look() {
  local i
  if [[ ${option[dry-run]} == yes ]]; then
    run "$@" && seen=$assumed
    return
  fi
  for ((i = 1; i <= looks; i++)); do
    seen=$("$@") && return
    ((i == looks)) || sleep "${option[poll]}"
  done
  give_up "gcloud failed"
}

# Puts the state of the queued resource into `state`, empty where there is none; PREEMPTED where one of its nodes is
# gone, which the queued resource itself may learn later.
read_state() {
  look "${tpus[@]}" list "${place[@]}" "--filter=name~/${option[name]}$" "--format=value(state.state)"
  state=$seen
  [[ $state == ACTIVE ]] || return 0
  look gcloud compute tpus tpu-vm list "${place[@]}" "--filter=name~/${option[name]}(-[0-9]+)?$" "--format=value(state)"
  [[ ! $seen =~ PREEMPTED|TERMINATED ]] || state=PREEMPTED
}

create() {
  local kind=--spot nodes=(--node-count "${option[slices]}" --node-prefix "${option[name]}")
  [[ ${option[spot]} == yes ]] || kind=--guaranteed
  ((option[slices] > 1)) || nodes=(--node-id "${option[name]}")
  local account=()
  [[ -z ${option[service-account]} ]] || account=(--service-account "${option[service-account]}")
  run "${tpus[@]}" create "${option[name]}" "${place[@]}" --accelerator-type "${option[accelerator]}" \
    --runtime-version "${option[runtime]:-${runtimes[$generation]}}" "${nodes[@]}" "$kind" --network "${option[network]}" \
    --scopes=https://www.googleapis.com/auth/cloud-platform "${account[@]}"
  assumed=ACTIVE
}

delete() { run "${tpus[@]}" delete "${option[name]}" "${place[@]}" --force --quiet; }

give_up() {
  say "$1: given up"
  exit 1
}

# Counts one failure, and gives up after too many.
failed() {
  ((lost++ < option[retries])) || give_up "$1, --retries=${option[retries]} used up"
  say "$1: trying again ($lost of ${option[retries]})"
  sleep "${option[poll]}"
}

# Waits until the machines are there, and requests them again where they were taken away.
bring_up() {
  local said=''
  while read_state && [[ $state != ACTIVE ]]; do
    case $state in
      SUSPENDED | FAILED | PREEMPTED) failed "the queued resource is $state" && delete && create ;;
      '') give_up "the queued resource ${option[name]} is gone: somebody deleted it" ;;
      *) [[ $state == "$said" ]] || say "${option[name]} is $state" ;;
    esac
    said=$state
    sleep "${option[poll]}"
  done
}

# The machines' own Python may be older than ours must be: uv brings one.
# shellcheck disable=SC2016 # expanded on the machines
prepare='mkdir -p xfresearch && tar -xzf xfresearch.tar.gz -C xfresearch && cd xfresearch &&
  export PATH=$HOME/.local/bin:$PATH PIP_BREAK_SYSTEM_PACKAGES=1 && python3 -m pip install --quiet --user uv &&
  { [ -x .venv/bin/python ] || uv venv --quiet --python 3.12 .venv; } &&
  uv pip install --quiet --python .venv/bin/python -r requirements-cloud.txt "jax[tpu]"'
prepare=$(tr -s '\n ' ' ' <<<"$prepare")

send() {
  run "${tpus[@]}" scp "$archive" "${option[name]}:xfresearch.tar.gz" "${everywhere[@]}" &&
    run "${tpus[@]}" ssh "${option[name]}" "${everywhere[@]}" --command "${prepare% }"
}

# JAX_PLATFORMS: a host without its TPU is an error, not a run on the CPU.
work() {
  run "${tpus[@]}" ssh "${option[name]}" "${everywhere[@]}" --command \
    "cd xfresearch && PATH=\$PWD/.venv/bin:\$PATH bash launch/detached.sh /tmp/xfresearch-job $(quoted env JAX_PLATFORMS=tpu,cpu "${job[@]}")"
}

[[ ${option[attach]} == no ]] || assumed=ACTIVE
read_state
looks=5
if [[ -n $state && ${option[attach]} == no ]]; then
  fail "--name=${option[name]}: there is such a queued resource already ($state): --attach goes on with it," \
    "$(quoted "${tpus[@]}" delete "${option[name]}" "${place[@]}" --force) removes it"
fi
run bash launch/pack.sh "$archive" # once: a second try runs the same code as the first
[[ ${option[keep]} == yes ]] || trap delete EXIT # from here on machines may be there, whatever happens
trap 'exit 130' INT
trap 'exit 143' TERM
[[ -n $state ]] || create
while :; do
  bring_up
  code=0
  send || code=1
  ((code)) || work || code=$?
  ((code != 2)) || exit 2 # a mistake in the command: other machines do not help
  ((code != 4)) || { trap - EXIT && fail "another command was started on these machines: they are left as they are"; }
  read_state
  ((code)) || [[ $state != ACTIVE ]] || break
  failed "the run ended with $code, the queued resource is ${state:-gone}"
done
