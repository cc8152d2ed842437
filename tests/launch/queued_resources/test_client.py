"""The client against the emulator: life of a queued resource, waiting, reasons, retries, exit codes, gc."""

import contextlib
import getpass
import socket
import threading
import time

import pytest

from slicewise.errors import ExitCode, UserError
from slicewise.launch import queued_resources as qr
from slicewise.launch.queued_resources import api_errors
from slicewise.launch.queued_resources.describe import as_json, details, summary
from slicewise.launch.queued_resources.wait import Progress, seconds


def test_a_request_reaches_the_api_as_it_was_meant(client, make):
    name = make(
        "v5litepod-16",
        2,
        active=False,
        node_prefix="pre",
        tier="spot",
        runtime_version="my-runtime",
        network="net",
        subnetwork="sub",
        tags=("a", "b"),
        labels={"team": "x"},
        service_account="me@p.iam.gserviceaccount.com",
        startup_script="true",
        valid_until_s=3600,
        autocheckpoint=True,
    )
    found = qr.get(client, name)
    # gcloud sends provisioningModel STANDARD for --spot
    assert ("spot" in found, "guaranteed" in found) == (True, False)
    assert [spec.node_id for spec in found.tpu.node_spec] == ["pre-0", "pre-1"]
    node = found.tpu.node_spec[0].node
    assert (node.accelerator_type, node.runtime_version) == ("v5litepod-16", "my-runtime")
    assert (node.network_config.network, node.network_config.subnetwork) == ("net", "sub")
    assert list(node.tags) == ["a", "b"]
    assert dict(node.labels) == {"team": "x", qr.OWNER_LABEL: qr.owner()}
    assert node.service_account.email == "me@p.iam.gserviceaccount.com"
    assert dict(node.metadata) == {"startup-script": "true"}
    assert node.autocheckpoint_enabled
    assert found.queueing_policy.valid_until_duration.total_seconds() == 3600
    row = summary(found)
    assert (row.slices, row.tier, row.owner) == (2, "spot", qr.owner())
    assert as_json(found)["name"] == found.name


@pytest.mark.parametrize(("tier", "field"), [("best-effort", "best_effort"), ("reserved", "guaranteed")])
def test_other_tiers(client, make, tier, field):
    found = qr.get(client, make(active=False, tier=tier))
    assert field in found
    assert summary(found).tier == tier


def test_a_reservation_lies_in_the_zone_of_the_request(client, make):
    found = qr.get(client, make(active=False, tier="reserved", reservation="mine"))
    # gcloud sends locations/None when the zone comes from its config
    assert found.reservation_name == f"{client.target.parent}/reservations/mine"
    whole = "projects/other/locations/z/reservations/r"
    assert qr.get(client, make(active=False, tier="reserved", reservation=whole)).reservation_name == whole


def test_another_topology_of_a_size_is_asked_for_by_its_topology(client, make):
    name = make("v5p:2x2x2", active=False)
    assert qr.get(client, name).tpu.node_spec[0].node.accelerator_type == "v5p-16"
    message = qr.request.to_message(qr.Request("x", "v5p:4x4x16"), "projects/p/locations/z")
    assert message.tpu.node_spec[0].node.accelerator_config.topology == "4x4x16"


def test_waiting_reports_every_state_and_how_long(client, make):
    seen: list[Progress] = []
    qr.wait(client, name := make(active=False), timeout_s=60, report=seen.append)
    assert seen[-1].state == "ACTIVE"
    assert str(seen[-1]).startswith(f"{name}: ACTIVE for 0 s, waiting for ")
    assert [p.elapsed_s for p in seen] == sorted(p.elapsed_s for p in seen)
    assert [seconds(s) for s in (4.9, 185, 3723)] == ["4 s", "3 min 05 s", "1 h 02 min"]


def test_waiting_in_vain_ends_with_its_own_code_and_says_what_stays(client, make):
    name = make("v6e-32", active=False)
    with pytest.raises(UserError, match=rf"{name} is still \w+ after .*delete {name} --force") as late:
        qr.wait(client, name, timeout_s=0.3)
    assert late.value.code == ExitCode.TIMEOUT


def test_a_failure_shows_the_reason_of_the_api(client, make):
    name = make(active=False, tier="reserved", reservation="other")
    with pytest.raises(UserError, match=r"FAILED: Reservation '.*/other' not found") as failed:
        qr.wait(client, name, timeout_s=60)
    assert failed.value.code == ExitCode.NO_SLICES
    assert f"slicewise qr delete {name}" in str(failed.value)
    assert "reason: Reservation" in "\n".join(details(qr.get(client, name), []))


def test_a_suspension_says_by_whom_and_that_it_is_final(client, make, control):
    name = make(tier="spot")
    control("inject", fault="preempt", node=name)
    with pytest.raises(UserError, match="by the service: its slices were preempted") as lost:
        qr.wait(client, name, until="DELETING", timeout_s=60)
    assert lost.value.code == ExitCode.NO_SLICES
    other = make(count=2)
    qr.delete_node(client, f"{other}-1")
    with pytest.raises(UserError, match="SUSPEND.* by a user: a slice of it was stopped or deleted"):
        qr.workers_of_client(client, other)


def test_workers_of_one_that_is_not_there_yet_say_what_to_do(client, make):
    with pytest.raises(UserError, match="0 of 1 slices are READY: wait with 'slicewise qr wait"):
        qr.workers_of_client(client, make("v6e-32", active=False))


def test_workers_are_in_the_order_of_slices_and_hosts_beyond_ten(client, make):
    workers = qr.workers_of_client(client, make("v5litepod-16", 11))
    assert [(w.slice_index, w.worker_index) for w in workers] == [(s, w) for s in range(11) for w in range(4)]
    assert len({w.port for w in workers}) == 44
    assert {w.user for w in workers} == {getpass.getuser()}


def test_all_pages_are_read(client, make, monkeypatch):
    names = {make(active=False) for _ in range(3)}
    monkeypatch.setattr(qr.calls, "PAGE_SIZE", 2)
    found = [q.name.rsplit("/", 1)[1] for q in qr.list_all(client)]
    assert names <= set(found)
    assert len(found) == len(set(found))


def test_slices_that_are_being_replaced_are_waited_for(client, make, control):
    name = make("v6e-8", 2)
    seen = []

    def report(progress):
        seen.append(progress.state)
        if "REPAIRING" in progress.state:
            control("capacity", family="v6e", chips=16)

    control("capacity", family="v6e", chips=8)  # no replacement until it has been seen that one is missing
    try:
        control("inject", fault="fail", node=f"{name}-0")
        with pytest.raises(UserError, match=r"1 of 2 slices are READY \(READY,REPAIRING\)"):
            qr.workers_of_client(client, name)
        nodes = qr.wait_until_ready(client, name, timeout_s=60, report=report)
    finally:
        control("capacity", family="v6e", chips=16)
    assert {n.state.name for n in nodes} == {"READY"}
    assert "ACTIVE, 1 of 2 slices REPAIRING" in seen
    assert seen.count("ACTIVE") == 1


def test_slices_that_do_not_come_back_in_time(client, make, control):
    name = make(count=2)
    control("inject", fault="fail", node=f"{name}-0", hold_s=60)
    with pytest.raises(UserError, match=r"ACTIVE but after 0 s 1 of 2 slices REPAIRING") as late:
        qr.wait_until_ready(client, name, timeout_s=0.2)
    assert late.value.code == ExitCode.TIMEOUT


def test_deletion_is_waited_for_and_what_is_gone_is_not_found(client, make):
    name = make()
    qr.delete(client, name, force=True)
    qr.wait_until_gone(client, name, timeout_s=60)
    for call in (qr.get, qr.delete, qr.reset, qr.nodes, qr.wait):
        with pytest.raises(UserError, match="NOT_FOUND.*\n'slicewise qr list'") as missing:
            call(client, name)
        assert missing.value.code == ExitCode.NOT_FOUND


def test_names_that_lead_elsewhere_are_refused_before_the_api_sees_them(client):
    for name in ("../x", "a/b", "", "A", "x" * 64, "a%2fb"):
        with pytest.raises(UserError, match="expected lower-case letters"):
            qr.get(client, name)


# ---------------------------------------------------------------- what the API answers


@pytest.mark.parametrize(
    ("code", "exit_code", "todo"),
    [
        ("PERMISSION_DENIED", ExitCode.DENIED, "roles/tpu.admin"),
        ("UNAUTHENTICATED", ExitCode.DENIED, "gcloud auth"),
        ("NOT_FOUND", ExitCode.NOT_FOUND, "slicewise qr list"),
        ("ALREADY_EXISTS", ExitCode.CONFLICT, "another name"),
        ("ABORTED", ExitCode.CONFLICT, "another name"),
        ("RESOURCE_EXHAUSTED", ExitCode.QUOTA, "slicewise qr gc"),
        ("INTERNAL", ExitCode.UNAVAILABLE, "try again later"),
        ("DEADLINE_EXCEEDED", ExitCode.UNAVAILABLE, "try again later"),
        ("INVALID_ARGUMENT", ExitCode.USER, "Change the request"),
        ("FAILED_PRECONDITION", ExitCode.USER, "slicewise qr describe"),
    ],
)
def test_each_kind_of_error_has_its_code_and_is_not_repeated(client, control, said, code, exit_code, todo):
    control("error", code=code)
    with pytest.raises(UserError, match=f"the TPU API answered {code}: injected") as error:
        qr.list_all(client)
    assert error.value.code == exit_code
    assert todo in str(error.value).split("\n")[1]
    assert said == []
    qr.list_all(client)  # it was one call that failed


def test_an_unavailable_service_is_asked_again_with_growing_delays(client, control, said, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    control("error", code="UNAVAILABLE", times=4)
    qr.list_all(client)
    assert len(slept) == len(said) == 4
    assert all(
        low <= s <= high
        for s, (low, high) in zip(slept, [(0.25, 0.5), (0.5, 1), (1, 2), (2, 4)], strict=True)
    )
    assert "UNAVAILABLE: injected: UNAVAILABLE; trying again in" in said[0]


def test_the_delay_that_an_error_asks_for_is_kept(client, control, said, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    control("error", code="RESOURCE_EXHAUSTED", times=2, retry_s=1.5)
    qr.list_all(client)
    assert slept == [1.5, 1.5]


def test_retries_end_and_a_delay_beyond_the_end_is_not_waited_for(client, control):
    control("error", code="RESOURCE_EXHAUSTED", retry_s=3600)
    with pytest.raises(UserError, match="Too many requests") as error:
        qr.list_all(client)
    assert error.value.code == ExitCode.RATE_LIMITED


def test_a_creation_that_is_repeated_makes_one(client, make, control, said, monkeypatch):
    monkeypatch.setattr(api_errors, "FIRST_DELAY_S", 0.01)
    control("error", code="UNAVAILABLE", times=2)
    name = make()
    assert [q.name.rsplit("/", 1)[1] for q in qr.list_all(client)].count(name) == 1
    assert len(said) == 2


def test_a_quota_that_is_used_up_shows_the_apis_message(client, make):
    with pytest.raises(UserError, match=r"Quota limit 'v5p-chips' has been exceeded. Limit: 16") as error:
        make("v5p-64")
    assert error.value.code == ExitCode.QUOTA


def test_deletion_without_force_is_refused_with_the_apis_reason(client, make):
    with pytest.raises(UserError, match="it can be deleted without force only in") as error:
        qr.delete(client, make())
    assert error.value.code == ExitCode.USER


def test_an_emulator_that_is_gone_is_not_waited_for(said):
    target = qr.Target("p", "z", "me", endpoint="127.0.0.1:1")
    client = qr.connect(target, say=said.append)
    for ask in (lambda: qr.list_all(client), lambda: qr.wait(client, "demo", timeout_s=60)):
        with pytest.raises(qr.EmulatorGone, match=r"127.0.0.1:1 has ended, and its slices with it") as error:
            ask()
        assert error.value.code == ExitCode.UNAVAILABLE
    assert said == []


def test_a_server_that_listens_and_does_not_answer_is_unavailable(said):
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = qr.Target("p", "z", "me", endpoint=f"127.0.0.1:{server.getsockname()[1]}")
        thread = threading.Thread(target=_hang_up, args=(server,), daemon=True)
        thread.start()
        client = qr.connect(target, say=said.append, retry_for_s=0.1)
        with pytest.raises(UserError, match=r"UNAVAILABLE.*\n.*'slicewise emulator status'") as error:
            qr.list_all(client)
        assert error.value.code == ExitCode.UNAVAILABLE


def _hang_up(server):
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].close()


def test_nobody_logged_in_is_told_how_to(monkeypatch, tmp_path):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(UserError, match="gcloud auth application-default login") as error:
        qr.connect(qr.cloud_target("my-project", "us-east5-a"))
    assert error.value.code == ExitCode.DENIED


# ---------------------------------------------------------------- gc


def test_only_dead_ones_with_a_label_of_ours_are_collected(client, make, control):
    suspended, alive = make(tier="spot"), make()
    failed = make(active=False, tier="reserved", reservation="other", labels={qr.OWNER_LABEL: "else"})
    control("inject", fault="preempt", node=suspended)
    for name in (suspended, failed):
        with pytest.raises(UserError):
            qr.wait(client, name, until="DELETING", timeout_s=60)
    message = qr.request.to_message(qr.Request("foreign", "v5litepod-4", tier="reserved", reservation="other"),
                                    client.target.parent)  # fmt: skip
    message.tpu.node_spec[0].node.labels.clear()
    client.api.create_queued_resource(
        parent=client.target.parent, queued_resource_id="foreign", queued_resource=message
    )
    with pytest.raises(UserError):
        qr.wait(client, "foreign", until="DELETING", timeout_s=60)
    found = qr.list_all(client)

    def names(owner):
        return {q.name.rsplit("/", 1)[1] for q in qr.dead(found, owner)}

    assert names(qr.owner()) >= {suspended}
    assert names("else") == {failed}
    assert names(None) >= {suspended, failed}
    assert not names(None) & {alive, "foreign"}
    qr.delete(client, "foreign")


# ---------------------------------------------------------------- targets


def test_the_target_is_the_emulator_unless_google_cloud_is_named(directory, monkeypatch):
    monkeypatch.setenv("SLICEWISE_EMULATOR", str(directory))
    assert qr.find_target(None, None).endpoint
    assert qr.find_target(None, None, str(directory)).endpoint
    cloud = qr.find_target("my-project", "us-east5-a")
    assert (cloud.endpoint, cloud.ssh_port, str(cloud)) == (None, 22, "project my-project, zone us-east5-a")
    monkeypatch.setenv("SLICEWISE_PROJECT", "my-project")
    monkeypatch.setenv("SLICEWISE_ZONE", "us-east5-a")
    assert qr.find_target(None, None) == cloud


@pytest.mark.parametrize(
    ("project", "zone", "emulator", "said"),
    [
        ("my-project", None, None, "--zone or .* is missing"),
        (None, "us-east5-a", None, "--project or .* is missing"),
        ("my-project", "us-east5-a", "x", "choose one"),
        ("My Project", "us-east5-a", None, "no project id"),
        ("my-project", "../x", None, "no zone"),
        (None, None, "/nowhere/at/all", "no emulator is running"),
    ],
)
def test_targets_that_cannot_be(project, zone, emulator, said):
    with pytest.raises(UserError, match=said):
        qr.find_target(project, zone, emulator)
