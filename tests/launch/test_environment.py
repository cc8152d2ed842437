import socket

from slicewise.launch.environment import JAX_PORT, coordinator_port, place_environment
from slicewise.launch.job_folder import JobSpec
from slicewise.launch.place import Place
from slicewise.launch.worker import gang_environment
from slicewise.launch.workers import Worker


def workers(slices, per_slice, host="10.0.{s}.{w}"):
    return [
        Worker(s, w, host.format(s=s, w=w), 22, "u", None, None)
        for s in reversed(range(slices))
        for w in range(per_slice)
    ]


def test_processes_are_numbered_slice_by_slice_whatever_the_order():
    them = workers(3, 2)
    places = {(w.slice_index, w.worker_index): place_environment(them, w, 5) for w in them}
    assert [places[s, w]["SLICEWISE_PROCESS_ID"] for s in range(3) for w in range(2)] == list("012345")
    last = places[2, 1]
    assert last["MEGASCALE_COORDINATOR_ADDRESS"] == "10.0.0.0"
    assert last["MEGASCALE_SLICE_ID"] == "2"
    assert last["MEGASCALE_NUM_SLICES"] == "3"
    assert last["TPU_WORKER_HOSTNAMES"] == "10.0.2.0,10.0.2.1"
    assert last["TPU_WORKER_ID"] == "1"
    assert last["SLICEWISE_COORDINATOR"] == "10.0.0.0:5"


def test_workers_are_named_by_the_address_at_which_they_reach_each_other():
    them = [
        Worker(0, 0, "jump", 22, "u", None, None, "fd00::1"),
        Worker(0, 1, "jump2", 22, "u", None, None, "b"),
    ]
    environment = place_environment(them, them[1], 8482)
    assert environment["TPU_WORKER_HOSTNAMES"] == "fd00::1,b"
    assert environment["SLICEWISE_COORDINATOR"] == "[fd00::1]:8482"
    assert not any(key.startswith("MEGASCALE") for key in environment)


def test_runs_on_one_machine_get_ports_of_their_own():
    assert coordinator_port(workers(2, 1)) == JAX_PORT
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert coordinator_port(workers(1, 2, "127.0.0.1")) not in (JAX_PORT, taken.getsockname()[1])


def test_a_gang_of_one_slice_inherits_nothing_of_a_gang_of_several(monkeypatch):
    """What points at slices that are gone makes libtpu wait for ever."""
    for name in ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.setenv(name, "gone")
    monkeypatch.setenv("KEPT", "1")
    spec = JobSpec(
        name="x",
        submission="0" * 12,
        target="queued-resource",
        command=(),
        config="",
        slices=1,
        hosts_per_slice=1,
    )
    made = gang_environment(spec, Place(0, 0, "10.0.0.1"), {"s0h0": "10.0.0.1"}, 1)
    assert (made["KEPT"], made["TPU_WORKER_HOSTNAMES"]) == ("1", "10.0.0.1")
    assert not any(name.startswith("MEGASCALE") for name in made)
