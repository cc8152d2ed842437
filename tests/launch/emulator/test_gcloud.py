"""The unmodified gcloud against the emulator, where it is installed."""

import json
import os
import shutil
import subprocess

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed"),
]


@pytest.fixture
def gcloud(cloud, tmp_path):
    """Runs gcloud with a config of its own; what it prints as JSON."""
    environment = os.environ | {
        "CLOUDSDK_CONFIG": str(tmp_path / "gcloud"),
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"http://{cloud.state.rest}/",
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
        "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "true",
        "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
        "NO_GCE_CHECK": "true",
    }

    def run(words, *more):
        where = ["--project=emulated", "--zone=local-a", "--format=json"]
        command = ["gcloud", *words.split(), *more, *where]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout or "null")

    return run


def test_create_list_describe_reset_delete(gcloud, alpha):
    v2alpha1, v2 = "alpha compute tpus queued-resources", "compute tpus queued-resources"
    slices = ("--accelerator-type=v5litepod-4", "--runtime-version=v2-alpha-tpuv5-lite", "--node-count=2")
    gcloud(f"{v2alpha1} create gc --spot", *slices)
    name = "projects/emulated/locations/local-a/queuedResources/gc"
    alpha.wait(name)
    assert "spot" in alpha.api.get_queued_resource(name=name)
    [listed] = [q for q in gcloud(f"{v2} list") if q["name"] == name]
    assert len(listed["tpu"]["nodeSpec"]) == 2
    assert gcloud(f"{v2} describe gc")["state"]["state"] == "ACTIVE"
    nodes = [n["name"].rsplit("/", 1)[1] for n in gcloud("compute tpus tpu-vm list")]
    assert {"gc-0", "gc-1"} <= set(nodes)
    gcloud(f"{v2alpha1} reset gc")
    gcloud(f"{v2} delete gc --force --quiet")
    assert name not in [
        q.name for q in alpha.api.list_queued_resources(parent="projects/emulated/locations/local-a")
    ]
