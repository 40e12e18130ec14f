#!/usr/bin/env bash
# What runs in place of gcloud, xpk, kubectl, docker, sbatch, ...: a link to this file has the program's name. It adds its
# arguments to $STAND_INS/calls, and answers as the test specified, otherwise like a cloud without failures.
folder=$STAND_INS name=${0##*/} words="${0##*/} $*"
# Packing takes longer than all the rest, and test_on_host.py does it: the archive is the list of its files.
[[ $words != "tar -czf "* ]] || { tr '\0' '\n' <"$6" >"$2" && echo COMMIT >>"$2" && exit; }
[[ $words != "tar -tzf "* ]] || { cat "$2" && exit; }
trap 'exit 130' INT # as a real program does: without a trap, bash ignores a Ctrl-C that its child, such as mv, survives
printf '%s\x1f' "$name" "$@" >>"$folder/calls"
printf '\x1e' >>"$folder/calls"

for rule in "$folder"/answers/*/; do
  [[ -e $rule ]] || break
  read -r pattern <"$rule/pattern"
  [[ $words =~ $pattern ]] || continue
  for answer in "$rule"*.answer; do
    [[ -e $answer ]] || continue 2 # all answers were given
    { read -r code seconds && mapfile -d '' text; } <"$answer"
    mv "$answer" "$answer.given"
    ((code == 0)) || exec >&2 # a program that fails says why on standard error
    # It waits on a pipe that nobody writes to: a `sleep` could miss the signal, and would keep the output open.
    [[ $seconds == 0 ]] || { { [[ -p $folder/silent ]] || mkfifo "$folder/silent"; } && read -rt "$seconds" <>"$folder/silent"; }
    [[ -z ${text[0]} ]] || printf '%s\n' "${text[0]}"
    ((code)) && exit "$code"
    answered=yes
    break 2
  done
done

zone=''
for ((i = 1; i < $#; i++)); do [[ ${!i} != --zone ]] || { i=$((i + 1)) && zone=${!i}; }; done
case $words in
  "gcloud compute tpus queued-resources create "*) : >"$folder/active-$zone" ;;
  "gcloud compute tpus queued-resources delete "*) rm -f "$folder/active-$zone" ;;
  "gcloud storage cp -r gs://"*) mkdir -p "$5" && cp -r runs/a "$5/${4##*/}" ;; # runs/a stands for the downloaded run
esac
[[ -z ${answered:-} ]] || exit 0
case $words in
  "gcloud compute tpus queued-resources list "*) [[ ! -e $folder/active-$zone ]] || echo ACTIVE ;;
  "gcloud compute tpus tpu-vm list "*) printf 'READY\tHEALTHY\n' ;;
  "xpk workload list "*) echo 'Jobset Name   Created Time   Priority   TPU/GPU VMs Needed   Status' ;;
esac
exit 0
