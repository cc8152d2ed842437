"""The search with a judge whose times are known."""

import time

import pytest

from slicewise.config import load_config, resolve_degrees
from slicewise.errors import UserError
from slicewise.interop.huggingface import load_spec
from slicewise.kernels import tuned
from slicewise.kernels.tuned import Key
from slicewise.tune import problems
from slicewise.tune.kept import Kept
from slicewise.tune.problems import Device, Problem
from slicewise.tune.search import Accident, OutOfTime, Search

KEY = Key(kernel="xla_chunked", chip="cpu", shape={"tokens": 1024}, dtype="float32")


@pytest.fixture(autouse=True)
def own_table(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Known:
    """Seconds by block, or why not; steps by config."""

    name = "measured"

    def __init__(self, blocks=None, step=lambda config: 1.0, most=10**6, least=None):
        self.least = least or {}
        self.blocks, self.asked, self._step, self.most = blocks or {}, [], step, most

    def kernel(self, problem, values, until_s):
        self.asked.append(values[problem.varying[0]])
        found = self.blocks[values[problem.varying[0]]]
        if isinstance(found, Exception):
            raise found
        return (None, found) if isinstance(found, str) else (found, "")

    def least_s(self, problem, values):
        return self.least.get(values[problem.varying[0]], 0.0)

    def step(self, config, until_s):
        self.asked.append(config)
        seconds = self._step(config)
        if isinstance(seconds, Exception):
            raise seconds
        if isinstance(seconds, str):
            return None, seconds, ""
        return (None, "does not fit", "") if seconds is None else (seconds, "", "")

    def is_over(self, is_over):
        return is_over or len(self.asked) >= self.most


def of_blocks(*blocks):
    return Problem(KEY, "", ("block",), tuple({"block": b} for b in blocks))


def test_the_fastest_setting_is_kept_beside_that_of_the_rule():
    judge = Known({512: 2.0, 128: 3.0, 256: 1.0, 64: "exceeds VMEM"})
    found = Search(judge, 60).run(load_config(None).config, [of_blocks(512, 128, 64, 256)], [], [])
    assert tuned.find(KEY, ("block",)) == {"block": 256}
    (entry,) = found.entries
    assert (entry.seconds, entry.untuned_seconds, entry.tried) == (1.0, 2.0, 4)
    assert [t.problem for t in found.trials] == ["", "", "exceeds VMEM", ""]


def test_what_cannot_be_faster_is_not_tried_and_the_most_promising_comes_after_the_rule():
    judge = Known({512: 4.0, 64: 3.0, 256: 2.0}, least={512: 3.5, 128: 2.5, 64: 1.5, 256: 1.0, 32: 9.0})
    outcome = Search(judge, 60).run(load_config(None).config, [of_blocks(512, 128, 32, 64, 256)], [], [])
    assert judge.asked == [512, 256, 64]
    assert outcome.skipped == 0  # nothing is left to do
    assert tuned.find(KEY, ("block",)) == {"block": 256}


def test_what_was_tried_counts_when_time_is_over_and_the_rest_is_said():
    judge = Known({512: 2.0, 128: 3.0, 256: 1.0}, most=2)
    found = Search(judge, 60).run(load_config(None).config, [of_blocks(512, 128, 256)], [], [])
    assert tuned.find(KEY, ("block",)) == {"block": 512}
    assert found.skipped == 1
    assert not Search(Known(), -1.0).run(load_config(None).config, [of_blocks(512)], [], []).trials


def test_where_nothing_compiles_nothing_is_kept():
    judge = Known({512: "no", 128: "no"})
    assert not Search(judge, 60).run(load_config(None).config, [of_blocks(512, 128)], [], []).entries
    assert tuned.find(KEY, ("block",)) is None


KILLED = Accident("the compiler crashed (signal 9)")


def test_a_setting_that_was_not_judged_is_passed_over():
    judge = Known({512: 2.0, 128: KILLED, 256: 1.0})
    found = Search(judge, 60).run(load_config(None).config, [of_blocks(512, 128, 256)], [], [])
    assert [t.is_accident for t in found.trials] == [False, True, False]
    assert tuned.find(KEY, ("block",)) == {"block": 256}
    assert found.failure is None


def test_without_the_time_of_the_rule_no_setting_of_a_kernel_counts_as_better():
    judge = Known({512: KILLED, 128: 3.0})
    found = Search(judge, 60).run(load_config(None).config, [of_blocks(512, 128)], [], [])
    assert (judge.asked, found.entries, found.skipped) == ([512], (), 0)
    said, is_accident = found.failure
    assert is_accident
    assert said.endswith("512: the compiler crashed (signal 9)")


def test_that_nothing_compiles_is_a_failure_which_is_no_accident():
    found = Search(Known({512: "no", 128: "no"}), 60).run(
        load_config(None).config, [of_blocks(512, 128)], [], []
    )
    said, is_accident = found.failure
    assert said.startswith("no setting can be had of 2 that were tried; xla_chunked")
    assert not is_accident


@pytest.mark.parametrize("why", [KILLED, "the compiler refuses this program"])
def test_where_the_step_as_it_is_was_not_judged_no_other_wins(why):
    judge = Known(step=lambda c: 1.0 if c.model.remat_policy == "full" else why)
    config = load_config(None, ["remat_policy=minimal"]).config
    found = Search(judge, 60).run(config, [], [("with a", ("native-bf16",))], [{"remat_policy": "full"}])
    assert (len(judge.asked), found.overrides, found.step_s, found.skipped) == (1, (), None, 0)
    said, is_accident = found.failure
    assert said == f"the step as it is was not judged, so no other is compared with it: {why}"
    assert is_accident == (why is KILLED)


def test_what_fits_wins_over_a_step_that_does_not():
    judge = Known(step=lambda c: 1.0 if c.model.remat_policy == "full" else None)
    config = load_config(None, ["remat_policy=minimal"]).config
    found = Search(judge, 60).run(
        config, [], [], [{"remat_policy": "save_out_proj"}, {"remat_policy": "full"}]
    )
    assert (found.overrides, found.step_s, found.failure) == (("remat_policy=full",), (None, 1.0), None)


def test_both_passes_of_a_kernel_become_one_entry():
    forward = Problem(KEY, "forward", ("a",), ({"a": 1, "b": 1}, {"a": 2, "b": 1}))
    backward = Problem(KEY, "backward", ("b",), ({"a": 1, "b": 1}, {"a": 1, "b": 3}))
    judge = Known({1: 4.0, 2: 3.0, 3: 1.0})
    (entry,) = Search(judge, 60).run(load_config(None).config, [forward, backward], [], []).entries
    assert entry.values == {"a": 2, "b": 3}
    assert (entry.seconds, entry.untuned_seconds, entry.tried) == (4.0, 8.0, 4)
    assert tuned.find(KEY, ("a", "b")) == entry.values


EXTRA = "xla_tpu_use_tc_device_shape_on_sc=true"


def test_changes_of_a_step_stay_where_they_make_it_shorter():
    config = load_config(None, ["remat_policy=full", "compiler_flags=scheduler"]).config

    def seconds(c):
        flags = c.compiler.compiler_flags
        gain = 0.2 * ("native-bf16" in flags) + 0.3 * ("scheduler" not in flags) - 0.1 * (EXTRA in flags)
        return (
            None if c.model.remat_policy == "none" else 2.0 - gain - 0.5 * (c.model.remat_policy == "minimal")
        )

    changes = [
        ("without scheduler", ()),
        ("with native-bf16", ("scheduler", "native-bf16")),
        ("with extra", ("scheduler", EXTRA)),
    ]
    judge = Known(step=seconds)
    policies = [{"remat_policy": name} for name in ("none", "minimal", "save_out_proj")]
    found = Search(judge, 60).run(config, [], changes, policies)
    assert dict(o.split("=", 1) for o in found.overrides) == {
        "remat_policy": "minimal",
        "compiler_flags": "native-bf16",
    }
    assert found.step_s == pytest.approx((2.0, 1.0))
    assert "does not fit" in [t.problem for t in found.trials]


def test_an_interrupted_search_goes_on_where_it_was():
    problem, kept = of_blocks(512, 128), Kept("measured")
    assert kept.get(problem, {"block": 512}) is None
    kept.put(problem, {"block": 512}, 0.25, "")
    kept.put(problem, {"block": 128}, None, "no")
    again = Kept("measured")
    assert again.get(problem, {"block": 512}) == (0.25, "")
    assert again.get(problem, {"block": 128}) == (None, "no")
    assert Kept("compiled").get(problem, {"block": 512}) is None
    kept.put_step(["a config", {"jax": "1"}], 2.0, "")
    assert Kept("measured").get_step(["a config", {"jax": "1"}]) == (2.0, "")
    assert Kept("measured").get_step(["a config", {"jax": "2"}]) is None
    again.path.write_text("{")
    assert Kept("measured").get(problem, {"block": 512}) is None


def found(device, *overrides, devices=4):
    config = load_config(None, ["sequence_length=2048", "global_batch_size=8", *overrides]).config
    degrees = resolve_degrees(config, num_slices=1, devices_per_slice=devices)
    return problems.kernels(config, load_spec(config.model.model), degrees, device)


def test_a_tpu_has_attention_and_experts_to_tune_each_at_the_shape_of_a_device():
    made = found(Device("v6e", True), "model=mixtral-8x7b", "ici_expert_parallelism=2", "quantization=int8")
    assert [(p.key.kernel, p.part) for p in made][:2] == [("splash", "forward"), ("splash", "backward")]
    grouped = {(p.key.kernel, p.key.shape["summed"], p.key.shape["columns"]) for p in made[2:]}
    assert grouped == {(k, *s) for k in ("gmm", "gmm_t", "tgmm") for s in ((4096, 14336), (14336, 4096))}
    assert all(p.key.shape["groups"] == 4 and p.key.dtype == "int8" for p in made[2:])
    assert all(p.key.shape["rows"] == 2 * 2048 * 2 for p in made[2:])
    for p in made:
        assert len(p.candidates) == len({p.shown(c) for c in p.candidates}) > 3


def test_experts_in_a_pipeline_are_tuned_for_the_rows_of_one_microbatch():
    def rows(*overrides):
        made = found(Device("v6e", True), "model=mixtral-8x7b", "global_batch_size=64", *overrides)
        return {p.key.shape["rows"] for p in made if p.key.kernel == "gmm"}

    of_sequence = 2048 * 2  # each token goes to two experts
    assert rows() == {16 * of_sequence}
    assert rows("ici_pipeline_parallelism=2", "pipeline_microbatches=4") == {8 * of_sequence}
    accumulated = ("pipeline_microbatches=2", "gradient_accumulation_steps=8")
    assert rows("ici_pipeline_parallelism=2", *accumulated) == {2 * of_sequence}
    with pytest.raises(UserError, match="pipeline_microbatches = 3 does not fit"):
        rows("ici_pipeline_parallelism=2", "pipeline_microbatches=3")


def test_layers_with_and_without_a_window_are_tuned_apart():
    made = found(Device("v5p", True), "model=gemma2-2b", "sequence_length=8192")
    assert {p.key.shape["window"] for p in made} == {0, 4096}


def test_a_cpu_has_only_chunked_attention():
    assert found(Device("cpu", False)) == ()
    (one,) = found(Device("cpu", False), "attention=xla_chunked")
    assert [c["block"] for c in one.candidates] == [512, 128, 256, 1024, 2048]
    assert problems.flag_changes(load_config(None).config, "cpu") == []


def test_each_group_of_flags_can_be_put_on_or_off():
    config = load_config(None, ["compiler_flags=scheduler"]).config
    changes = dict(problems.flag_changes(config, "tpu7x"))
    assert changes["without scheduler"] == ()
    assert changes["with layer-scheduler"] == ("layer-scheduler",)  # beside the other it cannot be
    assert changes["with native-bf16"] == ("scheduler", "native-bf16")
    twice = load_config(None, ["compiler_flags=sparsecore-all-reduce"]).config  # which is on by default
    assert dict(problems.flag_changes(twice, "v6e"))["without sparsecore-all-reduce"] == (
        "no-sparsecore-all-reduce",
    )
    assert dict(problems.flag_changes(load_config(None).config, "v6e"))["without sparsecore-all-reduce"] == (
        "no-sparsecore-all-reduce",
    )


def test_groups_that_are_on_for_one_slice_only_are_put_on_where_there_are_several():
    config = load_config(None).config
    assert "without sparsecore-queues" in dict(problems.flag_changes(config, "v6e"))
    assert dict(problems.flag_changes(config, "v6e", 2))["with sparsecore-queues"] == ("sparsecore-queues",)


def test_another_policy_than_a_custom_one_has_no_places_of_tensors():
    config = load_config(None, ["remat_policy=custom", 'remat_tensors={context="device"}']).config
    judge = Known(step=lambda c: 1.0 if c.model.remat_policy == "full" and not c.remat.offloaded else 2.0)
    found = Search(judge, 60).run(config, [], [], problems.remat_changes(config))
    assert found.overrides == ("remat_policy=full", "remat_tensors={}")
    assert len(found.trials) == 1 + len(problems.REMAT)


def test_what_the_judge_cuts_short_is_left_for_the_next_time():
    def never(*_):
        raise OutOfTime

    judge = Known()
    judge.kernel = judge.step = never
    config = load_config(None).config
    found = Search(judge, 60).run(config, [of_blocks(512, 128)], [], [{"remat_policy": "full"}])
    assert (found.trials, found.entries, found.skipped) == ((), (), 4)
    judge.kernel = lambda problem, values, until_s: (1.0, "")
    assert Search(judge, 60).run(config, [of_blocks(512)], [], [{"remat_policy": "full"}]).skipped == 2


def test_time_is_watched():
    judge = Known({512: 1.0, 128: 1.0})
    slow = judge.kernel

    def kernel(problem, values, until_s):
        time.sleep(0.06)
        return slow(problem, values, until_s)

    judge.kernel = kernel
    assert Search(judge, 0.05).run(load_config(None).config, [of_blocks(512, 128)], [], []).skipped == 1
