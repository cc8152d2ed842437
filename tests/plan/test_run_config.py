import os
from dataclasses import replace

import pytest

from slicewise.catalog import model, slices
from slicewise.config import RunConfig, load_config, with_overrides
from slicewise.costs import remat
from slicewise.costs.layout import Degrees, Layout, Recipe
from slicewise.costs.shapes import model_shape
from slicewise.costs.step import estimate
from slicewise.errors import UserError
from slicewise.plan import run_config
from slicewise.plan.search import SEARCHED_POLICIES, Candidate, search
from slicewise.plan.write import write_config

SHAPE = model_shape(model.load("demo-1m"))
PLACE = slices.cluster("v5e:2x4", 2)


def config_of(*overrides):
    return with_overrides(RunConfig(), ["global_batch_size=64", *overrides])


def test_a_config_is_priced_with_its_own_degrees_and_policy():
    now = run_config.priced(config_of("ici_tensor_parallelism=2", "remat_policy=full"), SHAPE, PLACE)
    assert (now.layout.ici.fsdp, now.layout.ici.tensor, now.layout.dcn.data) == (4, 2, 2)
    assert now.recipe.remat.name == "full"
    again = estimate(SHAPE, PLACE, now.layout, now.recipe, 256)
    assert now.estimate == again


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["compute_dtype=float32"], "only bfloat16 steps can be priced; set compute_dtype=bfloat16"),
        (["ici_tensor_parallelism=3"], "does not divide the 8 devices"),
        (
            ["dcn_tensor_parallelism=2", "dcn_data_parallelism=1"],
            "dcn_tensor_parallelism = 2: .* between slices can be trained but not priced; ask slicewise compile",
        ),
        (["dcn_expert_parallelism=2", "dcn_data_parallelism=1"], "trained but not priced"),
        (["ici_expert_parallelism=2"], "expert = 2 needs a mixture of experts, which demo-1m is not"),
        (["ici_tensor_parallelism=8"], "tensor = 8 does not divide the heads"),
        (["global_batch_size=8"], "the nearest that can is 16"),
    ],
)
def test_what_cannot_be_priced_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        run_config.priced(config_of(*overrides), SHAPE, PLACE)


def candidate(layout):
    recipe = Recipe()
    return Candidate(PLACE, layout, recipe, estimate(SHAPE, PLACE, layout, recipe, 256))


def test_pipelines_are_priced_and_proposed_for_adapters():
    shape, place = model_shape(model.load("llama3-405b")), slices.cluster("v5e:4x4", 4)
    config = config_of("model=llama3-405b", "lora_rank=8")
    found = search(run_config.workload_of(config, shape), place, top=1000).ranked
    staged = next(c for c in found if c.layout.total("pipeline") > 1)
    values = run_config.config_values(run_config.workload_of(config, shape), staged, model="llama3-405b")
    again = run_config.priced(with_overrides(config, run_config.as_overrides(values)), shape, place)
    assert again.estimate.hbm_total_bytes == pytest.approx(staged.estimate.hbm_total_bytes)
    assert again.estimate.step_time_s == pytest.approx(staged.estimate.step_time_s)


def test_values_of_a_layout_give_the_same_layout_back():
    work = run_config.workload_of(config_of(), SHAPE)
    planned = candidate(Layout(Degrees(fsdp=4, tensor=2), Degrees(data=2), 64, 2))
    values = run_config.config_values(work, planned, model="demo-1m", run_tokens=1e6)
    assert values["steps"] == 62  # 61.04 batches of 64 x 256 tokens
    config = with_overrides(RunConfig(), run_config.as_overrides(values))
    again = run_config.priced(config, SHAPE, PLACE)
    assert again.layout == planned.layout
    assert run_config.changes(again, planned) == ()


@pytest.mark.parametrize("policy", SEARCHED_POLICIES, ids=lambda policy: policy.name)
def test_every_remat_policy_of_the_search_can_be_written(policy, tmp_path):
    work = run_config.workload_of(config_of(), SHAPE)
    planned = candidate(Layout(Degrees(fsdp=8), Degrees(data=2), 64))
    planned = replace(planned, recipe=replace(planned.recipe, remat=policy))
    path = tmp_path / "run.toml"
    path.write_text('[model]\nremat_policy = "custom"\nremat_tensors = {query_proj = "device"}\n')
    write_config(str(path), run_config.config_values(work, planned, model="demo-1m"))
    model = load_config(str(path)).config.model
    got = remat.chosen(model.remat_policy, model.remat_tensors)
    assert (got.saved, got.offloaded) == (policy.saved, policy.offloaded)
    again = run_config.priced(load_config(str(path)).config, SHAPE, PLACE)
    assert run_config.changes(again, planned) == ()


@pytest.mark.parametrize("dispatch", [[], ["moe_dispatch=capacity", "capacity_factor=1.5"]])
def test_a_layout_with_an_expert_axis_is_priced_and_written(dispatch):
    shape = model_shape(model.load("demo-moe"))
    config = config_of("model=demo-moe", "ici_expert_parallelism=4", *dispatch)
    planned = run_config.priced(config, shape, PLACE)
    assert (planned.layout.ici.expert, planned.layout.ici.fsdp) == (4, 2)
    assert planned.recipe.expert_capacity_factor == (1.5 if dispatch else None)
    work = run_config.workload_of(config, shape)
    values = run_config.config_values(work, planned, model="demo-moe")
    again = run_config.priced(with_overrides(RunConfig(), run_config.as_overrides(values)), shape, PLACE)
    assert (again.layout, again.recipe) == (planned.layout, planned.recipe)


@pytest.mark.parametrize("once", [True, False])
def test_a_pipeline_is_priced_and_written_with_its_microbatches_and_rounds(once):
    shape = model_shape(model.load("llama3-8b"))
    place = slices.cluster("v5p:4x4x4", 4)
    layout = Layout(Degrees(fsdp=32, pipeline=2), Degrees(data=2, pipeline=2), 1024, 1, 8, 2, once)
    planned = Candidate(place, layout, Recipe(), estimate(shape, place, layout, Recipe(), 4096))
    config = config_of("sequence_length=4096", "global_batch_size=1024")
    values = run_config.config_values(run_config.workload_of(config, shape), planned, model="llama3-8b")
    asked = [values[f"pipeline_{key}"] for key in ("microbatches", "repeats", "gather")]
    assert asked == [8, 2, "step" if once else "microbatch"]
    again = run_config.priced(with_overrides(config, run_config.as_overrides(values)), shape, place)
    assert again.layout == layout
    assert run_config.changes(again, planned) == ()
    written = with_overrides(config, run_config.as_overrides(values | {"pipeline_microbatches": 0}))
    derived = run_config.priced(written, shape, place)
    assert derived.layout.pipeline_microbatches == 16  # the fewest that idle no more than a tenth


@pytest.mark.parametrize(
    ("name", "scales"), [("fp8", []), ("fp8_e4m3", ["quantization_calibrate_every=9"]), ("int8", [])]
)
def test_products_in_8_bits_are_priced_and_written(name, scales):
    shape, place = model_shape(model.load("llama3-8b")), slices.cluster("tpu7x:4x4x4")
    asked = ["model=llama3-8b", "sequence_length=4096", "global_batch_size=512"]
    now = run_config.priced(config_of(*asked), shape, place)
    config = config_of(*asked, f"quantization={name}", *scales)
    planned = run_config.priced(config, shape, place)
    assert planned.recipe.static_scales == bool(scales)
    # Half of what is gathered, whatever the scales are; gradients are summed as before.
    assert planned.estimate.communication_s["fsdp"] < now.estimate.communication_s["fsdp"]
    faster = planned.estimate.step_time_s < 0.9 * now.estimate.step_time_s
    assert faster == (name != "int8")  # which the chip has no unit for
    work = run_config.workload_of(config, shape)
    values = run_config.config_values(work, planned, model="llama3-8b", quantization=name)
    assert values["quantization"] == name
    again = run_config.priced(with_overrides(config, run_config.as_overrides(values)), shape, place)
    assert (again.layout, again.recipe) == (planned.layout, planned.recipe)
    assert {(c.key, c.now, c.then) for c in run_config.changes(now, planned)} == {
        ("quantization", "none", {"int8": "int8"}.get(name, "fp8"))
    }
    off = run_config.priced(
        config_of(*asked, "quantization=fp8", "use_qwix_quantization=false"), shape, place
    )
    assert off.estimate == now.estimate


@pytest.mark.parametrize("part", ["quantization_layers=w_.*", "quantization_scaling=tile"])
def test_what_is_in_8_bits_only_in_part_is_not_priced(part):
    with pytest.raises(UserError, match=r"only steps .* in 8 bits can be priced"):
        run_config.priced(config_of("quantization=fp8", part), SHAPE, PLACE)


def test_adapters_that_train_refuses_are_not_priced():
    with pytest.raises(UserError, match="optimizer_type = muon is for whole matrices"):
        run_config.priced(config_of("lora_rank=8", "optimizer_type=muon"), SHAPE, PLACE)
    with pytest.raises(UserError, match="would quantise again"):
        run_config.priced(config_of("lora_rank=8", "lora_base_dtype=int8", "quantization=fp8"), SHAPE, PLACE)


def test_a_written_layout_takes_back_what_it_leaves_without_an_effect():
    planned = candidate(Layout(Degrees(fsdp=8), Degrees(data=2), 64))
    values = run_config.config_values(run_config.workload_of(config_of(), SHAPE), planned, model="demo-1m")
    asked = ("context_strategy=ring", "ici_context_parallelism=2", "pipeline_gather=microbatch")
    config = with_overrides(RunConfig(), [*asked, *run_config.as_overrides(values)])
    assert run_config.priced(config, SHAPE, PLACE).layout == planned.layout


@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
def test_a_layout_with_a_context_axis_is_priced_and_written(strategy):
    shape = model_shape(model.load("llama3-8b"))
    place = slices.cluster("v5p:2x2x4")
    asked = [
        "sequence_length=16384",
        "global_batch_size=4",
        "ici_context_parallelism=4",
        "ici_fsdp_parallelism=4",
    ]
    config = config_of("model=llama3-8b", *asked, f"context_strategy={strategy}")
    planned = run_config.priced(config, shape, place)
    assert (planned.layout.ici.context, planned.recipe.context_exchange) == (4, strategy)
    assert planned.estimate.communication_s["context"] > 0
    values = run_config.config_values(run_config.workload_of(config, shape), planned, model="llama3-8b")
    again = run_config.priced(with_overrides(RunConfig(), run_config.as_overrides(values)), shape, place)
    assert (again.layout, again.recipe) == (planned.layout, planned.recipe)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["dcn_context_parallelism=2", "ici_fsdp_parallelism=8"],
            "dcn_context_parallelism = 2: .* can be trained but not priced; ask slicewise compile, or use ici_context",
        ),
        (
            ["ici_context_parallelism=8", "sequence_length=24"],
            "sequence_length = 24 does not fall into the 16 equal chunks .*; use 16 or 32",
        ),
        (
            ["ici_context_parallelism=8", "context_strategy=ulysses"],
            "context parallelism 8 does not divide kv_heads = 2 of demo-1m; use 2 ways, or all_gather or ring",
        ),
        (
            ["model=demo-moe", "moe_dispatch=capacity", "ici_context_parallelism=2"],
            "moe_dispatch = capacity counts the tokens .* use dropless",
        ),
    ],
)
def test_a_context_axis_that_cannot_be_is_not_priced(overrides, message):
    config = config_of(*overrides)
    dcn = 2 if "dcn_context_parallelism=2" in overrides else 1
    with pytest.raises(UserError, match=message):
        run_config.priced(config, model_shape(model.load(config.model.model)), slices.cluster("v5e:2x4", dcn))


def test_changes_name_the_key():
    now = candidate(Layout(Degrees(fsdp=8), Degrees(data=2), 64))
    then = candidate(Layout(Degrees(fsdp=4, context=2), Degrees(data=2), 64, 2))
    found = {c.what: c for c in run_config.changes(now, then)}
    assert set(found) == {"fsdp over ICI", "context over ICI", "accumulation steps"}
    assert found["context over ICI"].key == "ici_context_parallelism"
    assert (found["fsdp over ICI"].key, found["fsdp over ICI"].now) == ("ici_fsdp_parallelism", "8")
    assert (found["accumulation steps"].key, found["accumulation steps"].then) == (
        "gradient_accumulation_steps",
        "2",
    )


@pytest.mark.parametrize(
    ("override", "optimizer_share", "host_share"),
    [
        ("optimizer_state_dtype=int8", 0.25, 0),
        ("optimizer_type=lion", 0.5, 0),
        ("shard_optimizer_over_data=true", 0.5, 0),  # two slices, each a replica
        ("optimizer_state_memory=host", 0, 1),
    ],
)
def test_the_state_of_the_optimiser_is_priced_as_it_is_kept(override, optimizer_share, host_share):
    whole = run_config.priced(config_of(), SHAPE, PLACE).estimate
    kept = run_config.priced(config_of(override), SHAPE, PLACE).estimate
    assert kept.hbm_bytes["optimizer"] == optimizer_share * whole.hbm_bytes["optimizer"]
    assert kept.host_bytes == host_share * whole.hbm_bytes["optimizer"]
    assert ("host copies" in kept.other_s) == bool(host_share)


def test_accumulation_is_priced():
    now = run_config.priced(config_of("gradient_accumulation_steps=2"), SHAPE, PLACE)
    assert now.layout.accumulation_steps == 2


def test_writing_keeps_comments_order_and_permissions(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[data]\n# why so short\nsequence_length = 128\n\n[run]\nrun_name = "a" # mine\n')
    path.chmod(0o640)
    written = write_config(str(path), {"sequence_length": 512, "steps": 7, "checkpoint_every": 3})
    assert path.read_text() == (
        '[data]\n# why so short\nsequence_length = 512\n\n[run]\nrun_name = "a" # mine\nsteps = 7\n'
        "\n[checkpoint]\ncheckpoint_every = 3\n"
    )
    assert path.stat().st_mode & 0o777 == 0o640
    assert load_config(str(path)).config == written.config
    assert os.listdir(tmp_path) == ["run.toml"]


@pytest.mark.parametrize("before", ["[run]\nstepz = 1\n", "[run\n", "[run]\nsteps = -1\n"])
def test_a_file_that_is_no_config_is_left_alone(tmp_path, before):
    path = tmp_path / "run.toml"
    path.write_text(before)
    with pytest.raises(UserError):
        write_config(str(path), {"checkpoint_every": 3})
    assert path.read_text() == before


def test_values_that_are_no_config_are_not_written(tmp_path):
    path = tmp_path / "run.toml"
    with pytest.raises(UserError, match="steps"):
        write_config(str(path), {"steps": 0})
    assert not path.exists()


def test_a_missing_file_is_created_only_where_that_is_meant(tmp_path):
    path = tmp_path / "run.toml"
    with pytest.raises(UserError, match="No such file"):
        write_config(str(path), {"steps": 3}, create=False)
    write_config(str(path), {"steps": 3}, note="Planned.")
    assert path.read_text() == "# Planned.\n\n[run]\nsteps = 3\n"


@pytest.mark.parametrize("exists", [True, False])
def test_keys_that_a_layout_leaves_without_an_effect_are_left_out(exists, tmp_path):
    """The written config is one that loads: a plan may choose bf16 where the config has scales of 8 bits."""
    path = tmp_path / "run.toml"
    given = {
        "quantization": "fp8",
        "quantization_calibrate_every": 9,
        "quantization_layers": "w_.*",
        "seed": 3,
    }
    if exists:
        write_config(str(path), given)
        written = write_config(str(path), {"quantization": "none"})
    else:
        written = write_config(str(path), given | {"quantization": "none"})
    assert written.left_out == ("quantization_layers", "quantization_calibrate_every")
    assert written.note == (
        "; without quantization_layers, quantization_calibrate_every, which has no effect then"
    )
    config = load_config(str(path)).config
    assert config == written.config
    assert (config.quantization, config.run.seed) == ("none", 3)


def test_a_file_with_a_key_without_an_effect_is_not_mended_in_passing(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[model]\nquantization_calibrate_every = 9\n")
    with pytest.raises(UserError, match="quantization_calibrate_every = 9 has no effect"):
        write_config(str(path), {"seed": 1})
