#!/usr/bin/env bash
# launch/local.sh N [--port P] [--grace SECONDS] [--dry-run] [-- COMMAND...]
#
# Runs COMMAND as N processes of one job on this machine, on CPU. Each process finds the others with the flags
# --coordinator, --processes and --process. Without COMMAND, trains the quickstart.
#
#   --port P         port of process 0 (default: a free port)
#   --grace SECONDS  after one process has failed, kill the others if they have not ended within this time (default: 90,
#                    longer than the 60 s of --heartbeat plus the 10 s they then need to report which process is lost)
#   --dry-run        print the commands, one per line, and do not run them
#
# Each line of process I begins with [I]. The exit code is 0 if all processes exit with 0, otherwise that of the first
# one that failed. Ctrl-C and SIGTERM are forwarded to all processes, which save and exit; a second signal kills them.
#
#   launch/local.sh 2
#   launch/local.sh 4 -- python -m xfresearch.train --config configs/llama.py:tiny --workdir runs/l --config.mesh.fsdp=4
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

declare -A option=([port]='' [grace]=90 [dry-run]=no)
parse "$@"
((${#arguments[@]} == 1)) || fail "N is missing or repeated (${arguments[*]}): launch/local.sh N [-- COMMAND...]"
n=${arguments[0]}
[[ $n =~ ^[1-9][0-9]*$ ]] || fail "N=$n is not allowed: it must be a number of processes, 1 or more"
require port '([1-9][0-9]{0,4})?' "a port number"
require grace "$number" "a number of seconds"
((${#job[@]})) || job=(python -m xfresearch.train --config configs/quickstart.py --workdir "runs/quickstart-$n")
check_job
require_distributed

free_port() {
  python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# process I: puts the words of process I's command into the array `words`
process() {
  words=(env JAX_PLATFORMS=cpu "${job[@]}" --coordinator "127.0.0.1:$port" --processes "$n" --process "$1")
}

port=${option[port]:-$(free_port)}
if [[ ${option[dry-run]} == yes ]]; then
  for ((i = 0; i < n; i++)); do process "$i" && run "${words[@]}"; done
  exit 0
fi

log() { printf '[launch] %s\n' "$*" >&2; }

# prefix_lines TEXT: prints every line of standard input with TEXT in front, without buffering
prefix_lines() {
  local line
  while IFS= read -r line || [[ -n $line ]]; do printf '%s%s\n' "$1" "$line"; done
}

pids=() readers=() code=0 deadline='' signals=0
signal_all() {
  local pid
  for pid in "${pids[@]}"; do kill "-$1" -- "-$pid" 2>/dev/null || true; done
}

# shellcheck disable=SC2329 # called by the traps
forward() {
  if ((signals++)); then signal_all KILL; else log "SIG$1 is forwarded to all processes" && signal_all "$1"; fi
}
trap 'forward INT' INT
trap 'forward TERM' TERM

pipes=$(mktemp -d)
trap 'rm -rf "$pipes"' EXIT
for ((i = 0; i < n; i++)); do
  process "$i"
  mkfifo "$pipes/$i"
  prefix_lines "[$i] " <"$pipes/$i" &
  readers+=($!)
  set -m # a separate process group: signals reach children too, and Ctrl-C arrives only through `forward`
  "${words[@]}" >"$pipes/$i" 2>&1 </dev/null &
  pids+=($!)
  set +m
done

# Checks which processes have ended. Keeps the exit code of the first failure and then sends SIGTERM to the others.
check_processes() {
  local i status
  for i in "${!pids[@]}"; do
    kill -0 "${pids[i]}" 2>/dev/null && continue
    status=0 && wait "${pids[i]}" || status=$?
    unset "pids[$i]"
    ((status == 0 || code)) && continue
    code=$status deadline=$((SECONDS + option[grace]))
    ((${#pids[@]} == 0)) || log "process $i ended with status $status: sending SIGTERM to the others"
    signal_all TERM
  done
}

while ((${#pids[@]})); do
  check_processes
  if [[ -n $deadline ]] && ((SECONDS >= deadline)) && ((${#pids[@]})); then
    log "process ${!pids[*]} is still running after ${option[grace]} s: killed" && signal_all KILL
  fi
  sleep 0.2 || true
done
wait "${readers[@]}" || true
exit "$code"
