"""Keys that nothing listens to are refused, and those that say what is so anyway are not."""

import pytest

from slicewise.catalog import model, slices
from slicewise.config import check_effects, load_config, resolve_degrees, with_overrides
from slicewise.costs.effects import NEEDS
from slicewise.costs.shapes import model_shape
from slicewise.errors import UserError


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "quantization_scaling=axis",
            "quantization_scaling = axis has no effect with quantization = none; choose fp8, fp8_e4m3 or int8, or leave"
            " quantization_scaling out.",
        ),
        ("quantization_layers=w_.*", "quantization_layers = 'w_.*' has no effect with quantization = none"),
        (
            "quantization_fixed_range=8",
            "quantization_fixed_range = 8.0 has no effect with quantization = none",
        ),
        ("quantization_calibrate_every=8", "quantization_calibrate_every = 8 has no effect"),
        ("quantization_stochastic_rounding=true", "quantization_stochastic_rounding = true has no effect"),
        (
            "attention=reference use_max_logits_estimate=5",
            "use_max_logits_estimate = 5.0 has no effect with attention = reference; set it to auto or splash",
        ),
        ("lora_alpha=8", "lora_alpha = 8.0 has no effect with lora_rank = 0; set it above 0"),
        ("lora_layers=w[qv]", "lora_layers = 'w[qv]' has no effect with lora_rank = 0"),
        ("lora_base_dtype=int8", "lora_base_dtype = int8 has no effect with lora_rank = 0"),
        ("min_slices=2", "min_slices = 2 has no effect with elastic = off; set it to accumulate or batch"),
        ("rollback_steps=2", "rollback_steps = 2 has no effect with on_bad_step = stop; set it to rollback"),
        ("profile_from=3", "profile_from = 3 has no effect with profile_steps = 0; set it above 0"),
    ],
)
def test_a_key_that_another_leaves_without_an_effect_is_refused(override, message):
    with pytest.raises(UserError) as error:
        load_config(None, override.split())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_tiles_need_their_scaling():
    with pytest.raises(
        UserError, match="quantization_tile = 64 has no effect with quantization_scaling = tensor"
    ):
        load_config(None, ["quantization=fp8", "quantization_tile=64"])
    load_config(None, ["quantization=fp8", "quantization_tile=64", "quantization_scaling=tile"])


def test_what_is_so_anyway_is_not_refused():
    """Such as the printed form of a whole config; and a switch leaves what it switches off."""
    defaults = ["quantization_scaling=tensor", "quantization_tile=128", "lora_alpha=16", "min_slices=1"]
    load_config(None, [*defaults, "quantization_stochastic_rounding=false", "lora_layers="])
    load_config(None, ["use_qwix_quantization=false", "quantization_scaling=axis", "quantization=fp8"])
    load_config(None, ["use_qwix_quantization=false", "quantization_scaling=axis"])


def test_a_stored_config_is_judged_by_what_is_new_only():
    stored = load_config(None, ["quantization=fp8", "quantization_scaling=axis"]).config
    plain = with_overrides(stored, ["quantization=none"])
    assert plain.model.quantization_scaling == "axis"
    with pytest.raises(UserError, match="quantization_layers = 'wq' has no effect"):
        with_overrides(plain, ["quantization_layers=wq"])


def test_every_need_is_of_keys_that_there_are():
    values = load_config(None).config
    known = {key for _, part in values for key in type(part).model_fields}
    assert {key for need in NEEDS for key in (*need.keys, need.of)} <= known


def check(*overrides, chip="v5e:2x4", count=2):
    config, place = load_config(None, list(overrides)).config, slices.cluster(chip, count)
    degrees = resolve_degrees(config, num_slices=count, devices_per_slice=place.slice.devices)
    check_effects(config, model_shape(model.load(config.model.model)), degrees, count)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["moe_dispatch=capacity"], "moe_dispatch = capacity has no effect on demo-1m, which has no experts"),
        (["capacity_factor=2"], "capacity_factor = 2.0 has no effect on demo-1m"),
        (["load_balance_loss_weight=0.01"], "load_balance_loss_weight = 0.01 has no effect on demo-1m"),
        (["prediction_loss_weight=0.1"], "demo-1m, which has no layers of multi-token prediction"),
        (
            ["remat_policy=custom", 'remat_tensors={kv_wa_proj="device"}'],
            "remat_tensors: demo-1m has no tensor kv_wa_proj; it has context, decoder_layer_input, key_proj",
        ),
        (["context_strategy=ring"], "without context parallelism; set ici_context_parallelism or"),
        (["pipeline_gather=microbatch"], "without pipeline parallelism; set ici_pipeline_parallelism or"),
        (["elastic=batch", "min_slices=3"], "min_slices = 3 is more than the 2 slices of the run"),
    ],
)
def test_a_key_about_what_model_or_devices_do_not_have_is_refused(overrides, message):
    with pytest.raises(UserError) as error:
        check(*overrides)
    assert message in str(error.value)


def test_a_key_about_what_there_is_is_taken():
    check("load_balance_loss_weight=0", "prediction_loss_weight=0")  # of what there is none anyway
    check("model=demo-moe", "moe_dispatch=capacity", "capacity_factor=2", "load_balance_loss_weight=0.01")
    check("context_strategy=ring", "ici_context_parallelism=2")
    check("pipeline_gather=microbatch", "dcn_pipeline_parallelism=2")
    check("elastic=batch", "min_slices=2")
    check("remat_policy=custom", 'remat_tensors={mla_q="device",kv_wa_proj="remat",moe_mlpwi="device"}')
