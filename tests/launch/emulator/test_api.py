"""The unmodified clients of google-cloud-tpu, over gRPC and REST, against the emulator; and what gcloud sends."""

import asyncio
import json
import os
import socket
import subprocess
import urllib.error
import urllib.request

import grpc
import pytest
from google.api_core import exceptions
from google.cloud import tpu_v2, tpu_v2alpha1

from slicewise.launch.emulator import local, peers

PARENT = "projects/emulated/locations/local-a"


def test_a_request_becomes_active_and_is_deleted_again(client):
    operation, name = client.create(client.request(2, labels={"team": "x"}))
    assert operation.result(timeout=60).name == name
    assert operation.metadata.verb == "create"
    client.wait(name)
    qr = client.api.get_queued_resource(name=name)
    assert qr.state.state_initiator.name == "SERVICE"
    assert "spot" in qr
    ids = [spec.node_id for spec in qr.tpu.node_spec]
    assert ids == [
        f"{name.rsplit('/', 1)[1]}-{i}" for i in range(2)
    ]  # gcloud counts and finds nodes by these
    assert dict(qr.tpu.node_spec[1].node.labels) == {"team": "x"}
    nodes = client.nodes(name)
    assert [n.name.rsplit("/", 1)[1] for n in nodes] == ids
    assert {n.state.name for n in nodes} == {"READY"}
    assert all(n.multislice_node and n.network_endpoints[0].port for n in nodes)
    assert name in [q.name for q in client.api.list_queued_resources(parent=PARENT)]
    client.api.reset_queued_resource(name=name).result(timeout=60)
    # v2 answers a deletion with Empty and v2alpha1 with the resource; the wrong one is a TypeError here
    gone = client.delete(name).result(timeout=60)
    assert type(gone).__name__ == ("QueuedResource" if client.types is tpu_v2alpha1 else "Empty")
    with pytest.raises(exceptions.NotFound):
        client.api.get_queued_resource(name=name)


def test_the_asynchronous_client_works_too(cloud):
    from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcAsyncIOTransport

    async def listed():
        async with grpc.aio.insecure_channel(cloud.state.grpc) as channel:
            client = tpu_v2.TpuAsyncClient(transport=TpuGrpcAsyncIOTransport(channel=channel))
            return [qr async for qr in await client.list_queued_resources(parent=PARENT)]

    assert isinstance(asyncio.run(listed()), list)


def test_one_that_was_made_by_a_version_is_read_by_the_others(clients):
    alpha = clients["v2alpha1 gRPC"]
    qr = alpha.request()
    qr.best_effort = tpu_v2alpha1.QueuedResource.BestEffort()
    _, name = alpha.create(qr)
    for client in clients.values():
        found = client.api.get_queued_resource(name=name)
        assert found.tpu.node_spec[0].node.accelerator_type == "v5litepod-4"
    assert "best_effort" in alpha.api.get_queued_resource(name=name)
    alpha.delete(name)


def test_pages_have_the_size_that_is_asked_for(client):
    names = [client.create(client.request())[1] for _ in range(3)]
    listed = client.api.list_queued_resources(request={"parent": PARENT, "page_size": 2})
    pages = [[qr.name for qr in page.queued_resources] for page in listed.pages]
    assert {len(page) for page in pages[:-1]} == {2}
    assert {*names} <= {name for page in pages for name in page}
    with pytest.raises(exceptions.BadRequest, match="page_token"):
        client.api.list_queued_resources(request={"parent": PARENT, "page_token": "../x"})
    for name in names:
        client.delete(name)


def no_runtime(client):
    qr = client.request()
    qr.tpu.node_spec[0].node.runtime_version = ""
    return qr


def both_names(client):
    qr = client.request()
    qr.tpu.node_spec[0].node_id = ""
    return qr


def mixed(client):
    qr = client.request()
    qr.tpu.node_spec.append(client.request(kind="v5litepod-8").tpu.node_spec[0])
    return qr


def twice(client):
    qr = client.request(node_id="same")
    qr.tpu.node_spec.append(client.request(node_id="same").tpu.node_spec[0])
    return qr


def foreign_parent(client):
    qr = client.request()
    qr.tpu.node_spec[0].parent = "projects/other/locations/local-a"
    return qr


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda c: c.request(257), "node_count is 257: it must be 2 to 256"),
        (lambda c: c.request(kind="v5litepod-5"), "nearest that can be had"),
        (lambda c: c.request(kind="h100-8"), "no accelerator type of Cloud TPU"),
        (lambda c: c.request(kind=""), "accelerator_type or node.accelerator_config must be set"),
        (lambda c: c.request(node_id="Bad_Id"), "node_id 'Bad_Id' is invalid"),
        (lambda c: c.request(node_id="../../etc"), "is invalid"),
        (lambda c: c.types.QueuedResource(), "at least one node"),
        (no_runtime, "runtime_version must be set"),
        (both_names, "needs exactly one of node_id"),
        (mixed, "same accelerator type"),
        (twice, "the same node_id"),
        (foreign_parent, "node_spec.parent is 'projects/other"),
    ],
)
def test_what_cannot_be_is_an_invalid_argument(client, make, said):
    with pytest.raises(exceptions.BadRequest, match=said):
        client.create(make(client))


@pytest.mark.parametrize("name", ["Upper", "-x", "x" * 64, "a..b", "a%2fb", "x-"])
def test_names_that_cannot_be_are_refused(alpha, name):
    with pytest.raises(exceptions.InvalidArgument, match="queued_resource_id"):
        alpha.create(alpha.request(), name)


@pytest.mark.parametrize(
    "parent", ["projects/p", "projects/../locations/z", "projects/p/locations/z/nodes/n", ""]
)
def test_parents_that_cannot_be_are_refused(alpha, parent):
    with pytest.raises(exceptions.InvalidArgument, match="parent"):
        alpha.api.list_queued_resources(parent=parent)


def test_conflict_quota_and_precondition_have_their_own_codes(client):
    name = client.active()
    with pytest.raises(exceptions.Conflict, match="already exists"):
        client.create(client.request(), name.rsplit("/", 1)[1])
    with pytest.raises(exceptions.TooManyRequests, match="Quota limit 'v5p-chips'"):
        client.create(client.request(5, kind="v5p-8"))
    with pytest.raises(exceptions.BadRequest, match="without force"):  # FAILED_PRECONDITION
        client.api.delete_queued_resource(name=name)
    client.delete(name)


def test_the_reason_of_a_failure_is_in_failed_data(client):
    qr = client.request(kind="v6e-8")
    qr.reservation_name = f"{PARENT}/reservations/other"
    _, name = client.create(qr)
    client.wait(name, "FAILED")
    error = client.api.get_queued_resource(name=name).state.failed_data.error
    assert (error.code, "reservations/other' not found" in error.message) == (5, True)
    client.api.delete_queued_resource(name=name).result(timeout=60)  # needs no force


def test_a_gang_larger_than_the_capacity_waits_whole(client):
    _, name = client.create(client.request(3, kind="v6e-8"))
    client.wait(name, "WAITING_FOR_RESOURCES")
    assert client.nodes(name) == []
    client.delete(name).result(timeout=60)


def test_guest_attributes_hold_the_host_key_of_every_worker(client, cloud):
    name = client.active(kind="v5litepod-16")
    node = client.nodes(name)[0].name
    get = client.api.get_guest_attributes
    found = get(request={"name": node, "query_path": "hostkeys/"}).guest_attributes
    assert len(found) == 4
    keys = [{e.key: e.value for e in worker.query_value.items} for worker in found]
    assert all(f"ssh-ed25519 {k['ssh-ed25519']}" == cloud.state.host_key for k in keys)
    assert [k["hostname"] for k in keys] == [f"{node.rsplit('/', 1)[1]}-w-{i}" for i in range(4)]
    assert len(get(request={"name": node, "worker_ids": ["2"]}).guest_attributes) == 1
    with pytest.raises(exceptions.BadRequest, match="no 7"):
        get(request={"name": node, "worker_ids": ["7"]})
    client.delete(name)


def test_topology_can_be_asked_for_instead_of_a_type(alpha):
    config = tpu_v2alpha1.AcceleratorConfig(type_=tpu_v2alpha1.AcceleratorConfig.Type.V5P, topology="2x2x2")
    name = alpha.active(kind="", accelerator_config=config)
    node = alpha.nodes(name)[0]
    assert (node.accelerator_type, node.accelerator_config.topology) == ("v5p-16", "2x2x2")
    alpha.delete(name)


def test_maintenance_is_announced_to_those_who_look(alpha, cloud):
    name = alpha.active(2)
    node = alpha.nodes(name)[0].name
    local.control(cloud.state, "inject", fault="maintain", node=node, after_s=60)
    found = alpha.api.get_node(name=node)
    assert found.health.name == "UNHEALTHY_MAINTENANCE"
    assert found.upcoming_maintenance.maintenance_status.name == "PENDING"
    assert found.upcoming_maintenance.window_start_time
    alpha.delete(name)


def test_maintenance_can_be_simulated_through_the_api(alpha, cloud, until):
    name = alpha.active(2)
    node = alpha.nodes(name)[0]
    alpha.api.simulate_maintenance_event(request={"name": node.name})
    until(lambda: {n.state.name for n in alpha.nodes(name)} == {"READY"})
    assert alpha.nodes(name)[0].network_endpoints != node.network_endpoints  # it was replaced
    status, operation = http(cloud, "POST", f"/v2alpha1/{node.name}:simulateMaintenanceEvent", {})
    assert (status, operation["metadata"]["verb"]) == (200, "simulateMaintenanceEvent")
    assert http(cloud, "POST", f"/v2/{node.name}:simulateMaintenanceEvent", {})[0] == 501
    alpha.delete(name)


def test_deletion_of_a_node_and_methods_that_the_emulator_lacks(client):
    name = client.active(2)
    client.api.delete_node(name=client.nodes(name)[0].name).result(timeout=60)
    client.wait(name, "SUSPENDED")
    client.api.delete_queued_resource(name=name).result(timeout=60)
    with pytest.raises(exceptions.MethodNotImplemented):
        client.api.list_accelerator_types(parent=PARENT)


def test_256_slices_are_created_and_listed_in_under_a_second(alpha):
    import time

    took = []
    for _ in range(2):  # the first call of a process opens the connection
        start_s = time.monotonic()
        _, name = alpha.create(alpha.request(256))
        qr = next(q for q in alpha.api.list_queued_resources(parent=PARENT) if q.name == name)
        took.append(time.monotonic() - start_s)
        assert len(qr.tpu.node_spec) == 256
        alpha.wait(name)
        assert len(alpha.nodes(name)) == 256
        alpha.delete(name).result(timeout=60)
    assert min(took) < 1


# ---------------------------------------------------------------- REST, as others than google-cloud-tpu speak it


def http(cloud, method, path, body=None, **headers):
    """(status, JSON) of a request."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{cloud.state.rest}{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


GCLOUD_BODY = {  # as gcloud alpha sends it: with fields that no client library knows
    "spot": {},
    "tpu": {
        "nodeSpec": [
            {
                "parent": PARENT,
                "multiNodeParams": {
                    "nodeCount": 2,
                    "nodeIdPrefix": "pre",
                    "workloadType": "THROUGHPUT_OPTIMIZED",
                },
                "node": {
                    "acceleratorType": "v5litepod-4",
                    "runtimeVersion": "v2-alpha-tpuv5-lite",
                    "networkConfig": {"enableExternalIps": True},
                    "metadata": {"startup-script": "true"},
                },
            }
        ]
    },
    "provisioningModel": "SPOT",
    "runDuration": "3600s",
}


def test_unknown_fields_are_tolerated_and_force_may_be_spelled_as_in_python(cloud, until):
    base = f"/v2alpha1/{PARENT}"
    status, operation = http(cloud, "POST", f"{base}/queuedResources?queuedResourceId=g", GCLOUD_BODY)
    assert (status, operation["metadata"]["verb"]) == (200, "create")
    assert operation["metadata"]["@type"].endswith("tpu.v2alpha1.OperationMetadata")
    until(lambda: http(cloud, "GET", f"{base}/queuedResources/g")[1]["state"]["state"] == "ACTIVE")
    _, qr = http(cloud, "GET", f"{base}/queuedResources/g")
    assert [spec["nodeId"] for spec in qr["tpu"]["nodeSpec"]] == ["pre-0", "pre-1"]
    _, listed = http(cloud, "GET", f"{base}/operations")
    assert operation["name"] in [o["name"] for o in listed["operations"]]
    assert http(cloud, "GET", f"/v2alpha1/{operation['name']}")[1]["done"] is True
    _, node = http(
        cloud, "PATCH", f"{base}/nodes/pre-0?updateMask=metadata", {"metadata": {"ssh-keys": "me:x"}}
    )
    assert node["done"] is True
    assert http(cloud, "GET", f"{base}/nodes/pre-0")[1]["metadata"] == {"ssh-keys": "me:x"}
    assert http(cloud, "PATCH", f"{base}/nodes/pre-0?updateMask=tags", {"tags": []})[0] == 501
    assert http(cloud, "DELETE", f"{base}/queuedResources/g")[0] == 400
    status, operation = http(cloud, "DELETE", f"{base}/queuedResources/g?force=True")
    until(lambda: http(cloud, "GET", f"/v2alpha1/{operation['name']}")[1].get("done"))
    _, operation = http(cloud, "GET", f"/v2alpha1/{operation['name']}")
    assert operation["response"]["@type"].endswith("tpu.v2alpha1.QueuedResource")


def test_enums_come_as_numbers_for_those_who_ask(cloud, alpha):
    name = alpha.active()
    path = f"/v2/{name}?%24alt=json;enum-encoding=int"
    assert http(cloud, "GET", path)[1]["state"]["state"] == 6
    assert http(cloud, "GET", f"/v2/{name}")[1]["state"]["state"] == "ACTIVE"
    alpha.delete(name)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v2/projects/p/locations/z/queuedResources/none", None, 404),
        ("GET", "/v3/projects/p/locations/z/queuedResources", None, 404),
        ("GET", "/v2/projects/p/locations/z/operations/none", None, 404),
        ("GET", "/v2/projects/p%2F..%2Fx/locations/z/queuedResources", None, 400),
        ("POST", "/v2/projects/p/locations/z/queuedResources?queuedResourceId=..%2F..%2Fx", {}, 400),
        ("POST", "/v2/projects/p/locations/z/queuedResources?queuedResourceId=x", b"{", 400),
        ("POST", "/v2/projects/p/locations/z/queuedResources?queuedResourceId=x", b"[1]", 400),
        ("POST", "/v2/projects/p/locations/z/queuedResources?queuedResourceId=x", {"tpu": 3}, 400),
        ("PUT", "/v2/projects/p/locations/z/queuedResources/x", {}, 501),
        ("POST", "/v2/projects/p/locations/z/queuedResources/x:explode", {}, 501),
    ],
)
def test_bad_requests_get_the_errors_of_googles_apis(cloud, method, path, body, status):
    got, answer = http(cloud, method, path, body)
    assert got == status, answer
    assert answer["error"]["code"] == status
    assert {"message", "status"} <= answer["error"].keys()


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Origin": "http://127.0.0.1"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_other_hosts_and_web_pages_are_refused(cloud, headers):
    status, answer = http(cloud, "GET", f"/v2/{PARENT}/queuedResources", **headers)
    assert (status, answer["error"]["status"]) == (403, "PERMISSION_DENIED")


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_of_the_machine_may_look_but_not_touch(cloud):
    def asked(method, path):
        """The status line that a program of user 65534 gets."""
        host, port = cloud.state.rest.split(":")
        said = f"{method} {path} HTTP/1.0\r\nHost: {host}\r\n\r\n"
        script = f"exec 3<>/dev/tcp/{host}/{port}; printf %s '{said}' >&3; head -1 <&3"
        return subprocess.run(
            ["bash", "-c", script], user=65534, capture_output=True, text=True, timeout=20
        ).stdout

    assert " 200 " in asked("GET", f"/v2/{PARENT}/queuedResources")
    assert " 403 " in asked("POST", f"/v2/{PARENT}/queuedResources?queuedResourceId=x")
    assert " 403 " in asked("DELETE", f"/v2/{PARENT}/queuedResources/x")


def test_the_owner_of_a_connection_is_found():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        assert peers.owner(client.getsockname()[1], server.getsockname()[1]) == os.geteuid()
        assert peers.owner(server.getsockname()[1], 1) is None


def test_controls_need_the_token_of_the_private_state_file(cloud):
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert http(cloud, "POST", "/emulator/stop", {}, **headers)[0] == 401
    for name in ("emulator.json", "id_ed25519", "lock", "emulator.log"):
        assert (cloud.directory / name).stat().st_mode & 0o077 == 0
    assert cloud.directory.stat().st_mode & 0o077 == 0


def test_it_listens_on_loopback_only(cloud, alpha):
    import pathlib

    name = alpha.active()
    inodes = set()
    for fd in pathlib.Path(f"/proc/{cloud.state.pid}/fd").iterdir():
        link = str(fd.readlink())
        if link.startswith("socket:["):
            inodes.add(link[8:-1])
    listening = []
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                listening.append(fields[1].split(":")[0])
    assert len(listening) >= 4
    mapped = "0000000000000000FFFF00000100007F"  # the same, as a socket of IPv6 has it
    assert set(listening) <= {"0100007F", mapped}  # 127.0.0.1
    alpha.delete(name)
