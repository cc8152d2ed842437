import json
import shutil
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from slicewise.costs.params import parameter_count
from slicewise.errors import UserError
from slicewise.interop.huggingface import spec_from_config
from slicewise.interop.weights import load_weights

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
DENSE = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt2"]


@pytest.fixture
def folder(tmp_path):
    """Copies a family's config.json; gives its folder and the family's tensors, to save after a change."""

    def copy(family, **config_changes):
        values = json.loads((FIXTURES / family / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(values | config_changes))
        return tmp_path, load_file(FIXTURES / family / "model.safetensors")

    return copy


def save(folder, tensors):
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / "model.safetensors")


def expected_shapes(spec):
    L, D, N, K, H, F = spec.layers, spec.d_model, spec.heads, spec.kv_heads, spec.head_dim, spec.d_ff
    norms = ["attn_norm", "mlp_norm"] + ["post_attn_norm", "post_mlp_norm"] * spec.post_norms
    shapes = {"embed": (spec.vocab, D), "final_norm.scale": (D,)}
    shapes |= {f"layers.{norm}.scale": (L, D) for norm in norms}
    if spec.norm == "layer":
        shapes |= {f"layers.{norm}.bias": (L, D) for norm in norms} | {"final_norm.bias": (D,)}
    shapes |= {"layers.wq": (L, D, N, H), "layers.wk": (L, D, K, H), "layers.wv": (L, D, K, H)}
    shapes |= {"layers.wo": (L, N, H, D), "layers.w_up": (L, D, F), "layers.w_down": (L, F, D)}
    if spec.gated_mlp:
        shapes["layers.w_gate"] = (L, D, F)
    if spec.qkv_bias:
        shapes |= {"layers.bq": (L, N, H), "layers.bk": (L, K, H), "layers.bv": (L, K, H)}
    if spec.attention_output_bias:
        shapes["layers.bo"] = (L, D)
    if spec.mlp_bias:
        shapes |= {"layers.b_up": (L, F), "layers.b_down": (L, D)}
    if spec.qk_norm:
        shapes |= {"layers.q_norm": (L, H), "layers.k_norm": (L, H)}
    if spec.position == "learned":
        shapes["position"] = (spec.max_context, D)
    if not spec.tied_embeddings:
        shapes["head"] = (D, spec.vocab)
    return shapes


@pytest.mark.parametrize("family", DENSE)
def test_every_weight_has_its_name_shape_and_float32_and_none_is_lost(family):
    spec, weights = spec_from_config(FIXTURES / family), load_weights(FIXTURES / family)
    assert {name: w.shape for name, w in weights.items()} == expected_shapes(spec)
    assert {w.dtype for w in weights.values()} == {np.dtype(np.float32)}
    assert sum(w.size for w in weights.values()) == parameter_count(spec).total
    stored = load_file(FIXTURES / family / "model.safetensors").values()
    values = np.sort(np.concatenate([w.ravel() for w in weights.values()]))
    assert np.array_equal(values, np.sort(np.concatenate([w.ravel() for w in stored])))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"])
def test_no_weight_of_a_sparse_family_is_lost(family):
    spec, weights = spec_from_config(FIXTURES / family), load_weights(FIXTURES / family)
    assert {w.dtype for w in weights.values()} == {np.dtype(np.float32)}
    assert sum(w.size for w in weights.values()) == parameter_count(spec).total
    sparse = sum(map(spec.layer_is_sparse, range(spec.layers)))
    e = spec.experts
    assert weights["layers.moe.w_up"].shape == (sparse, e.experts, spec.d_model, e.d_ff)
    assert ("dense_layers.w_up" in weights) == (sparse < spec.layers)
    stored = load_file(FIXTURES / family / "model.safetensors").values()
    values = np.sort(np.concatenate([w.ravel() for w in weights.values()]))
    assert np.array_equal(values, np.sort(np.concatenate([w.ravel() for w in stored])))


def test_gate_and_up_projections_of_gpt_oss_take_turns_in_one_tensor():
    ours = load_weights(FIXTURES / "gpt_oss")
    both = load_file(FIXTURES / "gpt_oss" / "model.safetensors")["model.layers.1.mlp.experts.gate_up_proj"]
    assert np.array_equal(ours["layers.moe.w_gate"][1], both[..., ::2])
    assert np.array_equal(ours["layers.moe.w_up"][1], both[..., 1::2])


def test_rotary_dims_of_deepseek_are_put_in_halves():
    ours = load_weights(FIXTURES / "deepseek_v3")["dense_layers.latent.wkv_a"][0]
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    theirs = load_file(FIXTURES / "deepseek_v3" / "model.safetensors")[name].T
    assert np.array_equal(ours[:, :24], theirs[:, :24])
    assert np.array_equal(ours[:, 24:28], theirs[:, 24::2])
    assert np.array_equal(ours[:, 28:], theirs[:, 25::2])


def test_prediction_layers_follow_the_others_and_copies_of_the_embedding_are_left(folder):
    path, tensors = folder("deepseek_v3", num_nextn_predict_layers=1)
    last, extra = "model.layers.2.", "model.layers.3."
    tensors |= {name.replace(last, extra): t + 1 for name, t in tensors.items() if name.startswith(last)}
    D = tensors["model.norm.weight"].size
    for part in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{extra}{part}.weight"] = np.arange(D, dtype=np.float32)
    tensors[f"{extra}eh_proj.weight"] = np.arange(2 * D * D, dtype=np.float32).reshape(D, 2 * D)
    for part in ("embed_tokens", "shared_head.head"):
        tensors[f"{extra}{part}.weight"] = tensors["model.embed_tokens.weight"]
    save(path, tensors)
    weights = load_weights(path)
    assert weights["prediction.projection"].shape == (1, 2 * D, D)
    assert weights["prediction.projection"][0, 1, 0] == 1
    moved = weights["prediction.layers.moe.router"][0]
    assert np.array_equal(moved, weights["layers.moe.router"][-1] + 1)
    prediction = sum(w.size for name, w in weights.items() if name.startswith("prediction."))
    assert prediction == parameter_count(spec_from_config(path)).prediction


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_linear_layers_are_transposed_and_split_into_heads(family):
    spec, ours = spec_from_config(FIXTURES / family), load_weights(FIXTURES / family)
    theirs = load_file(FIXTURES / family / "model.safetensors")
    x = np.random.default_rng(0).normal(size=spec.d_model).astype(np.float32)
    for layer in range(spec.layers):
        at = f"model.layers.{layer}.self_attn"
        for ours_name, theirs_name in (("wq", "q_proj"), ("wk", "k_proj"), ("wv", "v_proj")):
            per_head = np.einsum("d,dnh->nh", x, ours[f"layers.{ours_name}"][layer])
            plain = theirs[f"{at}.{theirs_name}.weight"] @ x
            np.testing.assert_allclose(per_head.reshape(-1), plain, rtol=1e-4, atol=1e-5)
        heads = np.random.default_rng(1).normal(size=(spec.heads, spec.head_dim)).astype(np.float32)
        out = np.einsum("nh,nhd->d", heads, ours["layers.wo"][layer])
        plain = theirs[f"{at}.o_proj.weight"] @ heads.reshape(-1)
        np.testing.assert_allclose(out, plain, rtol=1e-4, atol=1e-5)
        for ours_name, theirs_name in (("w_gate", "gate_proj"), ("w_up", "up_proj"), ("w_down", "down_proj")):
            stored = theirs[f"model.layers.{layer}.mlp.{theirs_name}.weight"]
            assert np.array_equal(ours[f"layers.{ours_name}"][layer], stored.T)


def test_the_second_norm_of_a_layer_is_before_the_mlp_in_llama_and_after_attention_in_gemma():
    llama, gemma = load_weights(FIXTURES / "llama"), load_weights(FIXTURES / "gemma2")
    name = "model.layers.1.post_attention_layernorm.weight"
    stored = {f: load_file(FIXTURES / f / "model.safetensors") for f in ("llama", "gemma2")}
    assert np.array_equal(llama["layers.mlp_norm.scale"][1], stored["llama"][name])
    assert np.array_equal(gemma["layers.post_attn_norm.scale"][1], stored["gemma2"][name])
    before_mlp = stored["gemma2"]["model.layers.1.pre_feedforward_layernorm.weight"]
    assert np.array_equal(gemma["layers.mlp_norm.scale"][1], before_mlp)


def test_the_fused_projection_of_gpt2_is_split_into_queries_keys_and_values():
    spec, ours = spec_from_config(FIXTURES / "gpt2"), load_weights(FIXTURES / "gpt2")
    theirs = load_file(FIXTURES / "gpt2" / "model.safetensors")
    x = np.random.default_rng(0).normal(size=spec.d_model).astype(np.float32)
    fused = x @ theirs["transformer.h.1.attn.c_attn.weight"] + theirs["transformer.h.1.attn.c_attn.bias"]
    parts = [np.einsum("d,dnh->nh", x, ours[f"layers.w{p}"][1]) + ours[f"layers.b{p}"][1] for p in "qkv"]
    np.testing.assert_allclose(np.stack(parts).reshape(-1), fused, rtol=1e-4, atol=1e-5)


def test_sharded_files_give_the_same_weights_as_one_file(folder):
    path, tensors = folder("llama")
    files = {"a.safetensors": sorted(tensors)[::2], "b.safetensors": sorted(tensors)[1::2]}
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, path / file)
    weight_map = {name: file for file, names in files.items() for name in names}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded, whole = load_weights(path), load_weights(FIXTURES / "llama")
    assert sharded.keys() == whole.keys()
    assert all(np.array_equal(sharded[name], whole[name]) for name in whole)
    (path / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"weights file .*b\.safetensors: No such file"):
        load_weights(path)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_weights_become_float32_without_loss(folder, dtype):
    path, tensors = folder("qwen3")
    save(path, {name: t.astype(dtype) for name, t in tensors.items()})
    embed = load_weights(path)["embed"]
    assert embed.dtype == np.float32
    assert np.array_equal(embed, tensors["model.embed_tokens.weight"].astype(dtype).astype(np.float32))


def test_biases_of_the_attention_are_read(folder):
    path, tensors = folder("llama", attention_bias=True)
    spec = spec_from_config(path)
    widths = {"q": spec.heads * 16, "k": spec.kv_heads * 16, "v": spec.kv_heads * 16, "o": spec.d_model}
    for layer in range(spec.layers):
        for part, width in widths.items():
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = np.arange(width, dtype=np.float32)
    save(path, tensors)
    weights = load_weights(path)
    assert {name: w.shape for name, w in weights.items()} == expected_shapes(spec)
    assert weights["layers.bk"][1, 1, 3] == 16 + 3


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_language_model_is_taken_out_of_a_multimodal_gemma3(folder, prefix):
    path, tensors = folder("gemma3")
    text = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    nested = {name.replace("model.", prefix, 1): t for name, t in tensors.items()}
    vision = "model.vision_tower." if prefix.startswith("model.") else "vision_tower."
    save(path, nested | {vision + "embeddings.weight": np.zeros(3, np.float32)})
    weights, plain = load_weights(path), load_weights(FIXTURES / "gemma3")
    assert all(np.array_equal(weights[name], plain[name]) for name in plain)


def test_gpt2_files_without_prefix_and_with_stored_masks_are_read(folder):
    path, tensors = folder("gpt2")
    bare = {name.removeprefix("transformer."): t for name, t in tensors.items()}
    save(path, bare | {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32)})
    weights, plain = load_weights(path), load_weights(FIXTURES / "gpt2")
    assert all(np.array_equal(weights[name], plain[name]) for name in plain)


def test_a_stored_copy_of_a_tied_head_is_accepted_only_when_it_equals_the_embedding(folder):
    path, tensors = folder("qwen3")
    head = tensors["model.embed_tokens.weight"].copy()
    save(path, tensors | {"lm_head.weight": head})
    assert "head" not in load_weights(path)
    head[0, 0] += 1
    save(path, tensors | {"lm_head.weight": head})
    with pytest.raises(
        UserError, match=r"lm_head\.weight differs from .*although tie_word_embeddings is true"
    ):
        load_weights(path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "model.layers.1.mlp.up_proj.weight",
            None,
            r"tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight\.",
        ),
        ("model.embed_tokens.weight", None, r"no tensor is called embed_tokens\.weight"),
        (
            "model.layers.2.mlp.up_proj.weight",
            (48, 32),
            r"unexpected tensors: model\.layers\.2\.mlp\.up_proj",
        ),
        ("model.layers.0.self_attn.q_proj.bias", (64,), r"unexpected tensors: .*q_proj\.bias"),
        ("model.norm.weight", (31,), r"tensor model\.norm\.weight has shape \[31\], expected \[32\]"),
        ("model.layers.1.mlp.up_proj.weight", (32, 48), r"has shape \[32, 48\], expected \[48, 32\]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(folder, name, value, message):
    path, tensors = folder("llama")
    if value is None:
        del tensors[name]
    else:
        tensors[name] = np.arange(prod(value), dtype=np.float32).reshape(value)
    save(path, tensors)
    with pytest.raises(UserError, match=message):
        load_weights(path)


def test_integer_weights_are_refused(folder):
    path, tensors = folder("llama")
    save(path, tensors | {"model.norm.weight": np.ones(32, np.int8)})
    with pytest.raises(UserError, match=r"model\.norm\.weight is I8; expected F32, F16, BF16"):
        load_weights(path)


def test_many_missing_tensors_are_counted_instead_of_listed(folder):
    path, tensors = folder("llama", num_hidden_layers=3)
    save(path, tensors)
    with pytest.raises(UserError, match=r"missing: model\.layers\.2\.input_layernorm\.weight, .* and 4 more"):
        load_weights(path)


def test_quantised_weights_are_refused(folder):
    path, _ = folder("llama", quantization_config={"quant_method": "fp8"})
    with pytest.raises(UserError, match="quantization_config: expected float weights"):
        load_weights(path)


def test_absent_and_damaged_files_are_refused_by_name(tmp_path):
    shutil.copy(FIXTURES / "llama" / "config.json", tmp_path)
    with pytest.raises(UserError, match=r"model\.safetensors: No such file"):
        load_weights(tmp_path)
    whole = (FIXTURES / "llama" / "model.safetensors").read_bytes()
    for damaged in (b"", b"not a safetensors file", whole[: len(whole) // 2]):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(UserError, match=r"model\.safetensors is not a safetensors file"):
            load_weights(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_damaged_index_is_refused_by_name(tmp_path, index):
    shutil.copy(FIXTURES / "llama" / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=r"weights index .*index\.json: expected a weight_map"):
        load_weights(tmp_path)
