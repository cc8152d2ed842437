"""The collectives of compiled steps are those that the planner prices, for each family of layouts. Total: 5 seconds.

What the compiler left is kept in dumps/layouts, made by scripts/make_compiled_dumps.py.
"""

import dataclasses
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from slicewise.catalog import slices
from slicewise.compile import hlo
from slicewise.compile.collectives import Layout
from slicewise.compile.inventory import SMALL_BYTES, by_kind, found_collectives
from slicewise.compile.work import Describer
from slicewise.config import load_config
from slicewise.costs.communication import Sent, priced_collectives
from slicewise.costs.device import device_of
from slicewise.costs.shapes import model_shape
from slicewise.interop.huggingface import load_spec
from slicewise.plan.run_config import priced

FAMILIES = sorted((Path(__file__).parent / "dumps" / "layouts").iterdir())
# Of the bytes of one kind over one set of axes. Most agree to a thousandth; what crosses slices is padded to tiles, and
# a pipeline sums the gradients of narrow matrices by all-reduces.
TOLERANCE = 0.1


def read(folder):
    asked, facts = (json.loads((folder / name).read_text()) for name in ("request.json", "facts.json"))
    config, cluster = (
        load_config(None, asked["overrides"]).config,
        slices.cluster(asked["slice"], asked["slices"]),
    )
    module = hlo.parse(gzip.decompress((folder / "scheduled.hlo.gz").read_bytes()).decode())
    return config, cluster, module, Layout(cluster, facts["mesh"], np.array(facts["devices"]))


@pytest.mark.parametrize("folder", FAMILIES, ids=lambda folder: folder.name)
def test_a_step_does_the_collectives_that_are_priced_and_no_others(folder):
    config, cluster, module, layout = read(folder)
    shape = model_shape(load_spec(config.model.model))
    step = priced(config, shape, cluster)
    planned = priced_collectives(shape, step.layout, step.recipe, config.data.sequence_length)
    wanted = by_kind(planned)
    describe = Describer(layout, device_of(cluster.chip))
    found = by_kind(
        dataclasses.replace(one, sent_bytes=times * one.sent_bytes)
        for times, one in found_collectives(module, describe)
        if one.sent_bytes >= SMALL_BYTES
    )
    assert found.keys() == wanted.keys()
    for kind, sent in wanted.items():
        assert found[kind] == pytest.approx(sent, rel=TOLERANCE), kind


def test_every_family_is_there():
    names = {folder.name for folder in FAMILIES}
    context = {"context_gathered", "context_ring", "context_ulysses"}
    assert names == context | {
        "data", "fsdp", "tensor", "fsdp_tensor", "dcn_data", "dcn_fsdp", "experts", "pipeline"
    }  # fmt: skip


def test_an_all_reduce_is_a_scatter_and_a_gather():
    axes = frozenset({"fsdp"})
    whole = by_kind([Sent("all-reduce", "ici", axes, 8.0)])
    assert whole == by_kind([Sent("reduce-scatter", "ici", axes, 4.0), Sent("all-gather", "ici", axes, 4.0)])


def test_what_a_loop_does_counts_as_often_as_it_runs():
    _, cluster, module, layout = read(next(f for f in FAMILIES if f.name == "fsdp"))
    found = list(found_collectives(module, Describer(layout, device_of(cluster.chip))))
    assert {times for times, _ in found} == {1, 32}
