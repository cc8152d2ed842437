import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from slicewise.errors import ExitCode, UserError
from slicewise.launch.job_folder import JobSpec
from slicewise.launch.place import Place, of_pod, of_slurm_task, of_tpu_vm

SPEC = JobSpec(
    name="demo", submission="0" * 12, target="slurm", command=("x",), config="", slices=2, hosts_per_slice=2
)


@pytest.fixture
def metadata(monkeypatch):
    """A metadata server; the attributes of its instance."""
    attributes = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.removeprefix("/computeMetadata/v1/instance/attributes/")
            known = self.headers.get("Metadata-Flavor") == "Google" and name in attributes
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(attributes.get(name, "").encode())

        def log_message(self, format, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which it must not be asked through
    yield attributes
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_tpu_vm_is_told_its_place_by_the_metadata_server(metadata):
    metadata |= {
        "agent-worker-number": "1",
        "worker-network-endpoints": "a:b:10.0.0.1,a:b:10.0.0.2",
        "tpu-env": "ZONE: 'us-east5-a'\nMEGASCALE_SLICE_ID: '3'\nMEGASCALE_NUM_SLICES: '4'\n",
    }
    assert of_tpu_vm() == Place(3, 1, "10.0.0.2")
    metadata |= {"tpu-env": "ZONE: 'us-east5-a'\n", "worker-network-endpoints": "10.0.0.1,10.0.0.2"}
    assert of_tpu_vm() == Place(0, 1, "10.0.0.2")


def test_a_metadata_server_that_makes_no_sense_is_not_believed(metadata):
    metadata |= {"agent-worker-number": "x", "worker-network-endpoints": "10.0.0.1", "tpu-env": ""}
    with pytest.raises(UserError, match="agent-worker-number is 'x', expected a number"):
        of_tpu_vm()
    metadata["agent-worker-number"] = "1"
    with pytest.raises(UserError, match="names 1 workers, and this one is number 1"):
        of_tpu_vm()
    del metadata["tpu-env"]
    with pytest.raises(UserError, match="does not give tpu-env .*404") as refused:
        of_tpu_vm()
    assert refused.value.code == ExitCode.INTERNAL


def test_elsewhere_there_is_no_metadata_server(monkeypatch):
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:9")
    with pytest.raises(UserError, match="is this a Cloud TPU VM"):
        of_tpu_vm()


def test_pods_and_tasks_are_numbered_slice_by_slice():
    pod = {"SLICEWISE_SLICE": "1", "JOB_COMPLETION_INDEX": "0", "SLICEWISE_JOBSET": "demo"}
    assert of_pod(pod) == Place(1, 0, "demo-slice-1-0.demo")
    assert of_slurm_task({"SLURM_PROCID": "3", "SLURMD_NODENAME": "n3"}, SPEC) == Place(1, 1, "n3")
    with pytest.raises(UserError, match="SLURM_PROCID is ''"):
        of_slurm_task({}, SPEC)


def test_a_place_that_the_job_does_not_have_is_refused():
    Place(1, 1, "").check(SPEC)
    for place in (Place(2, 0, ""), Place(0, 2, "")):
        with pytest.raises(UserError, match="submitted for 2 slices of 2 hosts"):
            place.check(SPEC)
