"""One small real compile for each chip generation, one of them over two slices. Total: a minute of one core."""

import importlib.util
import re

import pytest

from slicewise.catalog import slices
from slicewise.compile.analysis import analyse
from slicewise.compile.compiler import Request, compile_request
from slicewise.config import load_config

TINY = ["model=demo-tiny", "sequence_length=256", "global_batch_size=16"]
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="no TPU compiler here: pip install 'slicewise[compile]'",
)


@pytest.mark.aot
@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("slice_", "num_slices"), [("v4:2x2x1", 1), ("v5p:2x2x1", 2), ("v6e:2x2", 1), ("tpu7x:2x2x1", 1)]
)
def test_every_generation_compiles_to_its_schedule(slice_, num_slices, program_cache):
    cluster = slices.cluster(slice_, num_slices)
    step = analyse(compile_request(Request(load_config(None, TINY).config, cluster)))
    e = step.estimate
    assert step.fits
    assert e.step_time_s > 0
    assert e.compute_s["matmul"] > 0
    assert e.compute_s["attention"] > 0  # the kernel is in the program
    over = {c.axes for c in step.communication}
    assert "fsdp" in over
    assert ("dcn data" in over) == (num_slices > 1)
    assert e.step_time_s == pytest.approx(
        sum(e.compute_s.values()) + sum(e.exposed_s.values()) + sum(e.other_s.values()), rel=0.02
    )
    assert sum(step.flops.values()) > 0.9 * e.model_flops / e.devices


@pytest.mark.aot
@pytest.mark.slow
@needs_compiler
def test_stages_send_microbatches_by_permutes_and_gather_weights_once_outside_of_the_ticks(program_cache):
    over_stages = ["ici_pipeline_parallelism=2", "ici_fsdp_parallelism=2", "pipeline_microbatches=4"]
    compiled = compile_request(
        Request(load_config(None, [*TINY, *over_stages]).config, slices.cluster("v5p:2x2x1"))
    )
    communication = {c.axes: c for c in analyse(compiled).communication}
    assert communication["pipeline"].seconds > communication["pipeline"].exposed_s > 0
    text = compiled.text("scheduled.hlo")
    permutes = re.findall(r"collective-permute-start\(.*source_target_pairs=(\{\{.*?\}\})", text)
    # Of a mesh of 2 x 2 devices the first dim is the stage: forward and backward, one hop on and one towards the first.
    assert len(permutes) >= 4
    assert all("{0,2}" in pairs for pairs in permutes)
    loops = [block for block in text.split("\n\n") if "/while/body/" in block and "ppermute" in block]
    assert loops
    gathers = re.compile(r" (all-gather|reduce-scatter|all-reduce)(-start)?\(")
    assert not [block for block in loops if "ENTRY" not in block and gathers.search(block)]
