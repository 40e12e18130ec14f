#!/usr/bin/env bash
# launch/tpu_vm.sh --name NAME --zone ZONE,... --accelerator TYPE (--spot | --guaranteed | --reserved) [options] -- COMMAND...
#
# Creates Cloud TPU VMs as one queued resource, copies this checkout to every host, runs COMMAND on all hosts of all
# slices, and deletes the machines at the end. If machines are preempted, the script requests new ones, and the same
# COMMAND resumes from its newest checkpoint.
#
#   --name NAME          name of the queued resource: lowercase letters, digits and dashes
#   --zone ZONE,...      e.g. europe-west4-b; several are tried in this order
#   --zone-wait SECONDS  time to wait for machines in one of several zones (default: 3600)
#   --project PROJECT    (default: from `gcloud config`)
#   --accelerator TYPE   v4-8, v5litepod-16, v5p-128, v6e-256, ... (tpu7x: launch/gke.sh)
#   --slices N           number of slices (default: 1)
#   --spot               cheap machines that can be preempted at any time
#   --guaranteed         machines that cannot be preempted
#   --reserved           machines of the project's reservation
#   --runtime VERSION    software version of the machines (default: the one for TYPE)
#   --service-account A  service account of the machines (default: the project's)
#   --network NETWORK    (default: default)
#   --subnetwork NAME    (default: the network's, in the region of the zone)
#   --internal-ip        machines without external addresses; this machine must be in the same network
#   --iap                the same, but ssh goes through Google's Identity-Aware Proxy, from anywhere
#   --env NAME,...       variables of this shell that COMMAND gets, e.g. HF_TOKEN; they are sent in a file
#   --retries N          how often to retry a failed run or request until the run has saved again (default: 10)
#   --preemptions N      how often to replace preempted machines until the run has saved again (default: 100)
#   --poll SECONDS       time between two checks of the queued resource (default: 30)
#   --attach             continue with an existing queued resource NAME
#   --keep               do not delete the machines at the end; they cost money until you delete them
#   --dry-run            print the commands of a run without failures, one per line, and do not run them
#
# Exit code: 0 finished, 1 given up, 2 a mistake in the arguments or in COMMAND, 3 the loss is not finite. Ctrl-C deletes
# the machines. A closed terminal does not: the run goes on, and --attach reconnects to it. If gcloud itself fails, the
# machines are not deleted either, because the run may be healthy.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

declare -A option=([name]='' [zone]='' [zone-wait]=3600 [project]='' [accelerator]='' [slices]=1 [spot]=no [guaranteed]=no
  [reserved]=no [runtime]='' [service-account]='' [network]=default [subnetwork]='' [internal-ip]=no [iap]=no [env]=''
  [retries]=10 [preemptions]=100 [poll]=30 [attach]=no [keep]=no [dry-run]=no)
parse "$@"
((${#arguments[@]} == 0)) || fail "${arguments[0]}: unexpected argument; write the command after --"
require name '[a-z][-a-z0-9]{0,38}[a-z0-9]' "lowercase letters, digits and dashes, 2 to 40 characters"
a_zone='[a-z]+-[a-z]+[0-9]+-[a-z]'
require zone "$a_zone(,$a_zone)*" "a zone such as europe-west4-b, or several with commas"
require slices '[1-9][0-9]*' "a number of slices, 1 or more"
for name in retries preemptions; do require "$name" "$number" "a number, 0 or more"; done
for name in poll zone-wait; do require "$name" "$number" "a number of seconds"; done
[[ ${option[accelerator]} != tpu7x* ]] ||
  fail "--accelerator='${option[accelerator]}' is not allowed: the Cloud TPU API has no tpu7x; GKE has it (launch/gke.sh)"
require accelerator '(v4|v5p|v5litepod|v6e)-[1-9][0-9]*' \
  "v4-N or v5p-N (N cores, 2 per chip), v5litepod-N or v6e-N (N chips)"
kinds=$(for kind in spot guaranteed reserved; do [[ ${option[$kind]} == no ]] || printf ' --%s' "$kind"; done)
[[ $kinds =~ ^\ [^\ ]+$ ]] || fail "--spot, --guaranteed and --reserved: give exactly one of the three"
[[ ${option[internal-ip]}${option[iap]} != yesyes ]] || fail "--internal-ip and --iap: give at most one of the two"
require_variables
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

tpus=(gcloud compute tpus queued-resources)
folder=$(mktemp -d "${TMPDIR:-/tmp}/xfresearch-XXXXXX")
IFS=, read -ra zones <<<"${option[zone]}"
declare -A counts=([retries]=0 [preemptions]=0)
exists=unknown # whether machines exist: unknown (nobody has answered yet), no, maybe (they were requested) or yes
child=''       # the process that the script waits for
tried=0      # zones that were tried since machines were last active
unreachable=0 saved='' assumed='' state='' reason='' said=''
attempts=1 # no retry of the first query: nothing is lost yet, and the cause is probably a mistake of the user
final='[Qq]uota|QUOTA|[Pp]ermission|PERMISSION|INVALID_ARGUMENT|[Ii]nvalid|NOT_FOUND|[Nn]ot found|not exist|not supported'

log() { printf '[launch] %s\n' "$*" >&2 || true; }

# use_zone I: all commands go to the I-th zone from now on.
use_zone() {
  place=$1 zone=${zones[$1]} location=(--zone "${zones[$1]}")
  [[ -z ${option[project]} ]] || location+=(--project "${option[project]}")
  listing=("${tpus[@]}" list "${location[@]}" "--filter=name~/${option[name]}$")
  deletion=("${tpus[@]}" delete "${option[name]}" "${location[@]}" --force --quiet)
  # All hosts in one batch: in smaller batches, the first would wait for the second. A host that has vanished is noticed
  # after a minute.
  everywhere=(--worker=all --node=all --batch-size=all "${location[@]}")
  [[ ${option[internal-ip]} == no ]] || everywhere+=(--internal-ip)
  [[ ${option[iap]} == no ]] || everywhere+=(--tunnel-through-iap)
}
alive=(-oServerAliveInterval=15 -oServerAliveCountMax=4 -oConnectTimeout=30)

# cost: what still costs money, as the end of a message.
cost() {
  local costs
  case $exists in
    unknown)
      printf 'whether %s exists in %s, and costs money, is not known: %s shows it' "${option[name]}" "$zone" \
        "$(quoted "${listing[@]}")" && return
      ;;
    no) printf 'nothing is left that costs money' && return ;;
    maybe) costs='may exist and cost money' ;;
    yes) costs='costs money' ;;
  esac
  printf '%s in %s %s: %s deletes it' "${option[name]}" "$zone" "$costs" "$(quoted "${deletion[@]}")"
}

# one_line: standard input in one line, from gcloud's last error on.
one_line() { tr -s '\n ' ' ' | sed 's/.*ERROR: //; s/^([a-z.-]*) //; s/[. ]*$//' | cut -c -300; }

# query COMMAND...: runs COMMAND, up to `attempts` times, and puts its output into `output`. With --dry-run, `output` is
# `assumed`.
query() {
  local i
  if [[ ${option[dry-run]} == yes ]]; then
    run "$@" && output=$assumed
    return 0
  fi
  for ((i = 1; i <= attempts; i++)); do
    output=$("$@" 2>"$folder/errors") && return
    ((i == attempts)) || sleep "${option[poll]}"
  done
  log "gcloud failed$( ((attempts == 1)) || echo " $attempts times") in $zone: $(one_line <"$folder/errors"): giving up"
  [[ $exists == no || $exists == unknown ]] || log "no machines are deleted: the same command with --attach continues"
  leave 1
}

# Puts the state of the queued resource into `state`, and the reason of a failure into `reason`. `state` is empty if it does
# not exist, PREEMPTED if one of its nodes is gone, which the queued resource itself may report later, and the state of a
# node that is being repaired.
read_state() {
  query "${listing[@]}" "--format=value(state.state,state.failedData.error.message)"
  IFS=$'\t' read -r state reason <<<"$output" || true
  [[ $state == ACTIVE ]] || return 0
  query gcloud compute tpus tpu-vm list "${location[@]}" "--filter=queuedResource~/${option[name]}$" \
    "--format=value(state,health)"
  if [[ $output =~ PREEMPTED|TERMINATED ]]; then
    state=PREEMPTED
  elif [[ $output =~ REPAIRING|RESTARTING|REIMAGING|STARTING|STOPPING|UNHEALTHY_MAINTENANCE ]]; then
    state=${BASH_REMATCH[0]}
  fi
}

# Requests machines in `zone`. If the request is refused, `said` has gcloud's reason.
create() {
  local nodes=(--node-count "${option[slices]}" --node-prefix "${option[name]}") network=(--network "${option[network]}")
  ((option[slices] > 1)) || nodes=(--node-id "${option[name]}")
  [[ -z ${option[subnetwork]} ]] || network+=(--subnetwork "${option[subnetwork]}")
  [[ ${option[internal-ip]}${option[iap]} == nono ]] || network+=(--internal-ips)
  [[ -z ${option[service-account]} ]] || network+=(--service-account "${option[service-account]}")
  local command=("${tpus[@]}" create "${option[name]}" "${location[@]}" --accelerator-type "${option[accelerator]}"
    --runtime-version "${option[runtime]:-${runtimes[$generation]}}" "${nodes[@]}" "${kinds# }" "${network[@]}"
    --scopes=https://www.googleapis.com/auth/cloud-platform)
  exists=maybe
  if announced "${command[@]}"; then
    assumed=ACTIVE
  elif said=$("${command[@]}" 2>&1); then
    exists=yes
  else
    said=$(one_line <<<"$said")
    read_state
    [[ -n $state ]] || exists=no
    return 1
  fi
}

# Requests machines in the zones, in turn.
request() {
  until create; do
    delete
    another_zone "$zone refused the request: $said"
  done
}

# another_zone REASON: goes to the next zone. If all were tried, that counts as a retry.
another_zone() {
  local next=$(((place + 1) % ${#zones[@]}))
  if ((++tried < ${#zones[@]})); then
    log "$1; trying ${zones[next]}"
  elif [[ $1 =~ $final && ${#zones[@]} -eq 1 ]]; then
    give_up "$1"
  else
    tried=0
    count retries "$1"
  fi
  use_zone "$next"
}

# Deletes what was requested. Ends the script if that fails.
delete() {
  local i
  [[ $exists != no ]] || return 0
  for ((i = 1; i <= attempts; i++)); do
    ! run "${deletion[@]}" || { exists=no && return 0; } # a plain `return` in a trap gives the status before it
    ((i == attempts)) || sleep "${option[poll]}"
  done
  log "the machines could not be deleted, after $attempts tries"
  leave 1
}

# run_waiting COMMAND...: `run`, but a signal to this script alone is obeyed while COMMAND runs: bash would wait for a
# command in the foreground first.
run_waiting() {
  local code=0
  announced "$@" && return
  "$@" <&0 &
  child=$!
  wait "$child" || code=$?
  child=''
  return "$code"
}

stop_waiting() { [[ -z $child ]] || kill "$child" 2>/dev/null || true; }

# leave CODE: ends the script without deleting anything.
leave() {
  trap - EXIT
  stop_waiting
  rm -rf "$folder"
  log "$(cost)"
  exit "$1"
}

give_up() {
  log "$1: giving up"
  exit 1
}

# The end, whatever its reason: deletes the machines, and says what still costs money.
at_exit() {
  local code=$?
  trap '' HUP INT TERM
  stop_waiting
  [[ ${option[keep]} == yes ]] || delete
  rm -rf "$folder"
  [[ ${option[dry-run]} == yes ]] || log "$(cost)"
  exit "$code"
}

# Whether the run has saved another checkpoint since the last call.
progressed() {
  local before=$saved workdir
  workdir=$(job_flag --workdir)
  [[ $workdir == gs://?* ]] || return 1
  saved=$(gcloud storage ls "${workdir%/}/checkpoints/" 2>/dev/null) || saved=''
  [[ -n $saved && $saved != "$before" ]]
}

# count KIND REASON: counts one of the retries or preemptions since the run has saved, and gives up after too many.
count() {
  ! progressed || counts=([retries]=0 [preemptions]=0)
  ((counts[$1]++ < option[$1])) || give_up "$2, all --$1=${option[$1]} used"
  log "$2 (${counts[$1]} of --$1=${option[$1]})"
  sleep "${option[poll]}"
}

# Waits until the machines are active. Requests new ones if they were preempted.
wait_until_active() {
  local logged='' since=$SECONDS
  while read_state && [[ $state != ACTIVE ]]; do
    case $state in
      SUSPENDED | PREEMPTED) count preemptions "the machines are $state" && delete && request && since=$SECONDS ;;
      FAILED)
        reason="the request failed in $zone: ${reason:-no reason is given}"
        delete && another_zone "$reason" && request && since=$SECONDS
        ;;
      '') exists=no && give_up "the queued resource ${option[name]} is gone: somebody deleted it" ;;
      *)
        [[ $state == "$logged" ]] || log "${option[name]} is $state"
        if ((${#zones[@]} > 1 && SECONDS - since >= option[zone-wait])) && [[ $state =~ ^(WAITING|ACCEPTED|CREATING) ]]; then
          delete && another_zone "no machines in $zone after ${option[zone-wait]} s" && request && since=$SECONDS
        fi
        ;;
    esac
    logged=$state
    sleep "${option[poll]}"
  done
  tried=0
}

# The Python of the machines may be too old, so uv installs another one.
requirements='-r requirements.txt -r requirements/cloud.txt'
[[ -z $(job_flag --tasks) ]] || requirements+=' -r requirements/eval.txt'
# shellcheck disable=SC2016 # expanded on the machines
prepare='mkdir -p xfresearch && tar -xzf xfresearch.tar.gz -C xfresearch && cd xfresearch &&
  export PATH=$HOME/.local/bin:$PATH PIP_BREAK_SYSTEM_PACKAGES=1 && python3 -m pip install --quiet --user uv &&
  { [ -x .venv/bin/python ] || uv venv --quiet --python 3.12 .venv; } &&
  uv pip install --quiet --python .venv/bin/python '$requirements' -c requirements/lock.txt "jax[tpu]"'
prepare=$(tr -s '\n ' ' ' <<<"$prepare")
files=("$folder/xfresearch.tar.gz") sourced=''
if [[ -n ${option[env]} ]]; then
  files+=("$folder/xfresearch.env") sourced='set -a && . ~/xfresearch.env && set +a && '
  prepare="chmod 600 xfresearch.env && $prepare"
fi

set_up_hosts() {
  run_waiting "${tpus[@]}" scp "${files[@]}" "${option[name]}:" "${everywhere[@]}" "${alive[@]/#/--scp-flag=}" &&
    run_waiting "${tpus[@]}" ssh "${option[name]}" "${everywhere[@]}" "${alive[@]/#/--ssh-flag=}" --command "${prepare% }"
}

# JAX_PLATFORMS: on a host without its TPU the command fails; it does not run on the CPU.
run_job() {
  run_waiting "${tpus[@]}" ssh "${option[name]}" "${everywhere[@]}" "${alive[@]/#/--ssh-flag=}" --command \
    "cd xfresearch && ${sourced}PATH=\$PWD/.venv/bin:\$PATH bash launch/detached.sh ~/xfresearch-job $(quoted env JAX_PLATFORMS=tpu,cpu "${job[@]}")"
}

# Machines of which a host cannot be reached or prepared are replaced, after three tries in a row.
replace_unreachable() {
  read_state
  [[ $state == ACTIVE ]] || return 0
  count retries "a host could not be reached or prepared"
  ((++unreachable >= 3)) || return 0
  log "requesting new machines"
  unreachable=0
  delete && request
}

[[ ${option[attach]} == no ]] || assumed=ACTIVE
trap 'rm -rf "$folder"' EXIT
for place in "${!zones[@]}"; do
  use_zone "$place"
  read_state
  [[ -z $state ]] || break
done
if [[ -n $state && ${option[attach]} == no ]]; then
  fail "--name=${option[name]}: this queued resource already exists in $zone ($state): --attach continues with it," \
    "$(quoted "${deletion[@]}") deletes it"
fi
attempts=5
run bash launch/pack.sh "${files[0]}" # only once, so that a retry runs the same code
write_variables "$folder/xfresearch.env"
if [[ -n $state ]]; then exists=yes; else exists=no; fi
trap at_exit EXIT # from here on machines may exist, whatever happens
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'log "the terminal is closed: the run goes on, and the same command with --attach reconnects to it" && leave 129' HUP
[[ -n $state ]] || { use_zone 0 && request; }
while :; do
  wait_until_active
  set_up_hosts || { replace_unreachable && continue; }
  unreachable=0 code=0
  run_job || code=$?
  ((code != 2 && code != 3)) || exit "$code" # a mistake in the command, or a loss that is not finite: no retry helps
  ((code != 4)) || { log "another command was started on these machines: they are not deleted" && leave 2; }
  read_state
  ((code)) || [[ $state != ACTIVE ]] || break
  # Machines that were lost, or are being repaired, are no fault of the run.
  [[ $state != ACTIVE ]] || count retries "the run ended with $code"
done
[[ ${option[dry-run]} == yes ]] || log "the run has finished"
