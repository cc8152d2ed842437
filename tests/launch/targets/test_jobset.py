"""JobSet manifests, judged by the schema of their CRD, and the real client against an API server over HTTP."""

import copy
import json

import pytest

from slicewise.catalog import slices
from slicewise.cli import main
from slicewise.errors import ExitCode, UserError
from slicewise.launch import job
from slicewise.launch.job_folder import JobSpec
from slicewise.launch.jobset_schema import validate
from slicewise.launch.policy import Budgets, Watch
from slicewise.launch.targets import jobset

ROOT = "gs://bucket/runs/demo/job"


def spec_of(**more):
    defaults = {
        "name": "demo",
        "submission": "0" * 12,
        "target": "jobset",
        "command": ("-m", "slicewise", "train", "{config}"),
        "config": "",
        "slices": 2,
        "hosts_per_slice": 4,
        "environment": {"COLOUR": "blue"},
        "budgets": Budgets(failures=5),
        "watch": Watch(stop_grace_s=120),
    }
    return JobSpec(**{**defaults, **more})


def placement(**more):
    return jobset.Placement(**{"slice": slices.parse("v6e-16"), "image": "registry/image:1", **more})


@pytest.fixture
def manifest():
    return jobset.manifest(spec_of(), ROOT, placement(queue="queue", secrets=("tokens",)))


def template(manifest):
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]


def container(manifest):
    return template(manifest)["template"]["spec"]["containers"][0]


def test_one_replicated_job_has_a_job_for_each_slice_alone_in_its_node_pool(manifest):
    (replicated,) = manifest["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 2
    assert template(manifest)["parallelism"] == template(manifest)["completions"] == 4
    assert manifest["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "queue"
    pod = template(manifest)["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    assert container(manifest)["resources"] == {"limits": {"google.com/tpu": "4"}}
    assert pod["terminationGracePeriodSeconds"] == 150


def outcome(manifest, *, disrupted=False, code=None):
    """What the Job and JobSet controllers do with a pod that ended so: their documented rules, in order."""
    rules, policy = template(manifest)["podFailurePolicy"]["rules"], manifest["spec"]["failurePolicy"]
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(rules):
        assert rule["action"] == "FailJob"
        if disrupted and "onPodConditions" in rule:
            what = "has condition DisruptionTarget"
        elif code in rule.get("onExitCodes", {}).get("values", []):
            what = f"failed with exit code {code}"
        else:
            continue
        reason = "PodFailurePolicy"
        message = f"Container trainer for pod default/demo-slice-0-0-x {what} matching FailJob rule at index {index}"
        break
    import re

    for rule in policy["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(p, message) for p in patterns):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize(
    ("end", "action"),
    [
        ({"disrupted": True}, "RestartJobSetAndIgnoreMaxRestarts"),
        ({"code": 75}, "RestartJobSetAndIgnoreMaxRestarts"),
        ({"code": 76}, "RestartJobSetAndIgnoreMaxRestarts"),
        ({"code": 2}, "FailJobSet"),
        ({"code": 1}, "RestartJobSet"),
        ({"code": 134}, "RestartJobSet"),
        ({"code": 137}, "RestartJobSet"),
    ],
)
def test_infrastructure_restarts_for_nothing_failures_cost_and_wrong_input_ends_the_job(
    manifest, end, action
):
    assert outcome(manifest, **end) == action
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 5
    assert template(manifest)["backoffLimit"] == 0


def test_a_pod_learns_its_place_from_labels_and_its_secrets_by_name_only(manifest):
    environment = {entry["name"]: entry for entry in container(manifest)["env"]}
    path = environment["SLICEWISE_SLICE"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.labels['jobset.sigs.k8s.io/job-index']"
    assert environment["SLICEWISE_COORDINATOR"]["value"] == "demo-slice-0-0.demo:8482"
    assert container(manifest)["envFrom"] == [{"secretRef": {"name": "tokens"}}]
    assert container(manifest)["command"][1:5] == ["-m", "slicewise.launch.agent", "--job", ROOT]


@pytest.mark.parametrize("name", ["v4-16", "v5e-16", "v5p-32", "v6e-16", "tpu7x-16"])
def test_every_generation_of_tpus_makes_a_valid_manifest(name):
    found = slices.parse(name)
    made = jobset.manifest(spec_of(hosts_per_slice=found.hosts), ROOT, placement(slice=found))
    validate(made)
    assert container(made)["resources"]["limits"]["google.com/tpu"] == str(found.chips_per_host)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (
            ("spec", "replicatedJob"),
            [],
            "spec: unknown field 'replicatedJob'. Did you mean 'replicatedJobs'?",
        ),
        (("spec", "failurePolicy", "maxRestart"), 1, "spec.failurePolicy: unknown field 'maxRestart'."),
        (("spec", "failurePolicy", "maxRestarts"), "3", "spec.failurePolicy.maxRestarts: '3' is not of type"),
        (("spec", "failurePolicy", "rules", 0, "action"), "Restart", "'Restart' is not one of"),
        (("spec", "failurePolicy", "rules", 0, "name"), "wrong-input", "name 'wrong-input' is taken, or not"),
        (("spec", "replicatedJobs", 0, "replicas"), 1.5, "1.5 is not of type 'integer'"),
        (("metadata", "name"), "../demo", "'../demo' does not match"),
        (("metadata", "anotations"), {}, "unknown field 'anotations'. Did you mean 'annotations'?"),
        (("kind",), "JobSets", "'JobSet' was expected"),
    ],
)
def test_what_an_api_server_would_drop_or_refuse_is_refused_here_with_its_path(manifest, path, value, said):
    made = copy.deepcopy(manifest)
    where = made
    for part in path[:-1]:
        where = where[part]
    where[path[-1]] = value
    with pytest.raises(UserError) as refused:
        validate(made)
    assert said in str(refused.value)


def test_an_unknown_field_deep_in_a_container_is_found(manifest):
    container(manifest)["resource"] = {}
    with pytest.raises(
        UserError, match=r"containers\[0\]: unknown field 'resource'. Did you mean 'resources'"
    ):
        validate(manifest)


# ---------------------------------------------------------------- the cluster


@pytest.fixture
def run_toml(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\nrun_name = "demo"\noutput_directory = "{tmp_path}/shared"\n')
    return path


SUBMIT = ("--target", "jobset", "--type", "v6e-16", "--slices", "2", "--image", "image:1")


def submit(path, *more):
    return main(["job", "submit", str(path), *SUBMIT, *more])


def test_a_job_is_created_looked_at_and_deleted_by_the_real_client(kubernetes, run_toml, tmp_path, capsys):
    assert submit(run_toml, "--namespace", "team", "--queue", "queue", "--env", "COLOUR=blue") == 0
    made = kubernetes.objects["team", "demo"]
    assert made["spec"]["replicatedJobs"][0]["replicas"] == 2
    assert json.loads((tmp_path / "shared" / "demo" / "job" / "job.json").read_text())["environment"] == {
        "COLOUR": "blue"
    }
    assert kubernetes.calls[-1][2] == "Bearer a-secret-token"
    record = job.find("demo")
    assert job.status(record).slices == "running"
    made["spec"]["suspend"] = True
    assert job.status(record).slices == "queued"
    made["spec"]["suspend"] = False
    made["status"] = {"restarts": 2, "terminalState": "Failed"}
    now = job.status(record)
    assert (now.state, now.code, now.slices) == ("failed", ExitCode.INTERNAL, "failed after 2 restarts")
    del made["status"]
    assert main(["job", "cancel", "demo"]) == 0
    assert not kubernetes.objects
    assert job.status(record).state == "cancelled"
    assert "a-secret-token" not in capsys.readouterr().out


def test_waiting_for_a_job_ends_with_the_cluster_s_word_where_the_workers_left_none(
    kubernetes, run_toml, monkeypatch, capsys
):
    monkeypatch.setattr(job, "PLATFORM_INTERVAL_S", 0.01)
    monkeypatch.setattr(job, "FOLLOW_INTERVAL_S", 0.01)
    create = kubernetes.create

    def fails(namespace, body):
        status, made = create(namespace, body)
        made["status"] = {"restarts": 3, "terminalState": "Failed"}
        return status, made

    monkeypatch.setattr(kubernetes, "create", fails)
    assert submit(run_toml, "--wait") == ExitCode.INTERNAL
    assert "job demo: failed: jobset: failed after 3 restarts" in capsys.readouterr().err


def test_dry_run_prints_the_manifest_and_touches_nothing(kubernetes, run_toml, tmp_path, capsys):
    import yaml

    assert submit(run_toml, "--dry-run") == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    validate(shown)
    assert shown["metadata"]["name"] == "demo"
    assert not kubernetes.calls
    assert not (tmp_path / "shared").exists()
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (401, ExitCode.DENIED),
        (403, ExitCode.DENIED),
        (404, ExitCode.NOT_FOUND),
        (409, ExitCode.CONFLICT),
        (422, ExitCode.USER),
        (429, ExitCode.RATE_LIMITED),
        (500, ExitCode.UNAVAILABLE),
    ],
)
def test_what_the_api_server_answers_is_said_with_an_exit_code_of_its_kind(
    kubernetes, run_toml, answer, code, capsys
):
    kubernetes.answer = answer
    assert submit(run_toml) == code
    said = capsys.readouterr().err
    assert f"Kubernetes answered {answer}: injected {answer}" in said
    assert not job.records()


def test_an_api_server_that_is_not_there_is_named(kubernetes, run_toml, monkeypatch, capsys, tmp_path):
    config = json.loads((tmp_path / "kubeconfig").read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:9"
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    assert submit(run_toml) == ExitCode.UNAVAILABLE
    assert "the Kubernetes API at http://127.0.0.1:9 does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--context", "elsewhere"], "kubeconfig: "),
        (["--name", "../../etc"], "job name '../../etc': expected"),
        (["--name", "Demo"], "job name 'Demo': expected"),
        (["--env", "HF_TOKEN=x"], "--env HF_TOKEN: this looks like a secret"),
        (["--env", "COLOUR"], "--env 'COLOUR': expected NAME=VALUE"),
        (["--env", "SLICEWISE_RESTART=1"], "are set by the agent"),
        (["output_directory=runs"], "is a path of this machine"),
        (["--local", "2x1x1"], "--local goes with --target local, not with jobset"),
        (["--type", "h100-8"], "expected slices of TPUs"),
        (["--slices", "0"], "--slices"),
        (["--queue", "My Queue"], "--queue 'My Queue': expected at most 63 lower-case letters"),
        (["--queue", "q" * 64], "expected at most 63"),
        (["--queue", "queue-"], "--queue 'queue-'"),
        (["--namespace", "a/b"], "--namespace 'a/b': expected"),
        (["--priority-class", "High"], "--priority-class 'High': expected at most 253"),
        (["--service-account", "a_b"], "--service-account 'a_b': expected"),
        (["--secret", "tokens\n"], "--secret 'tokens\\n': expected"),
        (["ici_fsdp_parallelism=3"], "which is not the 16 devices per slice found"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    kubernetes, run_toml, tmp_path, more, said, capsys
):
    assert submit(run_toml, *more) == ExitCode.USER
    assert said in capsys.readouterr().err
    assert not kubernetes.objects
    assert not job.records()
