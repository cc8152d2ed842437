"""One emulator for all tests of this folder, in a process of its own, with the unmodified clients of its API."""

import itertools
import time
from types import SimpleNamespace

import grpc
import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import tpu_v2, tpu_v2alpha1
from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport as GrpcV2
from google.cloud.tpu_v2.services.tpu.transports import TpuRestTransport
from google.cloud.tpu_v2alpha1.services.tpu.transports import TpuGrpcTransport as GrpcV2Alpha1

from slicewise.launch.emulator import local

PARENT = "projects/emulated/locations/local-a"
OPTIONS = ["--step", "0.01", "--capacity", "v6e=16", "--quota", "v5p=16", "--reservation", "mine"]
_numbers = itertools.count()


@pytest.fixture(scope="session")
def cloud(tmp_path_factory):
    """Its state: v6e has 16 chips, v5p a quota of 16, everything else no limit."""
    directory = tmp_path_factory.mktemp("emulator") / "state"
    with local.started(directory, OPTIONS) as state:
        yield SimpleNamespace(state=state, directory=directory)


@pytest.fixture(scope="session")
def clients(cloud):
    """The three kinds of client of google-cloud-tpu, by name."""
    host = cloud.state.rest
    rest = TpuRestTransport(host=host, url_scheme="http", credentials=AnonymousCredentials())
    with (
        grpc.insecure_channel(cloud.state.grpc) as one,
        grpc.insecure_channel(cloud.state.grpc) as two,
    ):
        yield {
            "v2 gRPC": Client(tpu_v2, tpu_v2.TpuClient(transport=GrpcV2(channel=one))),
            "v2alpha1 gRPC": Client(
                tpu_v2alpha1, tpu_v2alpha1.TpuClient(transport=GrpcV2Alpha1(channel=two))
            ),
            "v2 REST": Client(tpu_v2, tpu_v2.TpuClient(transport=rest)),
        }


class Client:
    """A client of google-cloud-tpu with what tests need of it most."""

    def __init__(self, types, api):
        self.types, self.api = types, api

    def request(self, count=1, kind="v5litepod-4", node_id=None, tier="spot", **node):
        t = self.types
        made = t.Node(accelerator_type=kind, runtime_version="v2-alpha-tpuv5-lite", **node)
        spec = t.QueuedResource.Tpu.NodeSpec(parent=PARENT, node=made)
        if count > 1 and t is tpu_v2:
            spec.multislice_params = spec.MultisliceParams(node_count=count)
        elif count > 1:
            spec.multi_node_params = spec.MultiNodeParams(node_count=count)
        else:
            spec.node_id = node_id or f"n{next(_numbers)}"
        qr = t.QueuedResource(tpu=t.QueuedResource.Tpu(node_spec=[spec]))
        if tier == "spot":
            qr.spot = t.QueuedResource.Spot()
        return qr

    def create(self, qr, name=None):
        """(operation, the full name)."""
        name = name or f"q{next(_numbers)}"
        operation = self.api.create_queued_resource(
            parent=PARENT, queued_resource_id=name, queued_resource=qr
        )
        return operation, f"{PARENT}/queuedResources/{name}"

    def state(self, name) -> str:
        return self.api.get_queued_resource(name=name).state.state.name

    def wait(self, name, state="ACTIVE", timeout_s=60):
        until(lambda: self.state(name) == state, timeout_s, lambda: self.state(name))

    def active(self, *arguments, **fields) -> str:
        _, name = self.create(self.request(*arguments, **fields))
        self.wait(name)
        return name

    def nodes(self, name):
        found = [n for n in self.api.list_nodes(parent=PARENT) if n.queued_resource == name]
        return sorted(found, key=lambda node: int(node.name.rsplit("-", 1)[-1]) if len(found) > 1 else 0)

    def delete(self, name):
        return self.api.delete_queued_resource(request={"name": name, "force": True})


def until(condition, timeout_s=60.0, otherwise=lambda: ""):
    """Returns once it holds; fails with what ``otherwise`` says."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, otherwise()
        time.sleep(0.02)


@pytest.fixture(name="until", scope="session")
def _until():
    return until


@pytest.fixture(params=["v2 gRPC", "v2alpha1 gRPC", "v2 REST"])
def client(request, clients):
    return clients[request.param]


@pytest.fixture(scope="session")
def alpha(clients):
    return clients["v2alpha1 gRPC"]
