"""One small real compile for each chip generation, one of them over two slices. Total: a minute of one core."""

import importlib.util

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
