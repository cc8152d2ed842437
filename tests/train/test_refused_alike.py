"""What cannot be trained is not priced either, and the planner says it in the words of the training step."""

import jax
import pytest

from slicewise.catalog import slices
from slicewise.config import load_config, with_overrides
from slicewise.costs.shapes import model_shape
from slicewise.errors import UserError
from slicewise.interop.huggingface import load_spec
from slicewise.parallel.cluster import by_slice
from slicewise.parallel.mesh import build_mesh
from slicewise.plan import run_config
from slicewise.plan.search import Workload, search
from slicewise.train.step import build_train_step

CLUSTER = slices.cluster("v5e:2x4")
NARROW = """
name = "narrow"
source = "tests"
layers = 2
d_model = 60
heads = 4
kv_heads = 2
head_dim = 16
d_ff = 192
vocab = 258
"""


def refused(config):
    """The words of the planner and of the training step; empty where they take it."""
    words = []
    mesh = build_mesh(config, by_slice(jax.devices()))
    shape = model_shape(load_spec(config.model.model))
    for take in (
        lambda: run_config.priced(config, shape, CLUSTER),
        lambda: build_train_step(config, mesh),
    ):
        try:
            take()
            words.append("")
        except UserError as e:
            words.append(str(e))
    return words


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["ici_context_parallelism=2", "sequence_length=66"],
            "the 4 equal chunks .* by all_gather .* 64 or 68",
        ),
        (["ici_context_parallelism=2", "sequence_length=66", "context_strategy=ulysses"], ""),
        (
            ["ici_context_parallelism=4", "ici_tensor_parallelism=2", "context_strategy=ulysses"],
            "does not divide kv_heads / tensor parallelism = 1 of demo-tiny",
        ),
        (["lora_rank=4", "lora_layers=wx"], "matches no matrix of demo-tiny; the names are wq, wk"),
        (["model=demo-moe", "lora_rank=4", "lora_layers=moe.*"], "names moe.w_gate, and routed experts take"),
        (
            ["ici_pipeline_parallelism=2", "quantization=int8", "quantization_calibrate_every=4"],
            "quantization_calibrate_every = 4 does not go with a pipeline",
        ),
        (
            ["ici_pipeline_parallelism=2", "use_qwix_quantization=false", "quantization_calibrate_every=4"],
            "",
        ),
        (["model=gpt3-175b", "sequence_length=4096"], "exceeds the 2048 learned positions of gpt3-175b"),
        (["global_batch_size=65536", "sequence_length=65536"], "4,294,967,296 tokens a step: devices count"),
        (["model=NARROW", "ici_fsdp_parallelism=8"], "fsdp parallelism 8 does not divide d_model = 60"),
        (
            ["model=NARROW", "ici_context_parallelism=4", "ici_fsdp_parallelism=2"],
            "fsdp x context parallelism = 8 does not divide d_model = 60",
        ),
        (
            ["model=NARROW", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2", "ici_data_parallelism=2"],
            "",
        ),
    ],
)
def test_the_planner_refuses_what_training_refuses_in_its_words(overrides, message, tmp_path):
    (tmp_path / "narrow.toml").write_text(NARROW)
    overrides = [override.replace("NARROW", f"{tmp_path}/narrow.toml") for override in overrides]
    base = ["model=demo-tiny", "sequence_length=64", "global_batch_size=32", "attention=reference"]
    planned, trained = refused(load_config(None, [*base, *overrides]).config)
    assert planned == trained
    assert bool(planned) == bool(message)
    if message:
        with pytest.raises(UserError, match=message):
            raise UserError(planned)


@pytest.mark.parametrize("asked", ["auto", "splash"])
@pytest.mark.parametrize(
    ("strategy", "length", "message"),
    [
        ("all_gather", 384, "not a multiple of 256, which splash attention needs over .* 2; use 512"),
        ("ring", 768, "not a multiple of 512, which splash attention needs over .* 2; use 1024"),
    ],
)
def test_a_tpu_takes_whole_blocks_of_a_sequence(asked, strategy, length, message):
    """Training is refused in these words too: tests/kernels/attention/test_implementations.py."""
    keys = [f"sequence_length={length}", "ici_context_parallelism=2", f"context_strategy={strategy}"]
    config = load_config(None, ["model=demo-tiny", f"attention={asked}", "global_batch_size=4", *keys]).config
    shape = model_shape(load_spec("demo-tiny"))
    with pytest.raises(UserError, match=message):
        run_config.priced(config, shape, CLUSTER)
    run_config.priced(with_overrides(config, ["sequence_length=1024"]), shape, CLUSTER)


def test_a_search_does_not_propose_more_positions_than_a_model_has_learned():
    with pytest.raises(UserError, match="sequence_length = 4096 exceeds the 2048 learned positions"):
        search(Workload(model_shape(load_spec("gpt3-175b")), 4096, 8), CLUSTER)
