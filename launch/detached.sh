#!/usr/bin/env bash
# launch/detached.sh DIR COMMAND...
#
# Starts COMMAND once on this machine, detached, with its log in DIR. Shows the log while COMMAND runs, and exits with
# its exit code. A second call, after a lost connection, shows the log of the same run from the beginning. A run that
# ended with 0 (finished) or 3 (the loss is not finite) is not started again; its result is reported again. A run that
# ended with any other code is started again. Exit code 4: another COMMAND was started in DIR. DIR belongs to the caller
# alone: a link, or the directory of somebody else, is refused.
set -euo pipefail
(($# > 1)) || { sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$0" && exit 0; }

directory=$1 && shift
mkdir -p "$directory"
[[ -O $directory && ! -L $directory ]] || {
  printf 'error: %s is a link, or the directory of somebody else\n' "$directory" >&2
  exit 2
}
chmod 700 "$directory" # from here on nobody else can put a link into it
log=$directory/log pid=$directory/pid ended=$directory/exit

exec 8>>"$directory/starting" 9>>"$directory/running"
flock 8 # of two calls at once, one starts the run

# The run holds this lock as long as it lives. The number in $pid may belong to another process after a reboot.
running() { ! flock --nonblock 9; }

if running || [[ -e $ended && $(<"$ended") =~ ^(0|3)$ ]]; then
  printf '%s\0' "$@" | cmp -s - "$directory/command" || {
    mapfile -d '' -t words <"$directory/command"
    printf 'error: another command was started here: %s\n' "${words[*]@Q}" >&2
    exit 4
  }
else
  rm -f "$ended"
  : >"$log"
  printf '%s\0' "$@" >"$directory/command"
  # shellcheck disable=SC2016
  setsid bash -c '"${@:2}"; echo $? >"$1.part" && mv "$1.part" "$1"' run "$ended" \
    bash "$(dirname "$0")/entrypoint.sh" "$@" >"$log" 2>&1 </dev/null 8>&- &
  echo $! >"$pid"
fi
exec 8>&- 9>&-

tail -n +1 -f -s 0.2 --pid="$(<"$pid")" "$log" # it looks every 0.2 s whether the run lives
exit "$(cat "$ended" 2>/dev/null || echo 137)" # no exit code was written: the run was killed
