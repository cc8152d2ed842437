import math
import subprocess
import sys
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.catalog import chips
from slicewise.catalog import model as models
from slicewise.config import (
    AXES,
    SECTION_OF,
    RunConfig,
    describe,
    load_config,
    resolve_degrees,
    with_overrides,
)
from slicewise.errors import UserError
from slicewise.launch.workers import read_inventory
from slicewise.plan.write import write_config


def resolved(overrides, slices, devices):
    return resolve_degrees(load_config(None, overrides).config, num_slices=slices, devices_per_slice=devices)


def test_file_then_overrides_and_origins(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[run]\nsteps = 7\nseed = 3\n[optimizer]\nlearning_rate = 1\n")
    loaded = load_config(str(path), ["steps=9", "run_name=a.b", "tensorboard=false"])
    assert (loaded.config.run.steps, loaded.config.run.seed, loaded.config.optimizer.learning_rate) == (
        9,
        3,
        1.0,
    )
    assert loaded.config.metrics.tensorboard is False
    assert loaded.origins["steps"] == "command line"
    assert loaded.origins["seed"] == str(path)
    assert loaded.origins["model"] == "default"


def test_a_byte_order_mark_at_the_start_of_any_toml_file_is_passed_over(tmp_path):
    mark = b"\xef\xbb\xbf"
    run, chip, model, hosts = (tmp_path / f"{name}.toml" for name in ("run", "chip", "model", "hosts"))
    run.write_bytes(mark + b"[run]\nsteps = 7\n")
    assert load_config(str(run)).config.run.steps == 7
    write_config(str(run), {"seed": 5})
    assert (load_config(str(run)).config.run.steps, load_config(str(run)).config.run.seed) == (7, 5)
    chip.write_bytes(mark + b"[v5p]\non_demand = 1.5\n")
    assert chips.load("v5p", None, str(chip), None).name == "v5p"
    tiny = resources.files("slicewise.catalog").joinpath("models/demo-tiny.toml").read_bytes()
    model.write_bytes(mark + tiny)
    assert models.load(str(model)) == models.load("demo-tiny")
    hosts.write_bytes(mark + b"[[worker]]\nslice = 0\nworker = 0\n")
    with pytest.raises(UserError) as found:
        read_inventory(hosts)
    assert "not valid TOML" not in str(found.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["compiler_flags=schedulr"], "unknown group 'schedulr'. Did you mean 'scheduler'"),
        (["compiler_flags=xla_tpu_no=1"], "has no option 'xla_tpu_no'"),
        (["scoped_vmem_limit_kib=1"], "scoped_vmem_limit_kib = 1: expected at least"),
        (["lora_rank=4", "lora_layers=("], r"lora_layers = '\(' is no regular expression"),
        (
            ["quantization=int8", "quantization_layers=("],
            r"quantization_layers = '\(' is no regular expression",
        ),
        (["quantization=int8", "quantization_fixed_range=1e7"], "quantization_fixed_range = 1e.07: expected"),
        (
            ["quantization=fp8", "quantization_fixed_range=4", "quantization_calibrate_every=2"],
            "does not go with quantization_fixed_range = 4.0",
        ),
        (
            ["quantization=fp8", "quantization_scaling=tile", "quantization_calibrate_every=2"],
            "does not go with quantization_scaling = 'tile'",
        ),
    ],
)
def test_values_that_no_run_takes_are_refused_where_a_config_is_read(overrides, message):
    with pytest.raises(UserError, match=message):
        load_config(None, overrides)


def test_values_of_a_stored_config_are_not_judged_again():
    config = load_config(None, ["compiler_flags=scheduler"]).config
    stored = config.compiler.model_copy(update={"compiler_flags": ("of-an-older-version",)})
    with_overrides(config.model_copy(update={"compiler": stored}), ["steps=3"])
    with pytest.raises(UserError, match="unknown group 'of-another'"):
        with_overrides(config, ["compiler_flags=of-another"])


def test_described_config_reads_back_as_the_same_config(tmp_path):
    config = load_config(None, ["steps=9", "ici_tensor_parallelism=2", 'model=a "b"']).config
    path = tmp_path / "run.toml"
    lines = {}
    for row in describe(load_config(None, ["steps=9", "ici_tensor_parallelism=2", 'model=a "b"'])):
        lines.setdefault(row.section, []).append(f"{row.key} = {row.value}")
    path.write_text("\n".join(f"[{s}]\n" + "\n".join(keys) for s, keys in lines.items()))
    again = load_config(str(path)).config
    assert again.model_dump(exclude={"optimizer"}) == config.model_dump(exclude={"optimizer"})
    assert again.warmup_steps == config.warmup_steps


def test_every_leaf_key_is_unique_and_there_are_fewer_than_100():
    keys = [key for field in RunConfig.model_fields.values() for key in field.annotation.model_fields]
    assert len(keys) == len(set(keys)) == len(SECTION_OF) < 100


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stepz=3", "unknown key 'stepz'. Did you mean 'steps'?"),
        ("steps=many", "steps = 'many'"),
        ("steps=0", "greater than 0"),
        ("steps=1.5", "steps = 1.5"),
        ("dataset=txt", "'text'"),
        ("run_name=../x", "run_name = '../x'"),
        ("steps", "write key=value"),
        ("adam_b1=1", "less than 1"),
        ("run=3", "'run' is a section"),
        ("steps=true", "steps = True: input should not be true or false"),
        ("warmup_steps=false", "warmup_steps = False: input should not be true or false"),
        ("steps=2147483648", "steps = 2147483648: input should be at most 2147483647"),
        ("warmup_steps=99999999999999", "at most 2147483647"),
        ("learning_rate=inf", "learning_rate = inf: input should be a finite number"),
        (
            "use_max_logits_estimate=1e39",
            "use_max_logits_estimate = 1e+39: input should be less than or equal to",
        ),
        ("z_loss_weight=nan", "z_loss_weight = nan"),
        ("output_directory=", "output_directory = ''"),
        ("model=", "model = ''"),
        ("tokenizer=", "tokenizer = ''"),
    ],
)
def test_bad_override_is_one_sentence(override, message):
    with pytest.raises(UserError) as e:
        load_config(None, [override])
    assert message in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nstep = 3", "in [run]: unknown key 'step'. Did you mean 'steps'?"),
        ("steps = 3", "key 'steps' belongs in section [run]"),
        ("[model]\nsteps = 3", "key 'steps' belongs in section [run]"),
        ("[runs]\nsteps = 3", "unknown key 'runs'. Did you mean 'run'?"),
        ("run = 3", "'run' is a section and takes no value; write [run]"),
        ("[[run]]\nsteps = 3", "'run' is a section"),
        ("[run\n", "is not TOML"),
        ("[run]\nsteps = 'x'", "steps = 'x'"),
    ],
)
def test_bad_file_is_one_sentence_with_its_name(tmp_path, text, message):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(UserError) as e:
        load_config(str(path))
    assert message in str(e.value)
    assert str(path) in str(e.value)


def test_the_seed_may_be_larger_than_other_numbers():
    assert load_config(None, ["seed=4294967295"]).config.run.seed == 2**32 - 1


def test_absent_file_and_undecodable_file(tmp_path):
    with pytest.raises(UserError, match="config file ''"):
        load_config("")
    with pytest.raises(UserError, match="No such file"):
        load_config(str(tmp_path / "none.toml"))
    (tmp_path / "bin.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is not TOML"):
        load_config(str(tmp_path / "bin.toml"))


def test_overrides_of_a_finished_config_are_checked_too():
    config = with_overrides(RunConfig(), ["steps=5"])
    assert config.run.steps == 5
    with pytest.raises(UserError, match="Did you mean 'steps'"):
        with_overrides(RunConfig(), ["stepz=5"])


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=len(AXES), max_size=len(AXES)),
    st.integers(0, len(AXES) - 1),
)
def test_filled_axis_makes_the_product_match(degrees, fill):
    size = math.prod(degrees)
    asked = [-1 if i == fill else d for i, d in enumerate(degrees)]
    keys = [f"ici_{axis}_parallelism={d}" for axis, d in zip(AXES, asked, strict=True)]
    assert [resolved(keys, 1, size).ici[axis] for axis in AXES] == degrees


def test_mismatch_names_both_numbers_and_what_fits():
    with pytest.raises(UserError) as e:
        resolved(["ici_fsdp_parallelism=3", "ici_tensor_parallelism=2"], 2, 4)
    message = str(e.value)
    assert "multiply to 6" in message
    assert "4 devices per slice" in message
    assert "1x2x2" in message
    with pytest.raises(UserError, match=r"dcn_ axes multiply to 3 .* 2 slices"):
        resolved(["dcn_data_parallelism=3"], 2, 4)


def test_a_mismatch_lists_every_axis_that_was_asked_for():
    """First come the splits that keep what was asked of an axis that not every layout has."""
    asked = ["ici_fsdp_parallelism=2", "ici_context_parallelism=2", "ici_pipeline_parallelism=1"]
    fit = r"\(ici_fsdp_parallelism=2 x ici_context_parallelism=2\).*\(data x fsdp x context x tensor\): 1x4x2x1, "
    with pytest.raises(UserError, match=fit):
        resolved(asked, 1, 8)
    with pytest.raises(UserError, match=r"fit \(data x pipeline x fsdp x tensor\): 1x1x2x1, 1x2x1x1, "):
        resolved(["dcn_pipeline_parallelism=4", "dcn_data_parallelism=1"], 2, 8)


def test_two_filling_axes_and_zero_are_refused():
    with pytest.raises(UserError, match="only one ici_ axis may fill"):
        resolved(["ici_data_parallelism=-1"], 1, 4)
    with pytest.raises(UserError, match="ici_data_parallelism = 0"):
        resolved(["ici_data_parallelism=0"], 1, 4)


def test_config_verb_prints_values_with_origins():
    command = [sys.executable, "-m", "slicewise", "config", "steps=9", "--local", "2x2x2"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "steps = 9  # command line" in out
    assert "ici_fsdp_parallelism = 4  # derived from the cluster" in out
    assert "dcn_data_parallelism = 2  # derived from the cluster" in out
