"""Requests that the API would refuse are refused here, in a sentence, before anything is sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.errors import UserError
from slicewise.launch.queued_resources import Request, owner
from slicewise.launch.queued_resources.request import RUNTIME_VERSIONS, check_id, check_same_type, to_message
from slicewise.launch.queued_resources.ssh import check_copy, choose, ssh_command
from slicewise.launch.workers import Worker

PARENT = "projects/p/locations/z"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "Bad"}, "name 'Bad': expected lower-case"),
        ({"name": "../etc"}, "name '../etc'"),
        ({"node_count": 257}, "--node-count 257: a queued resource holds 1 to 256 slices"),
        ({"node_count": 0}, "--node-count 0"),
        ({"node_prefix": "x" * 62, "node_count": 11}, "--node-prefix"),
        ({"node_prefix": "a/b"}, "--node-prefix"),
        ({"accelerator_type": "v5litepod-17"}, "nearest that can be had"),
        ({"accelerator_type": "h100-8"}, "queued resources hold TPUs only"),
        ({"accelerator_type": "nonsense"}, "is not a slice"),
        ({"reservation": "r"}, "--reservation r needs --reserved"),
        ({"tags": ("Bad Tag",)}, "--tag 'Bad Tag'"),
        ({"labels": {"Team": "x"}}, "--label Team=x"),
        ({"labels": {"team": "X y"}}, "--label team=X y"),
        ({"service_account": "nobody"}, "--service-account 'nobody'"),
        ({"valid_until_s": 0}, "--valid-until 0 s"),
        ({"startup_script": "x" * (1 << 18) + "x"}, "startup-script has 262,145 bytes"),
    ],
)
def test_bad_requests(fields, said):
    with pytest.raises(UserError) as error:
        Request(**{"name": "q", "accelerator_type": "v5litepod-16", **fields})
    assert said in str(error.value)


def test_mixed_accelerator_types_are_refused_and_two_names_of_one_are_not():
    with pytest.raises(UserError, match="v5litepod-16 and v5litepod-32 were asked for"):
        check_same_type(["v5litepod-16", "v5litepod-32"])
    assert check_same_type(["v5litepod-16", "v5e-16"]) == "v5litepod-16"


@pytest.mark.parametrize(
    "kind", ["v4-8", "v5litepod-4", "v5p-8", "v6e-8"]
)  # of the generations that queued resources serve
def test_every_generation_has_a_runtime_of_its_own(kind):
    request = Request("q", kind)
    assert request.runtime == RUNTIME_VERSIONS[request.slice.chip.type_prefix]
    assert to_message(request, PARENT).tpu.node_spec[0].node.runtime_version == request.runtime


def test_on_demand_names_no_tier_and_one_slice_names_its_node():
    message = to_message(Request("q", "v5litepod-4"), PARENT)
    assert not {"spot", "guaranteed", "best_effort"} & {
        f for f in ("spot", "guaranteed", "best_effort") if f in message
    }
    assert message.tpu.node_spec[0].node_id == "q"


def test_an_unknown_tier_is_refused():
    with pytest.raises(UserError, match="no tier 'spto'. Did you mean 'spot'"):
        to_message(Request("q", "v5litepod-4", tier="spto"), PARENT)


@given(st.text("ab0-./%A", max_size=70) | st.text(max_size=9))
def test_ids_never_lead_to_another_path(text):
    try:
        check_id(text, "name")
    except UserError:
        return
    assert "/" not in text
    assert "." not in text
    assert "%" not in text
    assert 1 <= len(text) <= 63
    assert text == text.lower()


@given(st.text(min_size=1, max_size=100))
def test_any_user_name_makes_a_label(name):
    Request("q", "v5litepod-4", labels={"owner": owner(name)})


def workers(slices=2, hosts=3):
    return [Worker(s, w, "h", 22, "me", None, None) for s in range(slices) for w in range(hosts)]


def test_workers_are_chosen_by_slice_and_index():
    def places(slice_, worker):
        return [(w.slice_index, w.worker_index) for w in choose(workers(), slice_, worker)]

    assert places("0", "0") == [(0, 0)]
    assert places("all", "2") == [(0, 2), (1, 2)]
    assert places("1", "all") == [(1, 0), (1, 1), (1, 2)]
    for slice_, worker, said in (
        ("2", "0", "--slice 2: expected 0 to 1"),
        ("0", "x", "--worker x: expected 0 to 2"),
    ):
        with pytest.raises(UserError, match=said):
            choose(workers(), slice_, worker)


def test_host_keys_are_checked_and_a_command_is_one_word(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    known = Worker(0, 0, "h", 2222, "me", "/e/key", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIabc")
    words = ssh_command(known, "echo 'a b'", batch=True)
    assert words[-1] == "echo 'a b'"
    assert {"StrictHostKeyChecking=yes", "BatchMode=yes", "IdentitiesOnly=yes"} <= set(words)
    assert "UserKnownHostsFile=/e/known_hosts" in words
    words = ssh_command(workers()[0], None, batch=False)
    assert {"StrictHostKeyChecking=accept-new", f"UserKnownHostsFile={tmp_path}/slicewise/known_hosts"} <= {
        *words
    }


@pytest.mark.parametrize(("sources", "target"), [(["a"], "b"), ([":a"], ":b"), (["a", ":b"], ":c")])
def test_scp_goes_one_way_between_here_and_there(sources, target):
    with pytest.raises(UserError, match="write the paths there as :PATH"):
        check_copy(sources, target, recursive=False)
