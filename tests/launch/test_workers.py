import getpass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.errors import UserError
from slicewise.launch.workers import MAX_SLICES, Worker, check_shape, read_inventory, workers_of


def inventory(tmp_path, text):
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    return path


def test_hosts_are_numbered_in_the_order_of_the_file(tmp_path):
    path = inventory(tmp_path, '[[slices]]\nhosts = ["a", "b:2222"]\n[[slices]]\nhosts = ["c", "[::1]:7"]\n')
    workers = workers_of(str(path))
    assert [(w.slice_index, w.worker_index, w.host, w.port) for w in workers] == [
        (0, 0, "a", 22), (0, 1, "b", 2222), (1, 0, "c", 22), (1, 1, "::1", 7),
    ]  # fmt: skip
    assert {w.user for w in workers} == {getpass.getuser()}
    assert workers[3].name == "slice 1 worker 1"


def test_a_host_may_differ_from_the_defaults_of_the_file(tmp_path):
    path = inventory(
        tmp_path,
        'user = "u"\nport = 5\nidentity_file = "~/key"\n[[slices]]\n'
        'hosts = ["a", {host = "b", user = "v", port = 6, identity_file = "/k", address = "10.1.1.1", '
        'host_key = "ssh-ed25519 AAAA"}]\n',
    )
    first, second = read_inventory(path)
    assert first.identity_file is not None
    assert first.identity_file.endswith("/key")
    assert "~" not in first.identity_file
    assert first.internal_address == "a"
    assert second == Worker(0, 1, "b", 6, "v", "/k", "ssh-ed25519 AAAA", "10.1.1.1")
    assert second.internal_address == "10.1.1.1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "slices is missing"),
        ("slices = []", "slices"),
        ("[[slices]]\nhosts = []", "hosts"),
        ("[[slices]]\nhost = ['a']", "unknown key slices.0.host. Did you mean 'hosts'"),
        ("usr = 'a'\n[[slices]]\nhosts = ['a']", "Did you mean 'user'"),
        ("[[slices]]\nhosts = ['-oProxyCommand=x']", "-oProxyCommand=x"),
        ("[[slices]]\nhosts = ['a b']", "a b"),
        ("[[slices]]\nhosts = ['a:70000']", "70000"),
        ("[[slices]]\nhosts = [3]", "slices.0.hosts.0"),
        ("[[slices]]\nhosts = ['a', 'b']\n[[slices]]\nhosts = ['c']", r"slice 1 has workers \[0\], expected 0 to 1"),
        ("[[slices]\n", "not valid TOML"),
        ("[[slices]]\nhosts = ['a']\n" * (MAX_SLICES + 1), "at most 256"),
    ],
)  # fmt: skip
def test_a_wrong_inventory_says_where_and_what(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        workers_of(str(inventory(tmp_path, text)))


@pytest.mark.parametrize(
    ("target", "message"),
    [("none.toml", "no inventory file"), ("emulater:x", "Did you mean 'emulator'"), ("qr:", "has no name")],
)
def test_an_unknown_target_names_what_there_is(target, message):
    with pytest.raises(UserError, match=message):
        workers_of(target)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=12))
def test_only_gapless_equal_slices_are_taken(places):
    workers = [Worker(s, w, "h", 22, "u", None, None) for s, w in places]
    slices, per_slice = {s for s, _ in places}, {w for _, w in places}
    full = {(s, w) for s in range(len(slices)) for w in range(len(per_slice))}
    good = bool(places) and len(places) == len(full) and set(places) == full
    try:
        check_shape(workers, "target")
    except UserError:
        assert not good
    else:
        assert good
