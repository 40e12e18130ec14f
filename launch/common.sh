# What the launch scripts share; sourced by them, never run.
#
# A script declares its options with their defaults in `option`, where a default of `no` makes a switch, calls
# `parse "$@"`, and finds the job in the array `job`. Its help is the comment at its top.
# shellcheck shell=bash

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || fail "bash $BASH_VERSION is too old: it must be 4.4 or newer"

help() {
  sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$0"
  exit 0
}

# parse ARGUMENTS...: fills `option`, `arguments` (those that are not options) and `job` (what follows --).
parse() {
  arguments=() job=()
  local name value
  while (($#)); do
    case $1 in
      --help | -h) help ;;
      --) shift && job=("$@") && break ;;
      --*) ;;
      *) arguments+=("$1") && shift && continue ;;
    esac
    name=${1%%=*} name=${name#--} value=${1#*=}
    [[ -v option[$name] ]] ||
      fail "$1: there is no such option; there are$(printf ' --%s\n' "${!option[@]}" | sort | tr -d '\n')"
    if [[ ${option[$name]} == no || ${option[$name]} == yes ]]; then
      [[ $1 != *=* ]] || fail "$1 is not allowed: --$name takes no value"
      value=yes
    elif [[ $1 != *=* ]]; then
      (($# > 1)) && [[ $2 != -- ]] || fail "--$name: a value is missing"
      value=$2 && shift
    fi
    option["$name"]=$value
    shift
  done
}

# shellcheck disable=SC2034 # the scripts use it
number='0|[1-9][0-9]*' # a form for require: bash takes 08 for octal

# require NAME REGEX WHAT: the option NAME is given and of that form.
require() {
  [[ ${option[$1]} =~ ^($2)$ ]] || fail "--$1='${option[$1]}' is not allowed: it must be $3"
}

# need PROGRAM: it is on this machine, unless only to be printed.
need() {
  [[ ${option[dry-run]} == yes ]] || command -v "$1" >/dev/null || fail "$1 is not installed on this machine"
}

# One shell-quoted line.
quoted() {
  local word line=
  for word; do
    [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] || word=${word@Q}
    line+=" $word"
  done
  printf '%s\n' "${line# }"
}

# run COMMAND...: prints the command with --dry-run, otherwise runs it and says so on standard error.
run() {
  if [[ ${option[dry-run]} == yes ]]; then
    quoted "$@"
  else
    printf '+ %s\n' "$(quoted "$@")" >&2
    "$@"
  fi
}

# The value of FLAG among the job's words, the last where it is given twice, empty where it is not: job_flag --workdir
job_flag() {
  local i value=
  for ((i = 0; i < ${#job[@]}; i++)); do
    case ${job[i]} in
      "$1") value=${job[i + 1]:-} ;;
      "$1"=*) value=${job[i]#*=} ;;
    esac
  done
  printf '%s' "$value"
}

# The module that the job runs, empty where it is not `python -m xfresearch.NAME`.
job_module() {
  [[ " ${job[*]} " =~ " -m xfresearch."([a-z_]+)" " ]] && printf '%s' "${BASH_REMATCH[1]}" || true
}

# Finds mistakes in the job before a machine is paid for: no such command, no such config file.
check_job() {
  ((${#job[@]})) || fail "the job is missing: write it after --, e.g. -- python -m xfresearch.evaluate --workdir runs/a"
  local module config commands
  module=$(job_module) config=$(job_flag --config)
  commands=$(cd xfresearch && grep -lE '^ *(command\.)?run\(main' ./*.py | sed 's|./||; s|.py$||' | paste -s -d ' ' -)
  [[ -z $module || " $commands " == *" $module "* ]] ||
    fail "xfresearch.$module: there is no such command; there are $commands"
  [[ -z $config || -f ${config%%:*} ]] || fail "--config=$config: there is no such file in the checkout"
}

# require_bucket REASON: the job keeps its results in a bucket, where it has results to keep.
require_bucket() {
  local module workdir
  module=$(job_module) workdir=$(job_flag --workdir)
  [[ -n $module ]] && grep -q '"--workdir"' "xfresearch/$module.py" || return 0
  [[ $workdir == gs://?* ]] || fail "--workdir='$workdir' is not allowed here: $1, so it must be gs://BUCKET/PATH"
}

# require_many: the job, where it is a command of ours, can run as many processes.
require_many() {
  local module able
  module=$(job_module)
  able=$(cd xfresearch && grep -l 'distributed.add_flags' ./*.py | sed 's|./||; s|.py$||' | paste -s -d ' ' -)
  [[ -z $module || " $able " == *" $module "* ]] ||
    fail "xfresearch.$module is not allowed here: it runs as one process; those that run as many are $able"
}

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1 # jobs name files of the checkout
[[ -n ${VIRTUAL_ENV:-} || ! -x .venv/bin/python ]] || PATH=$PWD/.venv/bin:$PATH
