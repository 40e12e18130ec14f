# Functions that the launch scripts share. They source this file; it is never run.
#
# A script declares its options and defaults in `option` (a default of `no` makes a switch) and calls `parse "$@"`. The
# job is then in the array `job`. The comment at the top of a script is its help text.
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

# The commit of this checkout, with -dirty if tracked files have changed; nothing in a checkout without a commit.
commit() {
  local name
  name=$(git rev-parse --verify --quiet HEAD) || return 0
  [[ -z $(git status --porcelain --untracked-files=no) ]] || name+=-dirty
  printf '%s\n' "$name"
}

# tree: a name of the files of this checkout, for the tag of an image: the commit, and a digest of what has changed since.
tree() {
  local name changes
  name=$(git rev-parse --verify --quiet --short=12 HEAD) || fail "the checkout has no commit, which names the image: give --image a tag"
  changes=$({ git diff HEAD && git ls-files -z --others --exclude-standard | xargs -0 -r cat 2>/dev/null; } | sha256sum)
  [[ -z $(git status --porcelain) ]] || name+=-${changes:0:8}
  printf '%s\n' "$name"
}

# image_name: --image, with `tree` as its tag if it has none. An image that is built always has that one: with a tag that
# is used again, machines run the old image that they have.
image_name() {
  local image=${option[image]} has name
  [[ ${image##*/} == *[:@]* ]] && has=yes || has=no
  [[ $has == no || ${option[build]} == no ]] ||
    fail "--image='$image' is not allowed with --build: leave out the tag, it is the name of the commit"
  [[ $has == no ]] || { printf '%s' "$image" && return; }
  name=$(tree) || exit
  printf '%s:%s' "$image" "$name"
}

# build_image IMAGE JAX: builds the image from this checkout, and pushes it.
build_image() {
  run docker build --platform linux/amd64 --build-arg JAX="$2" --build-arg COMMIT="$(commit)" --tag "$1" \
    --file launch/Dockerfile .
  run docker push "$1"
}

# parse ARGUMENTS...: fills `option`, `arguments` (the positional arguments) and `job` (the words after --).
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
      fail "$1: there is no such option; the options are$(printf ' --%s\n' "${!option[@]}" | sort | tr -d '\n')"
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
number='0|[1-9][0-9]*' # a regex for `require`; it excludes 08, which bash reads as octal

# require NAME REGEX ALLOWED: fails unless the value of the option NAME matches REGEX. ALLOWED describes it in words.
require() {
  [[ ${option[$1]} =~ ^($2)$ ]] || fail "--$1='${option[$1]}' is not allowed: it must be $3"
}

# require_program PROGRAM: fails if PROGRAM is not installed, except with --dry-run.
require_program() {
  [[ ${option[dry-run]} == yes ]] || command -v "$1" >/dev/null || fail "$1 is not installed on this machine"
}

# quoted WORDS...: prints the words as one shell-quoted line, without a character that a terminal or YAML does not show.
quoted() {
  local word line=
  [[ $* != *$'\xef\xbb\xbf'* ]] || local LC_ALL=C # the mark of the byte order counts as printable elsewhere
  for word; do
    [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] || word=${word@Q}
    line+=" $word"
  done
  printf '%s\n' "${line# }"
}

# run COMMAND...: with --dry-run prints the command, otherwise logs it on standard error and runs it.
run() {
  announced "$@" || "$@"
}

# run_last COMMAND...: `run` in place of this shell, so that a signal to the script reaches the command.
run_last() {
  announced "$@" || exec "$@"
}

# announced COMMAND...: prints the command; succeeds with --dry-run, in which printing is all.
announced() {
  if [[ ${option[dry-run]} == yes ]]; then
    quoted "$@"
  else
    printf '+ %s\n' "$(quoted "$@")" >&2
    return 1
  fi
}

# job_flag FLAG: prints the value of FLAG in the job; the last one if FLAG is repeated, nothing if it is absent.
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

# job_module: prints NAME if the job is `python -m xfresearch.NAME` or `python -m xfresearch NAME`, otherwise nothing.
job_module() {
  [[ " ${job[*]} " =~ " -m xfresearch"[.\ ]([a-z_]+)" " ]] && printf '%s' "${BASH_REMATCH[1]}" || true
}

# check_job: finds mistakes in the job before a machine costs money: an unknown command, a missing config file.
check_job() {
  ((${#job[@]})) || fail "the job is missing: write it after --, e.g. -- python -m xfresearch.evaluate --workdir runs/a"
  local module config commands
  [[ ${job[0]} != xfresearch ]] || job=(python -m "${job[@]}") # the machines have this checkout, and no such program
  module=$(job_module) config=$(job_flag --config)
  commands=$(cd xfresearch && grep -lE '^ *(command\.)?run\(main' ./*.py | sed 's|./||; s|.py$||' | paste -s -d ' ' -)
  [[ -z $module || " $commands " == *" $module "* ]] ||
    fail "xfresearch.$module: there is no such command; the commands are $commands"
  [[ -z $config || -f ${config%%:*} || -f configs/${config%%:*}.py ]] ||
    fail "--config=$config: there is no such file in the checkout, and no named config"
}

# count_jobs: prints how many numbered jobs the job has, which it is asked on this machine, on the CPU.
count_jobs() {
  local i count asked=("${job[@]}")
  [[ $(job_flag --shard) != auto/* ]] || { job_flag --shard | sed 's|auto/||' && return; }
  for ((i = 0; i < ${#asked[@]}; i++)); do
    case ${asked[i]} in
      --job) asked[i + 1]=count ;;
      --job=*) asked[i]=--job=count ;;
    esac
  done
  count=$(JAX_PLATFORMS=cpu "${asked[@]}") || fail "the command does not say how many jobs it has: $(quoted "${asked[@]}")"
  [[ $count =~ ^[1-9][0-9]*$ ]] || fail "the command has no jobs: $(quoted "${asked[@]}") printed '$count'"
  printf '%s' "$count"
}

# require_bucket REASON: fails unless the job writes its results to a bucket, if it writes any.
require_bucket() {
  local module workdir
  module=$(job_module) workdir=$(job_flag --workdir)
  [[ -n $module ]] && grep -q '"--workdir"' "xfresearch/$module.py" || return 0
  [[ $workdir == gs://?* ]] || fail "--workdir='$workdir' is not allowed here: $1, so it must be gs://BUCKET/PATH"
}

# require_distributed: fails if the job is an xfresearch command that runs only as a single process.
require_distributed() {
  local module distributed
  module=$(job_module)
  distributed=$(cd xfresearch && grep -l 'distributed.add_flags' ./*.py | sed 's|./||; s|.py$||' | paste -s -d ' ' -)
  [[ -z $module || " $distributed " == *" $module "* ]] ||
    fail "xfresearch.$module is not allowed here: it runs as one process, on one host (on Slurm with --gpus-per-node 1); commands for many are $distributed"
}

# require_variables: fails unless the names in --env are those of variables that are set in this shell.
require_variables() {
  local variable variables
  require env '([A-Za-z_][A-Za-z0-9_]*(,[A-Za-z_][A-Za-z0-9_]*)*)?' "names of variables such as HF_TOKEN,WANDB_API_KEY"
  IFS=, read -ra variables <<<"${option[env]}"
  for variable in "${variables[@]}"; do
    [[ -v $variable || ${option[dry-run]} == yes ]] ||
      fail "--env=${option[env]}: the variable $variable is not set in this shell"
  done
}

# write_variables FILE: writes the variables of --env as a shell assignment each, for the user alone; nothing with --dry-run.
write_variables() {
  local variable variables
  [[ -n ${option[env]} && ${option[dry-run]} == no ]] || return 0
  IFS=, read -ra variables <<<"${option[env]}"
  (umask 077 && for variable in "${variables[@]}"; do printf '%s=%q\n' "$variable" "${!variable}"; done >"$1")
}

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1 # paths in a job are relative to the checkout
[[ -n ${VIRTUAL_ENV:-} || ! -x .venv/bin/python ]] || PATH=$PWD/.venv/bin:$PATH
