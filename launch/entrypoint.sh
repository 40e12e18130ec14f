#!/usr/bin/env bash
# launch/entrypoint.sh COMMAND...
#
# Runs COMMAND under a scheduler that stops jobs with SIGTERM, and forwards that signal: the first process of a container
# would ignore it. The exit code is that of COMMAND (docs/launch.md). Where there are TPUs or one of Google's networks for
# GPUs, it first makes the settings that Google documents for them.
[[ $# -gt 0 && $1 != --help ]] || { sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$0" && exit 0; }

# TPUs need memory that stays in its place. In a privileged container there is no limit.
[[ ! -e /dev/vfio && ! -e /dev/accel0 ]] || ulimit -l 68719476736 2>/dev/null
# The settings of NCCL for gIB (A3 Ultra, A4) and for TCPXO (A3 Mega), which come with the nodes' plugin.
for settings in /usr/local/gib/scripts/set_nccl_env.sh /usr/local/nvidia/lib64/nccl-env-profile.sh; do
  # shellcheck disable=SC1090
  [[ ! -r $settings ]] || NCCL_LIB_DIR=/usr/local/nvidia/lib64 source "$settings"
done

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
