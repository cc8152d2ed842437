import pytest

from slicewise.catalog import chips, flags
from slicewise.errors import UserError

PAIRS = [(name, chip) for name, group in flags.groups().items() for chip in group.chips]


@pytest.mark.parametrize(("name", "chip"), PAIRS)
def test_every_group_resolves_on_its_chips(name, chip):
    assert flags.groups()[name].flags.items() <= flags.resolve([name], chip, version="0.0.52").items()


def test_the_file_names_only_what_exists():
    for group in flags.groups().values():
        assert set(group.chips) <= set(chips.names())
        assert {*group.default, *group.default_offloading} <= set(group.chips)
        assert set(group.source) <= set(flags.sources())
        assert all(
            group.name in flags.groups()[other].conflicts or other in flags.groups()
            for other in group.conflicts
        )
    for refused in flags.refused():
        assert refused.source in flags.sources()
        assert not refused.instead or refused.instead in flags.groups()


def test_an_override_decides_over_groups_and_defaults():
    asked = [
        "sparsecore-all-gather",
        "--xla_tpu_use_tc_device_shape_on_sc=false",
        "xla_tpu_bf16_emission_mode=NONE",
    ]
    got = flags.resolve([*asked, "xla_tpu_dcn_max_overlap_estimation=32.5"], "tpu7x", 65536)
    assert got["xla_tpu_use_tc_device_shape_on_sc"] is False
    assert got["xla_tpu_bf16_emission_mode"] == "NONE"
    assert got["xla_tpu_dcn_max_overlap_estimation"] == 32.5
    assert got[flags.SCOPED_VMEM] == 65536


def test_nothing_asked_is_the_defaults_of_the_chip():
    for chip in ("v4", "v5e", "v5p", "v6e", "tpu7x"):
        expected = {f for group in flags.groups().values() if chip in group.default for f in group.flags}
        assert flags.resolve([], chip).keys() == expected


def test_a_default_group_can_be_left_out():
    defaults = [name for name, group in flags.groups().items() if "v6e" in group.default]
    assert defaults
    assert flags.resolve([f"no-{name}" for name in defaults], "v6e") == {}


def test_what_is_asked_for_replaces_defaults_that_exclude_it():
    name = "xla_tpu_enable_latency_hiding_layer_scheduler"
    assert flags.resolve([], "v6e")[name] is True
    assert name not in flags.resolve(["scheduler"], "v6e")
    assert name not in flags.resolve(["scheduler", "no-sparsecore-queues"], "v6e")
    with pytest.raises(UserError, match="scheduler and sparsecore-queues exclude each other"):
        flags.resolve(["scheduler", "sparsecore-queues"], "v6e")


def test_steps_that_offload_have_defaults_of_their_own():
    assert "scheduler" in flags.defaults("v6e", offloads=True)
    assert "sparsecore-queues" not in flags.defaults("v6e", offloads=True)
    assert "scheduler" not in flags.defaults("v6e")
    name = "xla_tpu_host_transfer_overlap_limit"
    assert name in flags.resolve([], "v6e", offloads=True)
    assert name not in flags.resolve(["no-scheduler"], "v6e", offloads=True)
    assert name not in flags.resolve(["sparsecore-queues"], "v6e", offloads=True)
    assert name not in flags.resolve([], "v6e")


def test_several_slices_do_without_what_is_for_one():
    assert "sparsecore-queues" not in flags.defaults("v5p", num_slices=2)
    name = "xla_tpu_enable_latency_hiding_layer_scheduler"
    assert name not in flags.resolve([], "v5p", num_slices=2)
    assert name not in flags.resolve(["no-sparsecore-queues"], "v5p", num_slices=2)
    assert name in flags.resolve(["sparsecore-queues"], "v5p", num_slices=2)


@pytest.mark.parametrize(
    ("asked", "chip", "message"),
    [
        ("sparsecore-al-gather", "v6e", "unknown group.*Did you mean 'sparsecore-all-gather'"),
        (
            "xla_tpu_enable_async_colective_fusion=true",
            "v5e",
            "Did you mean 'xla_tpu_enable_async_collective_fusion'",
        ),
        ("layer-scheduler", "v6e", "is for tpu7x and not for v6e, which has: sparsecore-all-gather"),
        (
            "xla_sc_disjoint_spmem=false",
            "v6e",
            "no option 'xla_sc_disjoint_spmem': it is a flag of the process",
        ),
        (
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
            "v6e",
            "may give wrong results.*use sparsecore",
        ),
        ("xla_tpu_scoped_vmem_limit_kib=4096", "v6e", "set only the key"),
        ("no-async-all-reduce", "v6e", "is not on by default on v6e; leave it out"),
    ],
)
def test_refuses_what_would_not_compile(asked, chip, message):
    with pytest.raises(UserError, match=message):
        flags.resolve([asked], chip, 4096, version="0.0.52")


def test_groups_that_exclude_or_contradict_each_other_are_refused(monkeypatch):
    with pytest.raises(UserError, match="exclude each other"):
        flags.resolve(["collective-matmul", "no-collective-matmul"], "v5p")
    one = flags.groups()["dcn-overlap"]
    other = one.model_copy(
        update={"name": "other", "flags": {"xla_tpu_enable_data_parallel_all_reduce_opt": False}}
    )
    monkeypatch.setattr(flags, "groups", lambda: {"dcn-overlap": one, "other": other})
    with pytest.raises(UserError, match="dcn-overlap sets .* to true, other to false"):
        flags.resolve(["dcn-overlap", "other"], "v5p")
    settled = ["dcn-overlap", "other", "xla_tpu_enable_data_parallel_all_reduce_opt=true"]
    assert flags.resolve(settled, "v5p")["xla_tpu_enable_data_parallel_all_reduce_opt"] is True


@pytest.mark.parametrize(
    "flag", ["xla_tpu_scoped_vmem_limit_kib=", "xla_tpu_enable_async_collective_fusion="]
)
def test_a_flag_that_is_set_twice_is_refused(flag):
    values = ("4096", "8192") if "vmem" in flag else ("true", "false")
    for check in (flags.check_names, lambda asked: flags.resolve(asked, "v6e")):
        with pytest.raises(UserError, match=f"set twice, to {values[0]} and to {values[1]}; leave one out"):
            check([f"{flag}{values[0]}", f"--{flag}{values[1]}"])


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("xla_tpu_enable_async_collective_fusion=maybe", "= 'maybe': expected true or false, by default"),
        ("xla_tpu_enable_async_collective_fusion=1", "= '1': expected true or false"),
        ("xla_tpu_enable_async_collective_fusion=", "= '': expected true or false"),
        ("xla_tpu_scoped_vmem_limit_kib=lots", "= 'lots': expected a number, by default -1"),
        ("xla_tpu_scoped_vmem_limit_kib=true", "= 'true': expected a number"),
        ("xla_tpu_bf16_emission_mode=", "= '': expected a value"),
    ],
)
def test_a_value_of_another_type_than_the_flag_is_refused(item, message):
    with pytest.raises(UserError) as error:
        flags.check_names([item], "0.0.52")
    assert message in str(error.value)


def test_less_vmem_than_a_program_needs_is_refused():
    for limit in (1, flags.LEAST_VMEM_KIB - 1):
        with pytest.raises(UserError, match=f"scoped_vmem_limit_kib = {limit}: expected at least"):
            flags.resolve([], "v6e", limit)
        with pytest.raises(UserError, match=f"scoped_vmem_limit_kib = {limit}: expected at least"):
            flags.check_names([f"{flags.SCOPED_VMEM}={limit}"])
    flags.check_names([f"{flags.SCOPED_VMEM}=-1"])
    assert flags.resolve([], "v6e", flags.LEAST_VMEM_KIB)[flags.SCOPED_VMEM] == flags.LEAST_VMEM_KIB


def test_more_vmem_than_the_chip_has_is_refused():
    with pytest.raises(UserError, match="exceeds the .* KiB of VMEM of v6e"):
        flags.resolve([], "v6e", 10**6)


@pytest.mark.parametrize(
    ("version", "found"), [("0.0.52", "0.0.52"), ("0.1.0", "0.0.52"), ("0.0.1", "0.0.52")]
)
def test_an_unlisted_libtpu_has_the_options_of_the_nearest(version, found):
    assert flags.options(version) == flags.options(found)
    assert len(flags.options(version)) > 1000


def test_without_libtpu_the_newest_listed_counts(monkeypatch):
    def absent(name):
        raise flags.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(flags.importlib.metadata, "version", absent)
    assert flags.installed() == flags.listed()[-1]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("sparsecore-all-gather", "not beside: async-collective-fusion"),
        ("--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true", "refused for v5p, v6e, tpu7x"),
        ("xla_tpu_scoped_vmem_limit_kib", "default in libtpu 0.0.52: -1"),
        ("xla_tpu_scoped_vmem_limit_kib", "set by the key scoped_vmem_limit_kib"),
        ("no-sparsecore-all-gather", "not beside: async-collective-fusion"),
        ("xla_sc_disjoint_spmem", "flag of the process"),
    ],
)
def test_explains(name, line):
    assert any(line in shown for shown in flags.explain(name, "0.0.52"))


def test_a_default_is_said_of_the_version_that_is_listed():
    said = "default in libtpu 0.0.52 (installed: 0.0.50.1, which the catalog does not list): -1"
    assert said in flags.explain("xla_tpu_scoped_vmem_limit_kib", "0.0.50.1")


def test_explaining_the_unknown_names_the_nearest():
    with pytest.raises(UserError, match="Did you mean 'dcn-overlap'"):
        flags.explain("dcn-overlp")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("sparsecore-alreduce", "unknown group 'sparsecore-alreduce'. Did you mean 'sparsecore-all-reduce'?"),
        ("no-shedulr", "Did you mean 'no-scheduler'?"),
        ("xla_tpu_scoped_vmem_limit=3", "Did you mean 'xla_tpu_scoped_vmem_limit_kib'?"),
        ("xla_tpu_scoped_vmem_limit_kib", "has no value; write xla_tpu_scoped_vmem_limit_kib=VALUE"),
    ],
)
def test_names_are_checked_also_where_there_is_no_tpu(item, message):
    with pytest.raises(UserError) as error:
        flags.check_names([item])
    assert message in str(error.value)
    flags.check_names(["scheduler", "no-scheduler", "--xla_tpu_scoped_vmem_limit_kib=4096"])
