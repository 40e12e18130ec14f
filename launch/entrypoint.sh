#!/usr/bin/env bash
# launch/entrypoint.sh COMMAND...
#
# Runs COMMAND under a scheduler that tells it to stop with SIGTERM, and passes that on. The exit code is the command's,
# but 143 where it was told to stop and ended with 0: our commands save and exit with 0 then, and the scheduler must not
# take that for a finished job.
[[ $# -gt 0 && $1 != --help ]] || { sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$0" && exit 0; }

stopped='' interrupted=yes code=0
trap 'stopped=yes interrupted=yes; kill -TERM "$child" 2>/dev/null' TERM INT
"$@" &
child=$!
while [[ -n $interrupted ]]; do # a signal ends `wait` before the command has ended
  interrupted=''
  wait "$child"
  code=$?
done
[[ -n $stopped && $code == 0 ]] && code=143
exit "$code"
