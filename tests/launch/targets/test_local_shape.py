import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.errors import UserError
from slicewise.launch.targets.local import (
    COLLECTIVE_TIMEOUT_S,
    MAX_DEVICES,
    MAX_PROCESSES,
    ClusterShape,
    child_environment,
    parse_shape,
    xla_flags,
)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 16))
def test_a_shape_is_slices_hosts_and_devices_in_this_order(slices, hosts, devices):
    shape = parse_shape(f"{slices}x{hosts}x{devices}")
    assert shape == ClusterShape(slices, hosts, devices)
    places = [shape.place(process_id) for process_id in range(shape.processes)]
    assert places == [(slice_id, host) for slice_id in range(slices) for host in range(hosts)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2",
        "2x2",
        "2x2x2x2",
        "0x2x2",
        "2x2x0",
        "-1x2x2",
        "2X2X2",
        "axbxc",
        "2x2x2.5",
        "\u0662x2x2",
        "2 x2x2",
    ],
)
def test_text_that_is_no_shape_is_refused_with_an_example(text):
    with pytest.raises(UserError, match="expected SLICESxHOSTSxDEVICES") as caught:
        parse_shape(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "text", [f"{MAX_PROCESSES + 1}x1x1", f"1x1x{MAX_DEVICES + 1}", "999999x999999x999999"]
)
def test_a_shape_too_large_for_one_machine_is_refused(text):
    with pytest.raises(UserError, match="at most"):
        parse_shape(text)


@given(st.text(max_size=12))
def test_any_other_text_gives_a_shape_or_a_user_error(text):
    with contextlib.suppress(UserError):
        assert parse_shape(text).processes >= 1


def test_a_process_sees_nothing_of_the_cluster_that_its_shell_is_in():
    """JAX would take it for a task of that job, and the slices for those of an earlier run."""
    stale = ["SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NODELIST"]
    stale += ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "MEGASCALE_NUM_SLICES", "TPU_WORKER_ID"]
    base = {**dict.fromkeys(stale, "7"), "HOME": "/home/x", "SLURM": "kept"}
    environment = child_environment(base, ClusterShape(1, 2, 1), 1, 1234)
    assert not environment.keys() & {*stale}
    assert environment.items() >= {("HOME", "/home/x"), ("SLURM", "kept")}


def test_each_process_learns_its_place_and_keeps_the_rest_of_the_environment():
    base = {"HOME": "/home/x", "SLICEWISE_PROCESS_ID": "77", "JAX_PLATFORMS": "tpu"}
    environment = child_environment(base, ClusterShape(2, 3, 4), 5, 1234)
    assert environment.items() >= {
        ("HOME", "/home/x"),
        ("SLICEWISE_COORDINATOR", "127.0.0.1:1234"),
        ("SLICEWISE_PROCESS_ID", "5"),
        ("SLICEWISE_NUM_PROCESSES", "6"),
        ("SLICEWISE_NUM_SLICES", "2"),
        ("JAX_PLATFORMS", "cpu"),
        ("PYTHONUNBUFFERED", "1"),
        ("PYTHONFAULTHANDLER", "1"),
    }


def test_a_device_count_is_replaced_and_other_flags_stay():
    given = "--a=1 --xla_force_host_platform_device_count=8 --b=x,y --xla_force_host_platform_device_count"
    flags = xla_flags(given, 2).split()
    assert flags[:2] == ["--a=1", "--b=x,y"]
    assert [flag for flag in flags if "device_count" in flag] == ["--xla_force_host_platform_device_count=2"]
    assert f"--xla_cpu_collective_timeout_seconds={COLLECTIVE_TIMEOUT_S}" in flags


def test_a_flag_whose_name_only_contains_the_device_count_stays():
    assert "--xla_force_host_platform_device_count_x=3" in xla_flags(
        "--xla_force_host_platform_device_count_x=3", 1
    )


def test_a_collective_timeout_of_the_user_is_kept():
    flags = xla_flags("--xla_cpu_collective_timeout_seconds=7", 1).split()
    assert [flag for flag in flags if flag.startswith("--xla_cpu_collective_timeout")] == [
        "--xla_cpu_collective_timeout_seconds=7"
    ]


def test_flags_in_a_file_are_refused_because_none_can_be_added():
    with pytest.raises(UserError, match="names a file"):
        xla_flags("flags.txt", 2)
