"""Search, fix and check, with the compiler replaced by a price: the real one is asked in tests/cli/test_compile.py."""

import dataclasses
import io
import json
import time

import pytest
from rich.console import Console

from slicewise.catalog import slices
from slicewise.compile import check, fix, search
from slicewise.compile.compiler import CompileFailed
from slicewise.config import load_config, with_overrides
from slicewise.costs.shapes import model_shape
from slicewise.errors import ExitCode, UserError
from slicewise.interop.huggingface import load_spec
from slicewise.plan.run_config import priced
from slicewise.report import trials

CLUSTER = slices.cluster("v5p:2x2x4")
BASE = ["model=llama3-8b", "sequence_length=4096", "global_batch_size=64"]


@pytest.fixture
def compiled_by_price(monkeypatch, compiled_step, program_cache):
    """Each request 'compiles' to what the planner expects; returns the requests that were made."""
    made = []
    template = compiled_step("tiny_v5e")

    def compile_request(request, **options):
        made.append(request)
        return request

    def analyse(request):
        shape = model_shape(load_spec(request.config.model.model))
        estimate = priced(request.config, shape, request.cluster).estimate
        memory = dataclasses.replace(
            template.memory, hbm_bytes=estimate.hbm_bytes, limit_bytes=estimate.hbm_limit_bytes
        )
        return dataclasses.replace(
            template, request=request, estimate=estimate, memory=memory, out_of_memory=None
        )

    for module in (search, fix):
        monkeypatch.setattr(module, "compile_request", compile_request)
        monkeypatch.setattr(module, "analyse", analyse)
    return made


def test_a_search_ranks_what_fits_and_never_loses_the_config_that_was_given(compiled_by_price):
    config = load_config(None, [*BASE, "remat_policy=full"]).config
    found = search.search_compiled(config, CLUSTER, top=5, seconds=60)
    assert len(found.trials) == len(compiled_by_price) == 6
    times = [t.step.estimate.step_time_s for t in found.trials if t.counts]
    assert times == sorted(times)
    given = next(t for t in found.trials if t.name == "as given")
    assert found.best.step.estimate.step_time_s <= given.step.estimate.step_time_s
    best = with_overrides(
        config, [f"{k}={v}" for k, v in found.best.changed.items() if not isinstance(v, dict)]
    )
    assert best.parallelism == found.best.config.parallelism


def test_the_fastest_mesh_is_tried_with_further_remat_policies(compiled_by_price):
    config = load_config(None, [*BASE, "remat_policy=full"]).config
    found = search.search_compiled(config, CLUSTER, top=9, seconds=60)
    assert len(found.trials) == 10
    meshes = [r.config.parallelism for r in compiled_by_price]
    assert len(set(meshes[:7])) >= 6
    assert len(set(meshes[7:])) == 1
    policies = [(r.config.model.remat_policy, r.config.model.remat_tensors) for r in compiled_by_price[7:]]
    assert len({str(p) for p in policies}) == 3
    best = min(found.trials, key=lambda t: t.planned_s)
    assert best.config.parallelism == meshes[-1]


def test_a_search_that_ran_out_of_time_says_how_many_are_left(compiled_by_price):
    config = load_config(None, BASE).config
    found = search.search_compiled(config, CLUSTER, top=4, seconds=0)
    assert (len(found.trials), found.skipped) == (0, 5)
    assert found.best is None
    assert "No layout was compiled." in said(found)


def test_a_layout_that_is_stopped_for_the_time_is_left_for_the_next_search(
    compiled_by_price, monkeypatch, tmp_path
):
    (log := tmp_path / "log").mkdir()

    def out_of_time(request, *, timeout_s, **limits):
        time.sleep(1.01 * timeout_s)
        stopped = CompileFailed("the compiler was stopped: it took longer", code=ExitCode.INTERNAL)
        stopped.left = log
        raise stopped

    monkeypatch.setattr(search, "compile_request", out_of_time)
    found = search.search_compiled(load_config(None, BASE).config, CLUSTER, top=2, seconds=1.2)
    assert (found.trials, found.skipped) == ((), 3)
    assert not log.exists()  # whose path no message says


def said(found):
    trials.show(Console(file=(text := io.StringIO()), width=200), found)
    return text.getvalue()


def test_a_layout_that_the_compiler_refuses_is_ranked_last_with_its_reason(compiled_by_price, monkeypatch):
    passes = search.compile_request

    def refuse_first(request, **options):
        if not compiled_by_price:
            compiled_by_price.append(request)
            raise UserError("the compiler crashed (code 1). Its log: x")
        return passes(request, **options)

    monkeypatch.setattr(search, "compile_request", refuse_first)
    found = search.search_compiled(load_config(None, BASE).config, CLUSTER, top=2, seconds=60)
    assert found.trials[-1].name == "as given"
    assert found.trials[-1].problem.startswith("the compiler crashed")


def test_limits_are_those_of_each_compile_of_a_search(compiled_by_price, monkeypatch):
    passes, given = search.compile_request, []

    def compile_request(request, **limits):
        given.append(limits)
        return passes(request)

    monkeypatch.setattr(search, "compile_request", compile_request)
    limits = {"timeout_s": 3.0, "memory_limit_bytes": 1e9}
    search.search_compiled(load_config(None, BASE).config, CLUSTER, top=1, seconds=60, **limits)
    assert given == [limits, limits]


@pytest.mark.parametrize("look", [search, fix])
def test_a_machine_that_cannot_compile_is_not_taken_for_a_layout_that_does_not_fit(
    compiled_by_price, monkeypatch, look
):
    def full_disk(request, **options):
        raise UserError("the cache cannot be written: No space left on device.", code=ExitCode.INTERNAL)

    monkeypatch.setattr(look, "compile_request", full_disk)
    config = load_config(None, [*BASE, "remat_policy=minimal"]).config
    asked = {
        search: lambda: search.search_compiled(config, CLUSTER, top=2, seconds=60),
        fix: lambda: fix.fixed(config, CLUSTER),
    }
    with pytest.raises(UserError, match="No space left"):
        asked[look]()


def test_a_fix_is_the_first_by_price_that_fits(compiled_by_price):
    config = load_config(None, ["model=llama3-8b", "sequence_length=8192", "global_batch_size=64"]).config
    cluster = slices.cluster("v6e:4x4")
    tried = []
    found = fix.fixed(config, cluster, tried=tried.append)
    assert found is not None
    assert found.fits
    assert [t.overrides for t in tried][-1] == found.overrides
    assert not any(t.fits for t in tried[:-1])
    planned = [p.planned_s for p in fix.proposals(config, cluster)]
    assert planned == sorted(planned)


def test_a_fix_tries_every_proposal_before_it_gives_up(compiled_by_price):
    config = load_config(None, ["model=llama3-70b", "sequence_length=32768", "global_batch_size=4096"]).config
    cluster, tried = slices.cluster("v5e:4x4"), []
    assert fix.fixed(config, cluster, tried=tried.append) is None
    assert [t.overrides for t in tried] == [p.overrides for p in fix.proposals(config, cluster)]
    assert len(tried) > 12


def test_nothing_is_proposed_that_would_take_more_memory():
    config = load_config(None, [*BASE, "remat_policy=full"]).config
    shape = model_shape(load_spec("llama3-8b"))
    now = priced(config, shape, CLUSTER).estimate.hbm_total_bytes
    for proposal in fix.proposals(config, CLUSTER):
        changed = with_overrides(config, proposal.overrides)
        assert priced(changed, shape, CLUSTER).estimate.hbm_total_bytes < now


def test_a_check_stores_once_then_compares(compiled_step, tmp_path):
    step, path = compiled_step("tiny_v5e"), str(tmp_path / "result.json")
    assert check.read(path, step.request) is None
    assert check.problems(step, None) == []
    check.write(path, step)
    stored = check.read(path, step.request)
    assert stored == check.Stored.of(step)
    assert check.problems(step, stored) == []
    faster = stored.model_copy(update={"step_time_s": 0.9 * stored.step_time_s})
    smaller = stored.model_copy(update={"hbm_bytes": 0.5 * stored.hbm_bytes})
    assert ["slower" in p for p in check.problems(step, faster)] == [True]
    assert ["above the stored" in p for p in check.problems(step, smaller)] == [True]
    elsewhere = dataclasses.replace(step.request, cluster=CLUSTER)
    with pytest.raises(UserError, match=r"is of update .* v5e:2x2 .*; this is update .* v5p:2x2x4"):
        check.read(path, elsewhere)


def test_a_check_fails_for_what_does_not_fit(compiled_step):
    assert "does not fit" in check.problems(compiled_step("too_large_v5e"), None)[0]


NUMBERS = [
    f'{{"what": "x", "step_time_s": {n}, "hbm_bytes": 1.0}}' for n in ("NaN", "-1.0", '"a"', "Infinity")
]


@pytest.mark.parametrize("text", ["", "{}", json.dumps({"slice": 1, "extra": 2}), "[]", *NUMBERS])
def test_a_stored_result_that_is_none_is_refused(compiled_step, tmp_path, text):
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(UserError, match="none of slicewise compile --check"):
        check.read(str(path), compiled_step("tiny_v5e").request)


def test_a_stored_result_that_is_no_file_is_refused_unread(compiled_step):
    with pytest.raises(UserError, match="/dev/zero: expected the path of a file"):
        check.read("/dev/zero", compiled_step("tiny_v5e").request)
