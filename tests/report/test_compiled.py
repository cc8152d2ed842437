"""A compiled step in words, numbers and JSON, from small steps that the compiler left. Total time: two seconds."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from slicewise.compile.beside import beside_plan
from slicewise.config import with_overrides
from slicewise.errors import UserError
from slicewise.report import compiled as report
from slicewise.report.jsonable import text as as_text

NAMES = ("tiny_v5e", "tiny_v5p_two_slices", "tiny_v5e_decode")


def shown(step, comparison=None):
    comparison = comparison or beside_plan(step.request, step.estimate)
    out = Console(file=io.StringIO(), width=160, color_system=None)
    report.show(out, step, comparison)
    return out.file.getvalue()


def row(text, name):
    """The cells of the first row that begins with ``name``."""
    line = next(line for line in text.splitlines() if line.startswith(name))
    return [cell for cell in line.split("  ") if cell]


def test_a_step_that_fits_is_told_from_the_answer_to_the_details(compiled_step):
    step = compiled_step("tiny_v5e")
    text = shown(step)
    assert text.startswith("demo-tiny on 1 x v5e 2x2 (4 chips): a training step, 2,048 tokens\nIt fits: ")
    order = ["Predicted: ", "Depth: schedule.", "From the cache; compiling took", "Memory of a device",
             "Largest buffers", "Time of the core by part and pass", "Communication of a device",
             "FLOPs of a device", "Beside the plan of the same config", "The largest difference: "]  # fmt: skip
    places = [text.index(title) for title in order]
    assert places == sorted(places)


@pytest.mark.parametrize("name", NAMES)
def test_parts_and_waits_add_up_to_the_step(compiled_step, name):
    step = compiled_step(name)
    total = sum(step.seconds.values()) + sum(report.waits(step).values())
    assert total == pytest.approx(step.estimate.step_time_s, rel=1e-6)
    assert sum(report.kinds(step).values()) == pytest.approx(sum(step.seconds.values()))
    assert set(report.parts(step)) == {part for part, _ in step.seconds}


def test_the_passes_of_a_training_step_stand_in_the_order_in_which_it_goes_through_them(compiled_step):
    assert report.passes(compiled_step("tiny_v5e")) == ["forward", "recomputed", "backward", "update"]
    assert report.passes(compiled_step("tiny_v5e_decode")) == ["forward"]


def test_parts_of_the_model_are_told_apart(compiled_step):
    assert {"attention", "mlp", "output", "embedding", "optimizer"} <= set(
        report.parts(compiled_step("tiny_v5e"))
    )
    assert "optimizer" not in report.parts(compiled_step("tiny_v5e_decode"))


def test_communication_is_by_mesh_axis_and_network(compiled_step):
    text = shown(compiled_step("tiny_v5e")).partition("Communication of a device")[2]
    assert row(text, "fsdp ")
    assert row(text, "tensor ")
    two = shown(compiled_step("tiny_v5p_two_slices")).partition("Communication of a device")[2]
    assert row(two, "dcn data ")


def test_each_link_says_how_busy_it_is(compiled_step):
    said = report.busy(compiled_step("tiny_v5p_two_slices"))
    assert said.startswith("Busy of a step: core ")
    assert all(f"{name} " in said for name in ("ICI x+", "DCN", "Host link, out", "Host link, in"))
    assert said in shown(compiled_step("tiny_v5p_two_slices"))


def test_host_transfers_and_host_memory_stand_apart(compiled_step):
    step = compiled_step("tiny_v5p_two_slices")
    text = shown(step)
    assert step.memory.host_bytes > 0
    assert row(text, "on the host, apart")[1].strip() == report.size(step.memory.host_bytes)
    assert row(text, "host transfers")
    assert "on the host" not in shown(compiled_step("tiny_v5e")).partition("Beside the plan")[0]


def test_buffers_say_what_makes_them(compiled_step):
    rows = report.buffer_rows(compiled_step("too_large_v5e").memory.largest)
    assert all(made for _, made, _, _ in rows)
    saved = next(r for r in rows if r[0] == "saved activations")
    assert saved[1].startswith("decoder_layer_input, model/transformer.py:")
    assert saved[2] == "bf16[32,2,8192,4096]"
    assert saved[3] == "4.00 GiB"
    assert any(made == "state.params.layers.w_gate" for _, made, _, _ in rows)


def test_what_does_not_fit_is_told_with_its_buffers_and_nothing_of_time(compiled_step):
    step = compiled_step("too_large_v5e")
    text = shown(step)
    assert not step.fits
    verdict = text.splitlines()[1]
    assert verdict.startswith("It does not fit: ")
    assert "15.75 GiB are there." in verdict
    assert "Largest buffers" in text
    assert "Predicted" not in text
    assert "Time of the core" not in text


def test_what_fits_for_the_compiler_but_not_for_the_chip_does_not_fit(compiled_step):
    step = compiled_step("tiny_v5e")
    small = replace(step, memory=replace(step.memory, limit_bytes=2**20))
    assert not small.fits
    assert report.verdict(small).startswith("It does not fit: it needs ")
    assert "more than the 1.00 MiB there are." in report.verdict(small)


def test_saved_activations_are_listed_by_name(compiled_step):
    text = shown(compiled_step("too_large_v5e"))
    assert row(text, "  decoder_layer_input")[1].strip() == "4.00 GiB"


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for"
            " HLO temporaries (23.46G) exceeds available HBM (15.75G).",
            "it needs 23.46 GiB a device, and 15.75 GiB are there.",
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.10G of 15.75G hbm. Exceeded hbm"
            " capacity by 4.35G.",
            "it needs 20.10 GiB a device, and 15.75 GiB are there.",
        ),
        ("CompileTimeHbmOom: something new", "something new"),
        ("no such words", "no such words"),
    ],
)
def test_the_compilers_message_becomes_a_sentence(message, sentence):
    assert report.refusal(message) == sentence


@pytest.mark.parametrize(
    ("bytes_", "said"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (15.75 * 2**30, "15.75 GiB"),
        (200 * 2**20, "200.0 MiB"),
    ],
)
def test_sizes_are_in_powers_of_two(bytes_, said):
    assert report.size(bytes_) == said


def test_a_full_compile_says_that_the_cycles_are_the_compilers(compiled_step):
    step = compiled_step("tiny_v5e")
    full = replace(step, request=replace(step.request, depth="full"), from_cache=False)
    assert report.depth(full).startswith("Depth: full.")
    assert report.cost_of_compiling(full).startswith("Compiling took ")


def test_recomputed_flops_stand_beside_useful_ones(compiled_step):
    step = compiled_step("tiny_v5e")
    text = shown(step).partition("FLOPs of a device")[2]
    assert row(text, "useful")
    assert row(text, "  recomputed")
    assert step.flops["recomputed"] > 0
    assert report.useful_flops(step) < report.executed_flops(step)


def test_the_plan_stands_beside_with_its_largest_difference_first(compiled_step):
    step = compiled_step("tiny_v5e")
    comparison = beside_plan(step.request, step.estimate)
    assert comparison.planned is not None
    text = shown(step, comparison).partition("Beside the plan")[2]
    ratio = step.estimate.step_time_s / comparison.planned.step_time_s
    assert row(text, "a step")[-1].strip() == f"{ratio:.2f}"
    first = comparison.lines[0]
    assert f"The largest difference: {first.name} takes " in text
    assert "not priced" in text


def test_a_program_without_a_price_says_so(compiled_step):
    text = shown(compiled_step("tiny_v5e_decode"))
    assert "The planner prices training steps, and no decode." in text
    assert "compiled / planned" not in text


@pytest.mark.parametrize("name", [*NAMES, "too_large_v5e"])
def test_json_holds_everything_with_units_in_its_keys(compiled_step, name):
    step = compiled_step(name)
    found = json.loads(as_text(report.document(step, beside_plan(step.request, step.estimate))))
    assert found["kind"] == "compiled step"
    assert found["fits"] is (name != "too_large_v5e")
    assert found["estimate"]["source"] == "compile"
    assert found["memory"]["total_bytes"] == pytest.approx(sum(found["memory"]["hbm_bytes"].values()))
    assert {"component", "source", "bytes"} <= set(found["memory"]["largest"][0])
    assert sum(r["seconds"] for r in found["seconds"]) == pytest.approx(sum(step.seconds.values()))
    assert {"axes", "bytes", "seconds", "exposed_s", "overlapped_s"} <= set(found["communication"][0])
    assert found["compiling"]["cpu_s"] > 0
    assert (found["plan"] is None) == bool(found["plan_reason"])
    assert (found["compiler_message"] is None) == found["fits"]


def test_a_config_that_the_planner_cannot_price_is_still_shown(compiled_step, monkeypatch):
    def refuse(*_):
        raise UserError("only bfloat16 steps can be priced.")

    monkeypatch.setattr("slicewise.compile.beside.priced", refuse)
    text = shown(compiled_step("tiny_v5e"))
    assert "The planner has no price for this config: only bfloat16 steps can be priced." in text


@pytest.mark.parametrize(("kind", "said"), [("fp8", True), ("int8", False), ("none", False)])
def test_says_where_8_bits_save_no_time(kind, said, compiled_step):
    step = compiled_step("tiny_v5e")
    config = with_overrides(step.request.config, [f"quantization={kind}"])
    step = replace(step, request=replace(step.request, config=config))
    assert ("v5e has no fp8 matrix unit" in (report.quantization(step) or "")) == said
