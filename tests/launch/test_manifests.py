"""The manifests in launch/ fit the published schemas of JobSet and Kubernetes, and say what the pages say."""

import math
import re
import shlex

import pytest
import yaml

from tests.launch.stand_ins import ROOT, WORDS, expanded


def read(name: str) -> dict:
    return yaml.safe_load((ROOT / "launch" / name).read_text())


def pod_of(manifest: dict) -> dict:
    """The spec of the pods of a JobSet."""
    (group,) = manifest["spec"]["replicatedJobs"]
    return group["template"]["spec"]["template"]["spec"]


def lost(given, kept, path: str = ""):
    """The paths of what is not in `kept`: a schema keeps only what it has."""
    if isinstance(given, dict):
        for key, value in given.items():
            yield from lost(value, kept[key], f"{path}.{key}") if key in kept else [f"{path}.{key}"]
    elif isinstance(given, list):
        for number, (value, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(value, other, f"{path}[{number}]")
    elif given != kept:
        yield path


def faults(manifest: dict) -> list[str]:
    """What does not fit the schema of a manifest's kind. Raises a ValidationError for a value of another type."""
    from kubeflow_trainer_api.models.io_k8s_api_batch_v1_job_spec import IoK8sApiBatchV1JobSpec
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    if manifest["kind"] == "JobSet":
        return list(lost(manifest, JobsetV1alpha2JobSet.from_dict(manifest).to_dict()))
    assert (manifest["apiVersion"], manifest["kind"]) == ("batch/v1", "Job")
    return list(lost(manifest["spec"], IoK8sApiBatchV1JobSpec.from_dict(manifest["spec"]).to_dict()))


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "launch").glob("*.yaml")))
def test_a_manifest_fits_the_published_schema(name):
    assert faults(read(name)) == []


def test_the_lines_for_emergency_checkpoints_mount_the_memory_of_the_node():
    text = re.sub("# (volume(s|Mounts): )", r"\1", (ROOT / "launch" / "gke.yaml").read_text())
    manifest = yaml.safe_load(text)
    pod = pod_of(manifest)
    assert faults(manifest) == [] and pod["volumes"] == [{"name": "memory", "hostPath": {"path": "/dev/shm"}}]
    assert pod["containers"][0]["volumeMounts"] == [{"name": "memory", "mountPath": "/dev/shm"}]


def test_a_wrong_manifest_does_not_fit():
    manifest = read("gke.yaml")
    pod_of(manifest)["containers"][0]["ressources"] = {}
    manifest["spec"]["maxRestarts"] = 3
    result = faults(manifest)
    assert any(path.endswith("containers[0].ressources") for path in result) and ".spec.maxRestarts" in result
    manifest["spec"]["replicatedJobs"][0]["replicas"] = "two"
    with pytest.raises(ValueError, match="replicas"):
        faults(manifest)


@pytest.mark.parametrize("name", ["gke.yaml", "gke_gpu.yaml"])
def test_what_the_manifests_of_runs_share(name):
    manifest = read(name)
    (group,) = manifest["spec"]["replicatedJobs"]
    job, pod = group["template"]["spec"], pod_of(manifest)
    (container,) = pod["containers"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2, 3]}
    assert job["parallelism"] == job["completions"] and pod["restartPolicy"] == "Never"
    assert pod["serviceAccountName"] == "xfresearch" and (ROOT / container["command"][0]).is_file()
    assert container["image"].endswith(":COMMIT") and "privileged" not in str(manifest)
    (token,) = (entry for entry in container["env"] if entry["name"] == "HF_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": "xfresearch", "key": "HF_TOKEN", "optional": True}
    arguments = container["args"]
    assert arguments[arguments.index("--join-timeout") + 1] == "3600"


def test_the_manifest_of_tpus_requests_whole_slices():
    manifest = read("gke.yaml")
    pod = pod_of(manifest)
    (container,) = pod["containers"]
    chips = math.prod(int(n) for n in pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    hosts = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"]
    assert hosts == chips / container["resources"]["limits"]["google.com/tpu"]
    assert container["securityContext"] == {"capabilities": {"add": ["SYS_RESOURCE"]}}


def test_nodes_of_gpus_find_each_other_and_their_network():
    """The coordinator is the first pod, by the name that JobSet gives it (jobset_types.go: network.subdomain)."""
    manifest = read("gke_gpu.yaml")
    (group,) = manifest["spec"]["replicatedJobs"]
    job, pod = group["template"]["spec"], pod_of(manifest)
    (container,) = pod["containers"]
    value = dict(zip(container["args"], container["args"][1:], strict=False))
    name = manifest["metadata"]["name"]
    assert value["--coordinator"].startswith(f"{name}-{group['name']}-0-0.{name}:")
    assert value["--processes"] == str(job["parallelism"]) and value["--process"] == "$(NODE)"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert volumes[mounts["/usr/local/gib"]]["hostPath"]["path"] == "/home/kubernetes/bin/gib"
    networks = yaml.safe_load(job["template"]["metadata"]["annotations"]["networking.gke.io/interfaces"])
    assert (
        sum(each["network"].startswith("rdma-") for each in networks) == container["resources"]["limits"]["nvidia.com/gpu"]
    )
    assert pod["securityContext"]["runAsNonRoot"] is True


JOBS = shlex.split("--name w-o --image registry/x:1 --gpu nvidia-l4 --count 39")
STUDY = shlex.split("-- python -m xfresearch.study --config configs/studies/w_o.py --workdir gs://bucket/w_o --job auto")


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--parallel 8 --queue research --spot --retries 3 --service-account me",
        "--gpu= --tpu tpu-v6e-slice --topology 2x2",
    ],
)
def test_a_pod_does_the_job_of_its_number(launcher, options):
    done = launcher.run("gke_jobs.sh", "--dry-run", *JOBS, *options.split(), *STUDY)
    assert done.returncode == 0 and launcher.calls == [], done.stderr
    manifest = yaml.safe_load(done.stdout)
    assert faults(manifest) == []
    spec = manifest["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"] == STUDY[1:] and container["command"] == ["launch/entrypoint.sh"]
    assert (spec["completionMode"], spec["completions"]) == ("Indexed", 39)
    queued = "--queue" in options
    assert spec["parallelism"] == (8 if queued else 39) and spec["backoffLimitPerIndex"] == (3 if queued else 10)
    assert manifest["metadata"]["labels"] == ({"kueue.x-k8s.io/queue-name": "research"} if queued else {})
    assert spec["suspend"] == queued and pod["serviceAccountName"] == ("me" if queued else "xfresearch")
    assert ("cloud.google.com/gke-spot" in pod["nodeSelector"]) == queued
    chips = {"google.com/tpu": 4} if "--tpu" in options else {"nvidia.com/gpu": 1}
    assert container["resources"]["limits"] == chips


def test_every_word_of_a_command_reaches_the_pod_as_it_is(launcher):
    done = launcher.run("gke_jobs.sh", "--dry-run", *JOBS, *STUDY, *WORDS.values())
    assert done.returncode == 0, done.stderr
    (container,) = yaml.safe_load(done.stdout)["spec"]["template"]["spec"]["containers"]
    got = [expanded(word, {"HF_TOKEN": "a secret", "X": "x"}) for word in container["args"]]
    assert dict(zip(WORDS, got[-len(WORDS) :], strict=True)) == WORDS


def test_a_word_that_is_no_text_is_refused(launcher):
    done = launcher.run("gke_jobs.sh", "--dry-run", *JOBS, *STUDY, "a\udcff")
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"error: the command is not UTF-8, which a manifest must be: python .* \$'a\\377'\n", done.stderr)


def test_the_pods_of_a_preparation_have_cores_and_a_share_each(launcher):
    flags = "--config configs/gpt2.py --config.data.shards=gs://b/t --shard auto/16"
    prepare = shlex.split(f"-- python -m xfresearch.prepare {flags}")
    done = launcher.run("gke_jobs.sh", "--dry-run", *JOBS[:4], "--cpu", "8", *prepare)
    assert done.returncode == 0, done.stderr
    manifest = yaml.safe_load(done.stdout)
    assert faults(manifest) == [] and manifest["spec"]["completions"] == 16
    pod = manifest["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == {"limits": {"cpu": 8}} and not pod["nodeSelector"]
    assert pod["containers"][0]["args"] == prepare[1:]


def test_the_jobs_are_counted_by_the_command_itself(launcher):
    program = launcher.folder / "bin" / "python"
    program.write_text('#!/bin/sh\n[ "$*" != "$ASKED" ] || echo 5\n')
    program.chmod(0o755)
    words = [word for word in JOBS if word not in ("--count", "39")]
    asked = " ".join(STUDY[2:]).replace("auto", "count")
    own = {"ASKED": asked, "VIRTUAL_ENV": "other"}  # otherwise the scripts put the checkout's environment first
    done = launcher.run("gke_jobs.sh", *words, *STUDY, **own)
    assert done.returncode == 0 and launcher.calls == [["kubectl", "apply", "-f", "-"]], done.stderr
    assert "completions: 5" in launcher.run("gke_jobs.sh", "--dry-run", *words, *STUDY, **own).stdout
    refused = launcher.run("gke_jobs.sh", *words, *STUDY, VIRTUAL_ENV="other")
    assert refused.returncode == 2 and "the command has no jobs: python -m xfresearch.study" in refused.stderr
    slurm = ["--array", "all%2", "--gpus-per-node", "1", "--dry-run", *STUDY]
    assert " --array 0-4%2 " in launcher.run("slurm.sbatch", *slurm, **own).stdout
