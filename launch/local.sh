#!/usr/bin/env bash
# launch/local.sh N [--port P] [--grace SECONDS] [--dry-run] [-- COMMAND...]
#
# Runs COMMAND as N processes of one job on this machine, on CPU: each is told where the others are with
# --coordinator, --processes and --process. Without a COMMAND it trains the quickstart.
#
#   --port P         where process 0 listens (default: a free port)
#   --grace SECONDS  how long the others may take to end once one has failed, before they are killed (default: 90,
#                    which outlasts the 60 s of --heartbeat and the 10 s that they then take to say who is gone)
#   --dry-run        print what would run, one command per line
#
# Lines of process I begin with [I]. The exit code is 0 if all processes end with 0, otherwise that of the first that
# failed. Ctrl-C and SIGTERM are passed on to all, which save and end; a second one kills them.
#
#   launch/local.sh 2
#   launch/local.sh 4 -- python -m xfresearch.train --config configs/llama.py:tiny --workdir runs/l --config.mesh.fsdp=4
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

declare -A option=([port]='' [grace]=90 [dry-run]=no)
parse "$@"
((${#arguments[@]} == 1)) || fail "N is missing or not alone (${arguments[*]}): launch/local.sh N [-- COMMAND...]"
n=${arguments[0]}
[[ $n =~ ^[1-9][0-9]*$ ]] || fail "N=$n is not allowed: it must be a number of processes, 1 or more"
require port '([1-9][0-9]{0,4})?' "a port number"
require grace "$number" "a number of seconds"
((${#job[@]})) || job=(python -m xfresearch.train --config configs/quickstart.py --workdir "runs/quickstart-$n")
check_job
require_many

free_port() {
  python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# process I: the words of process I's command, one per line end in the array `words`
process() {
  words=(env JAX_PLATFORMS=cpu "${job[@]}" --coordinator "127.0.0.1:$port" --processes "$n" --process "$1")
}

port=${option[port]:-$(free_port)}
if [[ ${option[dry-run]} == yes ]]; then
  for ((i = 0; i < n; i++)); do process "$i" && run "${words[@]}"; done
  exit 0
fi

say() { printf '[launch] %s\n' "$*" >&2; }

# mark TEXT: every line of standard input with TEXT before it, at once
mark() {
  local line
  while IFS= read -r line || [[ -n $line ]]; do printf '%s%s\n' "$1" "$line"; done
}

pids=() readers=() code=0 deadline='' signals=0
signal_all() {
  local pid
  for pid in "${pids[@]}"; do kill "-$1" -- "-$pid" 2>/dev/null || true; done
}

# shellcheck disable=SC2329 # called by the traps
pass_on() {
  if ((signals++)); then signal_all KILL; else say "SIG$1 is passed on to all" && signal_all "$1"; fi
}
trap 'pass_on INT' INT
trap 'pass_on TERM' TERM

pipes=$(mktemp -d)
trap 'rm -rf "$pipes"' EXIT
for ((i = 0; i < n; i++)); do
  process "$i"
  mkfifo "$pipes/$i"
  mark "[$i] " <"$pipes/$i" &
  readers+=($!)
  set -m # a process group of its own: signals reach its children too, and Ctrl-C reaches it through us alone
  "${words[@]}" >"$pipes/$i" 2>&1 </dev/null &
  pids+=($!)
  set +m
done

# Looks for processes that ended, keeps the first failure's exit code and tells the others to end.
look() {
  local i status
  for i in "${!pids[@]}"; do
    kill -0 "${pids[i]}" 2>/dev/null && continue
    status=0 && wait "${pids[i]}" || status=$?
    unset "pids[$i]"
    ((status == 0 || code)) && continue
    code=$status deadline=$((SECONDS + option[grace]))
    ((${#pids[@]} == 0)) || say "process $i ended with status $status: the others are told to end"
    signal_all TERM
  done
}

while ((${#pids[@]})); do
  look
  if [[ -n $deadline ]] && ((SECONDS >= deadline)) && ((${#pids[@]})); then
    say "process ${!pids[*]} is still there after ${option[grace]} s: killed" && signal_all KILL
  fi
  sleep 0.2 || true
done
wait "${readers[@]}" || true
exit "$code"
