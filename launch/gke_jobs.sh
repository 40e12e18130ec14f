#!/usr/bin/env bash
# launch/gke_jobs.sh --name NAME --image IMAGE (--gpu TYPE | --tpu TYPE --topology T | --cpu N) [options] -- COMMAND... --job auto
#
# Runs every part of a COMMAND that has numbered jobs, such as the runs of a study or the checkpoints of a run, as the pods of
# one indexed job of Kubernetes, which it gives to kubectl. Each pod is one machine, and does one part. Parts that have ended
# are not done again. In the command of `prepare`, --shard auto/N stands in place of --job auto.
#
#   --name NAME          name of the job: lowercase letters, digits and dashes
#   --image IMAGE        REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME; without a tag it has that of the checkout's commit
#   --build              first build the image from this checkout and push it
#   --gpu TYPE           GKE's name of a GPU, e.g. nvidia-l4, one for each pod
#   --tpu TYPE           GKE's name of a TPU, e.g. tpu-v6e-slice, with the chips of one host
#   --cpu N              cores of each pod, without an accelerator, for `prepare`
#   --topology T         of that host: 1x1 or 2x2 (v5e, v6e), 2x2x1 (v4, v5p)
#   --count N            number of jobs (default: COMMAND is asked, with --job count)
#   --parallel N         pods at a time (default: all)
#   --queue QUEUE        local queue of Kueue, which admits the job when there are machines
#   --spot               on spot nodes
#   --retries N          how often a pod of one job is started again (default: 10)
#   --service-account A  of Kubernetes (default: xfresearch)
#   --dry-run            print the manifest, and do not apply it
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

declare -A option=([name]='' [image]='' [gpu]='' [tpu]='' [cpu]='' [topology]='' [count]='' [parallel]='' [queue]='' [spot]=no
  [retries]=10 [service-account]=xfresearch [build]=no [dry-run]=no)
parse "$@"
((${#arguments[@]} == 0)) || fail "${arguments[0]}: unexpected argument; write the command after --"
word='[a-z0-9]([-a-z0-9.]*[a-z0-9])?'
require name '[a-z]([-a-z0-9]{0,48}[a-z0-9])?' "lowercase letters, digits and dashes, at most 50"
require image '[A-Za-z0-9][A-Za-z0-9._/:@-]*' "the name of an image"
kinds=${option[gpu]:+1}${option[tpu]:+1}${option[cpu]:+1}
[[ $kinds == 1 ]] || fail "--gpu, --tpu and --cpu: give exactly one of the three"
require cpu '([1-9][0-9]*)?' "a number of cores"
require gpu "($word)?" "GKE's name of a GPU, such as nvidia-l4"
require tpu "($word)?" "GKE's name of a TPU, such as tpu-v6e-slice"
if [[ -n ${option[tpu]} ]]; then
  require topology '1x1|2x2|2x2x1' "that of one host: 1x1 or 2x2 (v5e, v6e), 2x2x1 (v4, v5p)"
else
  [[ -z ${option[topology]} ]] || fail "--topology=${option[topology]} is not allowed without --tpu"
fi
for name in count parallel; do require "$name" '([1-9][0-9]*)?' "a number, 1 or more"; done
require queue "($word)?" "the name of a local queue"
require retries "$number" "a number, 0 or more"
require service-account "$word" "the name of a service account"
check_job
[[ $(job_flag --job) == auto || $(job_flag --shard) == auto/* ]] ||
  fail "--job auto is missing in the command: it does the part of the pod's number"
require_bucket "a container's disk is deleted with it"
require_program kubectl
[[ ${option[build]} == no ]] || require_program docker
image=$(image_name)
count=${option[count]:-$(count_jobs)}

# json WORDS...: the words as a list of JSON, which is YAML, too. YAML has no control characters, and changes those that
# end a line in Unicode.
json() {
  python3 -X utf8 -c 'import json, sys
text = json.dumps(sys.argv[1:], ensure_ascii=False)
text.encode()
print("".join(c if c.isprintable() else f"\\u{ord(c):04x}" if c < "\U00010000" else f"\\U{ord(c):08x}" for c in text))' "$@" 2>/dev/null ||
    fail "the command is not UTF-8, which a manifest must be: $(quoted "$@")"
}
words=$(json "${job[@]//\$/\$\$}") # Kubernetes puts values, also secret ones, in place of $(NAME), and $ in place of $$

jax=cuda12 platforms=cuda,cpu chips='nvidia.com/gpu: 1' identity='{runAsNonRoot: true, runAsUser: 1000}'
selector="cloud.google.com/gke-accelerator: ${option[gpu]}"
if [[ -n ${option[tpu]} ]]; then
  jax=tpu platforms=tpu,cpu chips='google.com/tpu: 4'
  [[ ${option[topology]} != 1x1 ]] || chips='google.com/tpu: 1'
  identity='{capabilities: {add: [SYS_RESOURCE]}}' # for memory that stays in its place (launch/entrypoint.sh)
  selector="cloud.google.com/gke-tpu-accelerator: ${option[tpu]}, cloud.google.com/gke-tpu-topology: ${option[topology]}"
fi
if [[ -n ${option[cpu]} ]]; then
  platforms=cpu chips="cpu: ${option[cpu]}" selector=
fi
[[ ${option[spot]} == no ]] || selector+="${selector:+, }cloud.google.com/gke-spot: \"true\""
labels='' suspend=false
[[ -z ${option[queue]} ]] || labels="kueue.x-k8s.io/queue-name: ${option[queue]}" suspend=true # Kueue starts it

manifest="apiVersion: batch/v1
kind: Job
metadata:
  name: ${option[name]}
  labels: {$labels}
spec:
  suspend: $suspend
  completionMode: Indexed                 # each pod has its number in JOB_COMPLETION_INDEX, which --job auto reads
  completions: $count
  parallelism: ${option[parallel]:-$count}
  backoffLimitPerIndex: ${option[retries]}
  podFailurePolicy:
    rules:
      - action: FailIndex                 # a restart does not help: a mistake, or a loss that is not finite
        onExitCodes: {containerName: xfresearch, operator: In, values: [2, 3]}
      - action: Ignore                    # a machine that was lost does not count
        onPodConditions: [{type: DisruptionTarget, status: \"True\"}]
  template:
    spec:
      restartPolicy: Never
      serviceAccountName: ${option[service-account]}
      terminationGracePeriodSeconds: 120
      nodeSelector: {$selector}
      tolerations: [{key: nvidia.com/gpu, operator: Exists}, {key: google.com/tpu, operator: Exists}]
      containers:
        - name: xfresearch
          image: $image
          securityContext: $identity
          env:
            - {name: JAX_PLATFORMS, value: \"$platforms\"}
            - name: HF_TOKEN
              valueFrom: {secretKeyRef: {name: xfresearch, key: HF_TOKEN, optional: true}}
          command: [launch/entrypoint.sh]
          args: $words
          resources:
            limits: {$chips}"

[[ ${option[build]} == no ]] || build_image "$image" "$jax"
if [[ ${option[dry-run]} == yes ]]; then
  printf '%s\n' "$manifest"
else
  run kubectl apply -f - <<<"$manifest"
fi
