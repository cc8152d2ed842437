"""What is written is what was read: every family to the bit, in one file or several."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from slicewise.errors import ExitCode, UserError
from slicewise.interop import export
from slicewise.interop.weights import load_weights

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
FAMILIES = sorted(path.name for path in FIXTURES.iterdir())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_of_every_family_are_written_as_they_were_read(family, tmp_path):
    weights = load_weights(FIXTURES / family)
    files, parameters = export.save_weights(FIXTURES / family, tmp_path / "out", weights.__getitem__)
    assert files == ["model.safetensors"]
    wanted, found = (load_file(at / "model.safetensors") for at in (FIXTURES / family, tmp_path / "out"))
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    assert parameters == sum(tensor.size for tensor in wanted.values())
    assert (tmp_path / "out" / "config.json").read_bytes() == (FIXTURES / family / "config.json").read_bytes()


def test_large_models_are_written_in_several_files_in_the_type_of_the_config(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "FILE_BYTES", 20_000)
    model = tmp_path / "model"
    model.mkdir()
    values = json.loads((FIXTURES / "llama" / "config.json").read_text())
    values.pop("dtype", None)
    (model / "config.json").write_text(json.dumps(values | {"torch_dtype": "bfloat16"}))
    (model / "tokenizer.json").write_text("{}")
    weights = load_weights(FIXTURES / "llama")
    files, _ = export.save_weights(model, tmp_path / "out", weights.__getitem__)
    assert len(files) == 4
    assert files[0] == "model-00001-of-00004.safetensors"
    assert (tmp_path / "out" / "tokenizer.json").exists()
    again = load_weights(tmp_path / "out")
    assert again.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_allclose(again[name], weight, rtol=2**-8)


def test_what_cannot_be_written_is_refused(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    values = json.loads((FIXTURES / "llama" / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"dtype": "float8"}))
    with pytest.raises(UserError, match="dtype = 'float8': expected float32, float16, bfloat16"):
        export.save_weights(model, tmp_path / "out", {}.__getitem__)
    text = json.loads((FIXTURES / "gemma3" / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    with pytest.raises(UserError, match="a multimodal model cannot be written"):
        export.save_weights(model, tmp_path / "out", {}.__getitem__)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: File exists") as error:
        export.save_weights(FIXTURES / "llama", tmp_path / "file", {}.__getitem__)
    assert error.value.code == ExitCode.INTERNAL
