#!/usr/bin/env bash
# launch/entrypoint.sh COMMAND...
#
# Runs COMMAND under a scheduler that stops jobs with SIGTERM, and forwards that signal. The exit code is that of
# COMMAND, except 143 if COMMAND was told to stop and exited with 0: xfresearch commands save a checkpoint and exit with
# 0 then, and the scheduler must not treat the job as finished.
[[ $# -gt 0 && $1 != --help ]] || { sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$0" && exit 0; }

stopped='' interrupted=yes code=0
trap 'stopped=yes interrupted=yes; kill -TERM "$child" 2>/dev/null' TERM INT
"$@" &
child=$!
while [[ -n $interrupted ]]; do # a signal makes `wait` return before the command has ended
  interrupted=''
  wait "$child"
  code=$?
done
[[ -n $stopped && $code == 0 ]] && code=143
exit "$code"
