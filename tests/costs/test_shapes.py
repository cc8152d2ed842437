import pytest

from slicewise.catalog import model
from slicewise.costs.params import parameter_count
from slicewise.costs.shapes import model_shape


@pytest.mark.parametrize("name", model.names())
def test_shapes_hold_every_parameter_of_the_model(name):
    spec = model.load(name)
    counted = parameter_count(spec)
    shape = model_shape(spec)
    assert shape.parameters == counted.total + counted.prediction
    if not spec.prediction_layers:
        assert shape.active_parameters == counted.active


def test_layers_of_one_kind_are_one_group():
    shape = model_shape(model.load("deepseek-v3"))
    assert [layer.count for layer in shape.layers] == [3, 59]  # 58 sparse layers and the prediction layer
    assert shape.layers[1].experts == 256
    assert shape.layers[1].active == 8


def test_windowed_and_global_layers_are_told_apart():
    shape = model_shape(model.load("gemma3-27b"))
    windows = {layer.attention.window: layer.count for layer in shape.layers}
    assert windows == {1024: 52, None: 10}


def test_mlp_width_counts_what_a_token_passes():
    shape = model_shape(model.load("deepseek-v3"))
    assert shape.layers[1].mlp_width == 8 * 2048 + 2048
    assert model_shape(model.load("llama3-8b")).layers[0].mlp_width == 14336
