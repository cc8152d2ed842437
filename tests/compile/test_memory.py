"""Components of memory in small steps that the compiler left. Total time: one second."""

from dataclasses import replace

import pytest

from slicewise.compile.memory import memory_of, parse_allocations, parse_live_ranges

GIB = 2**30
NAMES = ("tiny_v5e", "tiny_v5p_two_slices", "tiny_v5e_decode", "too_large_v5e")


@pytest.mark.parametrize("name", NAMES)
def test_components_are_all_that_the_compiler_allocates_in_device_memory(compiled, compiled_step, name):
    memory = compiled_step(name).memory
    allocations = parse_allocations(compiled(name).text("buffers.txt"))
    expected = sum(a.bytes for a in allocations if a.space == 0 and "thread-local" not in a.kind)
    assert memory.total_bytes == expected
    assert all(held >= 0 for held in memory.hbm_bytes.values())


def test_saved_activations_gradients_and_copies_of_weights_are_told_apart(compiled_step):
    """Of Llama-3-8B on four devices: 32 layer inputs, float32 gradients of the layers, their weights in bfloat16."""
    held = compiled_step("too_large_v5e").memory.hbm_bytes
    layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert held["saved activations"] == pytest.approx(32 * 2 * 8192 * 4096 * 2, rel=0.02)
    assert held["gradients"] == pytest.approx(4 * layers / 4, rel=0.05)
    assert held["copies of weights"] == pytest.approx(2 * layers / 4, rel=0.05)
    assert held["optimizer"] == pytest.approx(2 * held["weights"], rel=0.01)


def test_saved_activations_go_by_the_names_that_remat_policies_know(compiled_step):
    """Full rematerialisation keeps the layers' inputs; the compiler adds what it does not want to compute again."""
    memory = compiled_step("too_large_v5e").memory
    assert memory.saved["decoder_layer_input"] == 32 * 2 * 8192 * 4096 * 2
    assert sum(memory.saved.values()) == pytest.approx(memory.hbm_bytes["saved activations"])
    named = next(b for b in memory.largest if b.tensor)
    assert (named.tensor, named.component) == ("decoder_layer_input", "saved activations")
    assert named.source.startswith("model/")
    assert compiled_step("tiny_v5e_decode").memory.saved == {}


def test_host_memory_is_apart(compiled_step):
    """Queries, keys and values of two layers that wait on the host, in whole tiles."""
    memory = compiled_step("tiny_v5p_two_slices").memory
    assert memory.host_bytes > 0
    assert "host" not in " ".join(memory.hbm_bytes)
    assert compiled_step("tiny_v5e").memory.host_bytes == 0


def test_a_cache_is_a_component_of_generation(compiled_step):
    held = compiled_step("tiny_v5e_decode").memory.hbm_bytes
    assert (
        held["cache"] == 2 * 2 * 2 * 256 * 2 * 16 * 2
    )  # k and v, layers, rows, tokens, heads, head dim, bf16
    assert "saved activations" not in held
    assert "gradients" not in held


def test_memory_over_the_schedule_stays_within_what_is_allocated(compiled_step):
    for name in NAMES:
        memory = compiled_step(name).memory
        peak = max(held for _, held in memory.over_schedule)
        assert 0.5 * memory.total_bytes - 2**22 <= peak <= memory.total_bytes
        assert memory.largest == tuple(sorted(memory.largest, key=lambda b: -b.bytes))


def test_fits_is_a_matter_of_the_limit(compiled_step):
    memory = compiled_step("tiny_v5e").memory
    assert memory.fits
    assert replace(memory, limit_bytes=memory.total_bytes).fits
    assert not replace(memory, limit_bytes=memory.total_bytes - 1).fits


def test_a_dump_without_allocations_holds_nothing(compiled_step):
    module = compiled_step("tiny_v5e").module
    memory = memory_of(module, "", "", GIB)
    assert memory.total_bytes == 0
    assert parse_allocations("") == []
    assert parse_live_ranges("") == ([], {})


def test_a_result_that_no_line_of_ours_makes_goes_by_its_name(compiled_step):
    """Such as the cache of a prefill, which the compiler copies out at the end."""
    place = "allocation 3: size 4096, page 0, maybe-live-out:"
    value = " value: <1004 copy-start.2{0} @0> (size=4096,offset=0): bf16[2,1024]{1,0}"
    memory = memory_of(compiled_step("tiny_v5e").module, f"BufferAssignment:\n{place}\n{value}\n", "", GIB)
    (buffer,) = memory.largest
    assert (buffer.component, buffer.op_name) == ("results", "copy-start.2")
