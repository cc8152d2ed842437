from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.catalog import model
from slicewise.costs.layout import Degrees, Layout, Recipe
from slicewise.costs.memory import device_total, memory_bytes
from slicewise.costs.remat import POLICIES, custom
from slicewise.costs.shapes import model_shape

GiB = 2**30
LLAMA8 = model_shape(model.load("llama3-8b"))
LLAMA70 = model_shape(model.load("llama3-70b"))
QKV = ("query_proj", "key_proj", "value_proj")
OFFLOAD = custom(
    dict.fromkeys(("decoder_layer_input", "out_proj", "query_proj", "key_proj", "value_proj"), "offload")
)


def total(shape, layout, recipe, seq=8192):
    return float(device_total(memory_bytes(shape, layout, recipe, seq))) / GiB


@pytest.mark.parametrize(
    ("shape", "degrees", "per_device", "seq", "places", "compiled_gib"),
    [
        # what training steps compiled for absent v5p (8B) and v6e (70B) hold, less the compiler's fragmentation
        (LLAMA8, Degrees(fsdp=16), 4, 4096, {}, 11.36),
        (LLAMA8, Degrees(fsdp=4, tensor=4), 4, 4096, {}, 12.89),
        (LLAMA8, Degrees(fsdp=16), 2, 8192, {"mlpwi_0": "device", "mlpwi_1": "device"}, 39.36),
        (LLAMA70, Degrees(fsdp=256), 5, 8192, dict.fromkeys(QKV, "offload"), 21.19),
    ],
)
def test_memory_agrees_with_the_compiler(shape, degrees, per_device, seq, places, compiled_gib):
    layout = Layout(degrees, global_batch=per_device * degrees.fsdp * degrees.tensor)
    recipe = Recipe(
        remat=custom({"decoder_layer_input": "offload"} | places), loss_in_chunks=True, as_compiled_here=True
    )
    assert total(shape, layout, recipe, seq) == pytest.approx(compiled_gib, rel=0.07)


def test_state_is_spread_over_all_axes_but_data():
    whole = memory_bytes(LLAMA8, Layout(Degrees(fsdp=8), global_batch=64), Recipe(), 8192)
    replicated = memory_bytes(LLAMA8, Layout(Degrees(data=2, fsdp=4), global_batch=64), Recipe(), 8192)
    assert float(whole["optimizer"]) == pytest.approx(8 * LLAMA8.parameters / 8)
    assert replicated["optimizer"] == 2 * whole["optimizer"]
    assert replicated["activations"] == whole["activations"]


def test_offloading_moves_activations_to_the_host():
    layout = Layout(Degrees(fsdp=8), global_batch=24)
    kept = memory_bytes(LLAMA8, layout, Recipe(remat=POLICIES["save_qkv_proj"]), 8192)
    moved = memory_bytes(LLAMA8, layout, Recipe(remat=POLICIES["qkv_proj_offloaded"]), 8192)
    assert moved["host"] == kept["activations"] - moved["activations"]
    assert float(memory_bytes(LLAMA8, layout, Recipe(remat=OFFLOAD), 8192)["host"]) / GiB == pytest.approx(
        21.0
    )


def test_tensor_parallelism_shards_what_is_saved():
    one = memory_bytes(LLAMA8, Layout(Degrees(fsdp=8), global_batch=8), Recipe(), 8192)
    two = memory_bytes(LLAMA8, Layout(Degrees(fsdp=4, tensor=2), global_batch=8), Recipe(), 8192)
    assert two["activations"] == one["activations"]  # twice the tokens, half the width


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from(list(POLICIES.values())))
def test_accumulation_never_needs_more_memory(steps, policy):
    layout = Layout(Degrees(fsdp=16), global_batch=256)
    once = total(LLAMA8, layout, Recipe(remat=policy), 4096)
    split = total(LLAMA8, replace(layout, accumulation_steps=steps), Recipe(remat=policy), 4096)
    assert split <= once + 1e-6 + 4 * LLAMA8.parameters / 16 / GiB


def test_arrays_of_layouts_price_as_their_members_do():
    degrees = np.array([2, 4, 8])
    many = memory_bytes(
        LLAMA8, Layout(Degrees(fsdp=degrees, tensor=8 // degrees), global_batch=64), Recipe(), 4096
    )
    for k, degree in enumerate(degrees.tolist()):
        layout = Layout(Degrees(fsdp=degree, tensor=8 // degree), global_batch=64)
        one = memory_bytes(LLAMA8, layout, Recipe(), 4096)
        for name, value in one.items():
            assert np.broadcast_to(many[name], 3)[k] == pytest.approx(float(value))
