"""The ablation table prints from what is kept, and judges claims by it."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def ablation():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import compile_ablation

        yield compile_ablation
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def kept(ablation):
    return json.loads(ablation.KEPT.read_text())


def test_the_step_of_8b_is_there_for_every_generation(ablation, kept):
    chips = {
        step.chip for step in ablation.STEPS if step.model == "llama3-8b" and ablation.results(step, kept)
    }
    assert chips == {"v4", "v5e", "v5p", "v6e", "tpu7x"}


def default(ablation, step, lines):
    return lines["default flags" if ablation.bare(step.chip) else "bare"]


def test_default_flags_hide_nine_tenths_of_what_could_be_hidden(ablation, kept):
    """On v4 no all-reduce is asynchronous."""
    found = {step: default(ablation, step, ablation.results(step, kept)) for step in ablation.STEPS}
    assert {step.chip for step, r in found.items() if r["hidden_share"] < 0.9} == {"v4"}
    assert all(r["hideable_s"] > 0 for r in found.values())


@pytest.mark.parametrize("chip", ["v5p", "v6e", "tpu7x"])
def test_default_flags_are_the_best_of_those_tried(chip, ablation, kept):
    step = next(s for s in ablation.STEPS if s.chip == chip)
    lines = {n: r for n, r in ablation.results(step, kept).items() if r.get("fits")}
    assert "default is the best" in ablation.flags_verdict(step, lines)


def test_copies_of_layer_inputs_to_the_host_are_hidden(ablation, kept):
    step = next(s for s in ablation.STEPS if s.chip == "v6e" and s.model == "llama3-8b")
    lines = ablation.results(step, kept)
    offloaded = lines[f"{ablation.HOST}, default flags"]
    assert offloaded["host_s"] > 0.1
    assert offloaded["host_exposed_s"] < offloaded["host_s"] / 10
    assert offloaded["hbm_bytes"] < default(ablation, step, lines)["hbm_bytes"]
    assert "copies to and from the host" in ablation.line(offloaded, lines["bare"])


def test_what_default_flags_do_not_hide_is_said_with_its_reason(ablation):
    step = next(s for s in ablation.STEPS if s.chip == "v4")
    shown = [("all-reduce of mlp, backward: synchronous", 0.0913)]
    name = "default flags" if ablation.bare("v4") else "bare"
    lines = {name: {"hidden_share": 0.25, "exposed": shown}, ablation.TWO: {"hidden_share": 0.5}}
    said = list(ablation.hidden_verdict(step, lines))
    assert said[0].startswith("hidden: 25% of what could be")
    assert " ".join(said[1].split()) == "91 ms all-reduce of mlp, backward: synchronous"
    assert "no asynchronous form" in said[2]
    assert said[3].strip() == "layers_per_round = 2 hides 50%"
    assert list(ablation.hidden_verdict(step, {name: {"hidden_share": 0.95}})) == []


def test_what_is_slower_is_said_with_its_reason(ablation):
    step = next(s for s in ablation.STEPS if s.chip == "v5p")
    lines = {
        "default flags": {"step_time_s": 1.1},
        "scheduler": {"step_time_s": 1.0},
        "int8": {"step_time_s": 0.5},
    }
    assert "is 10.0% behind scheduler" in ablation.flags_verdict(step, lines)
    assert ablation.flags_verdict(step, {"scheduler": {"step_time_s": 1.0}}) == "the default was not compiled"


def line(seconds, fits=True):
    return {"step_time_s": seconds, "hbm_bytes": 2.0**30, "fits": fits}


def test_claims_are_confirmed_refuted_or_open(ablation):
    short = {"bare": line(1.3), "fp8": line(1.0), "larger VMEM": line(1.31), "remat full": line(1.5)}
    short["remat minimal"] = line(1.2, fits=False)
    long = {"bare": line(9.0), "remat minimal": {"refused": "too large"}}
    found = ablation.ablation_claims.claims(short, long, {"without_s": 2.0, "with_s": 1.0})
    assert [claim.holds for claim in found] == [True, False, None, False, True, True]


def test_the_table_prints(ablation, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compile_ablation.py"])
    ablation.main()
    out = capsys.readouterr().out
    assert "llama3-8b on 1 x v5p:4x4x4" in out
    assert "confirmed  FP8" in out
