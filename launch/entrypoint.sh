#!/usr/bin/env bash
# launch/entrypoint.sh COMMAND...
#
# Runs COMMAND under a scheduler that stops jobs with SIGTERM, and forwards that signal: the first process of a container
# would ignore it. The exit code is that of COMMAND (docs/launch.md).
[[ $# -gt 0 && $1 != --help ]] || { sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$0" && exit 0; }

interrupted=yes code=0
trap 'interrupted=yes; kill -TERM "$child" 2>/dev/null' TERM INT
"$@" &
child=$!
while [[ -n $interrupted ]]; do # a signal makes `wait` return before the command has ended
  interrupted=''
  wait "$child"
  code=$?
done
exit "$code"
