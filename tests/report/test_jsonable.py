import json
import math

import pytest

from slicewise.catalog import chips, model, slices
from slicewise.costs.layout import Degrees, Layout, Recipe
from slicewise.costs.roofline import Roofline
from slicewise.plan.roofline import matmul
from slicewise.report import jsonable


def test_records_become_their_fields_and_derived_values():
    found = jsonable.jsonable(Roofline(2.0, 3.0))
    assert found == {"math_s": 2.0, "comms_s": 3.0, "lower_s": 3.0, "upper_s": 5.0, "bound": "bandwidth"}


def test_catalog_entries_become_names():
    assert jsonable.jsonable(chips.load("v5p")) == "v5p"
    assert jsonable.jsonable(model.load("demo-1m")) == "demo-1m"
    cluster = jsonable.jsonable(slices.cluster("v5p:4x4x4", 2))
    assert cluster == {
        "chip": "v5p", "topology": "4x4x4", "accelerator_type": "v5p-128", "chips": 64, "slices": 2,
        "total_chips": 128,
    }  # fmt: skip


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_null(value):
    assert json.loads(jsonable.text({"a": jsonable.jsonable(value)})) == {"a": None}


def test_layouts_count_sequences_of_one_microbatch():
    found = jsonable.jsonable(Layout(Degrees(fsdp=4, context=2), Degrees(data=2), 64, 2))
    assert found["batch_per_device"] == 2.0
    assert found["accumulation_steps"] == 2
    assert found["ici"] == {"data": 1, "fsdp": 4, "tensor": 1, "context": 2, "expert": 1, "pipeline": 1}


def test_recipes_list_saved_tensors_in_order():
    found = jsonable.jsonable(Recipe())
    assert found == {
        "remat_policy": "full", "saved": ["decoder_layer_input"], "offloaded": [], "precision": "bf16",
        "context_strategy": "all_gather",
    }  # fmt: skip


def test_a_document_says_what_it_is_and_explains_itself():
    found = jsonable.document("matmul", matmul(512, 8192, 8192, chips.load("v5e")))
    assert (found["kind"], found["schema"]) == ("matmul", 1)
    assert found["explanation"][0].startswith("[512, 8192]")
    assert json.loads(jsonable.text(found)) == found


def test_unknown_values_are_a_defect_not_a_guess():
    with pytest.raises(TypeError, match="no JSON for"):
        jsonable.jsonable(object())


def test_every_listed_property_exists():
    import importlib

    for name, properties in jsonable.PROPERTIES.items():
        module, _, cls = name.rpartition(".")
        record = getattr(importlib.import_module(f"slicewise.{module}"), cls)
        for key in properties:
            assert isinstance(getattr(record, key), property), (name, key)
