import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.catalog import model
from slicewise.errors import UserError
from slicewise.interop.config_keys import ConfigKeys
from slicewise.interop.families import FAMILIES
from slicewise.interop.huggingface import load_spec, spec_from_config

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"

LLAMA2 = {  # as first published: no rope_theta, no head_dim
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
LLAMA3 = LLAMA2 | {
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "vocab_size": 128256,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
MISTRAL = {
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN3 = {
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "router_aux_loss_coef": 0.001,
}
GEMMA3_27B = {  # multimodal, and leaves to the config class what it can
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
GEMMA3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
GEMMA2 = {
    "model_type": "gemma2",
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8"},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
DEEPSEEK_V2 = DEEPSEEK_V2_LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
GPT3 = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
    "n_embd": 12288,
    "n_head": 96,
    "n_layer": 96,
    "n_positions": 2048,
    "vocab_size": 50257,
}
MIXTRAL = MISTRAL | {
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}


def write(folder, values):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return folder / "config.json"


def change(values, **changes):
    """``values`` with keys set, or removed where the change is ``...``."""
    return {k: v for k, v in (values | changes).items() if v is not ...}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama2-7b", LLAMA2),
        ("llama3-8b", LLAMA3),
        ("llama3.1-8b", change(LLAMA3, max_position_embeddings=131072, rope_scaling=LLAMA3_SCALING)),
        ("mistral-7b", MISTRAL),
        ("mixtral-8x7b", MIXTRAL),
        ("qwen3-8b", QWEN3),
        ("qwen3-30b-a3b", QWEN3_MOE),
        ("gemma2-9b", GEMMA2),
        ("gemma3-4b", GEMMA3_4B),
        ("gemma3-27b", GEMMA3_27B),
        ("deepseek-v2-lite", DEEPSEEK_V2_LITE),
        ("deepseek-v2", DEEPSEEK_V2),
        ("deepseek-v3", DEEPSEEK_V3),
        ("gpt-oss-20b", GPT_OSS),
        ("gpt3-175b", GPT3),
    ],
)
def test_the_published_config_gives_the_catalogs_spec(tmp_path, name, config):
    spec = spec_from_config(write(tmp_path / name, config))
    expected = model.load(name)
    assert spec.model_dump(exclude={"source"}) == expected.model_dump(exclude={"source"})
    assert spec.source == str(tmp_path / name / "config.json")


@pytest.mark.parametrize(
    ("old", "rope_parameters"),
    [
        (change(LLAMA3, rope_scaling=LLAMA3_SCALING), LLAMA3_SCALING | {"rope_theta": 500000.0}),
        (QWEN3, {"rope_type": "default", "rope_theta": 1000000}),
        (GPT_OSS, GPT_OSS["rope_scaling"] | {"rope_theta": 150000}),
        (
            GEMMA3_27B["text_config"],
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
    ],
    ids=["llama", "qwen3", "gpt_oss", "gemma3"],
)
def test_the_rope_keys_of_transformers_5_mean_the_same_as_the_old_ones(tmp_path, old, rope_parameters):
    new = change(old, rope_theta=..., rope_scaling=..., rope_parameters=rope_parameters)
    assert spec_from_config(write(tmp_path / "a", new)) == spec_from_config(write(tmp_path / "a", old))


def test_every_family_has_a_fixture_and_its_config_is_read():
    fixtures = {spec_from_config(folder).name for folder in FIXTURES.iterdir()}
    assert fixtures == {family.removesuffix("_text") for family in FAMILIES}


def test_the_fixtures_reach_the_features_of_their_family():
    llama, gemma3, gpt_oss, qwen3_moe, deepseek = (
        spec_from_config(FIXTURES / name)
        for name in ("llama", "gemma3", "gpt_oss", "qwen3_moe", "deepseek_v3")
    )
    assert (llama.rope_scaling.kind, llama.rope_scaling.original_context) == ("llama3", 32)
    assert [gemma3.layer_is_global(i) for i in range(7)] == [False] * 5 + [True, False]
    assert (gemma3.rope_theta, gemma3.local_rope_theta, gemma3.rope_scaling.kind) == (5000.0, 100.0, "linear")
    assert gemma3.query_scale == 24**-0.5
    assert (gpt_oss.attention_sinks, gpt_oss.rope_scaling.truncate) == (True, False)
    assert gpt_oss.rope_scaling.attention_factor == pytest.approx(1.2079441541679836)
    assert [qwen3_moe.layer_is_sparse(i) for i in range(3)] == [False, True, True]
    assert (deepseek.experts.groups, deepseek.experts.balancing_bias) == (4, True)


def test_yarn_on_qwen3_gets_its_attention_factor_and_original_context(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    spec = spec_from_config(write(tmp_path / "a", change(QWEN3, rope_scaling=scaling)))
    assert spec.rope_scaling.attention_factor == pytest.approx(1.1386294361119891)
    assert spec.rope_scaling.original_context == 32768
    given_factor = change(QWEN3, rope_scaling=scaling | {"attention_factor": 1.5})
    assert spec_from_config(write(tmp_path / "a", given_factor)).rope_scaling.attention_factor == 1.5


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (change(LLAMA3, attention_bias=True), {"qkv_bias": True, "attention_output_bias": True}),
        (change(LLAMA2, num_key_value_heads=...), {"kv_heads": 32}),
        (change(MISTRAL, sliding_window=None), {"sliding_window": None}),
        (change(MISTRAL, sliding_window=...), {"sliding_window": 4096}),
        (change(MIXTRAL, sliding_window=512), {"sliding_window": 512}),
        (change(GEMMA2, attn_logit_softcapping=None), {"attention_softcap": None, "logits_softcap": 30.0}),
        (change(GEMMA2, query_pre_attn_scalar=144), {"query_scale": 144**-0.5}),
        (
            change(QWEN3, use_sliding_window=True, sliding_window=64, max_window_layers=36),
            {"sliding_window": None},
        ),
        (
            change(QWEN3, use_sliding_window=True, sliding_window=64, max_window_layers=0),
            {"sliding_window": 64, "global_every": None},
        ),
        (change(QWEN3_MOE, num_experts=..., num_local_experts=64), {}),
        (change(GPT3, n_inner=1000, tie_word_embeddings=False), {"d_ff": 1000, "tied_embeddings": False}),
        (change(DEEPSEEK_V3, rope_scaling=None), {"query_scale": None, "rope_scaling": None}),
    ],
)
def test_variants_of_a_config_are_read(tmp_path, config, fields):
    spec = spec_from_config(write(tmp_path / "a", config))
    assert {name: getattr(spec, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (change(LLAMA3, model_type=...), "key 'model_type' is missing; supported are .*qwen3_moe"),
        (change(LLAMA3, model_type="lama"), r"model_type = 'lama' is not supported\. Did you mean 'llama'\?"),
        (change(LLAMA3, model_type=7), "model_type = 7 is not supported"),
        (change(LLAMA3, model_type="mamba2"), "Supported: deepseek_v2, .*mixtral"),
        (change(LLAMA3, hidden_size=...), "key 'hidden_size' is missing"),
        (change(LLAMA3, hidden_size=None), "key 'hidden_size' is missing"),
        (change(LLAMA3, hidden_size="4096"), 'hidden_size = "4096": expected a positive integer'),
        (change(LLAMA3, hidden_size=True), "hidden_size = true: expected a positive integer"),
        (
            change(LLAMA3, hidden_size=4100),
            "num_attention_heads = 32: expected a divisor of the model width 4100",
        ),
        (change(LLAMA3, num_key_value_heads=3), "heads = 32 must be a multiple of kv_heads = 3"),
        (change(LLAMA3, rms_norm_eps=0), "rms_norm_eps = 0: expected a positive number"),
        (change(LLAMA3, tie_word_embeddings="no"), 'tie_word_embeddings = "no": expected true or false'),
        (change(LLAMA3, hidden_act="relu2"), 'hidden_act = "relu2": expected one of silu, .*nothing else'),
        (change(LLAMA3, mlp_bias=True), "mlp_bias = true: expected false; nothing else is supported"),
        (change(LLAMA3, partial_rotary_factor=0.5), "partial_rotary_factor = 0.5: expected 1.0"),
        (change(LLAMA3, rope_scaling=[8]), r"rope_scaling = \[8\]: expected a table"),
        (
            change(LLAMA3, rope_scaling={"rope_type": "longrope"}),
            'rope_scaling.rope_type = "longrope": expected one of default, linear, llama3, yarn',
        ),
        (change(LLAMA3, rope_scaling={"type": "dynamic", "factor": 2.0}), 'rope_scaling.type = "dynamic"'),
        (change(LLAMA3, rope_scaling={"type": "linear"}), "key 'rope_scaling.factor' is missing"),
        (
            change(LLAMA3, rope_scaling=change(LLAMA3_SCALING, original_max_position_embeddings=...)),
            "key 'rope_scaling.original_max_position_embeddings' is missing",
        ),
        (change(QWEN3, head_dim=...), "key 'head_dim' is missing"),
        (
            change(QWEN3, use_sliding_window=True, sliding_window=64, max_window_layers=9),
            "max_window_layers = 9: expected 36 layers, all full_attention or",
        ),
        (
            change(QWEN3, use_sliding_window=True, sliding_window=None, max_window_layers=0),
            "'sliding_window' is",
        ),
        (change(QWEN3_MOE, mlp_only_layers=[3]), r"mlp_only_layers = \[3\]: expected the first layers"),
        (change(QWEN3_MOE, mlp_only_layers="0"), 'mlp_only_layers = "0": expected a list of integers'),
        (change(QWEN3_MOE, num_experts_per_tok=129), "per_token = 129 exceeds experts = 128"),
        (change(GEMMA3_27B, text_config=...), "key 'text_config' is missing"),
        (
            change(GEMMA2, use_bidirectional_attention=True),
            "use_bidirectional_attention = true: expected false",
        ),
        (change(GPT_OSS, layer_types=["full_attention"] * 3), "layer_types = .*: expected 24 layers"),
        (change(GPT_OSS, layer_types=["linear_attention"] * 24), "layer_types = .*: expected 24 layers"),
        (change(GPT_OSS, layer_types="full_attention"), "layer_types = .*: expected a list of strings"),
        (change(GPT_OSS, swiglu_limit=5.0), "swiglu_limit = 5.0: expected 7.0"),
        (change(GPT_OSS, rope_scaling=None), "key 'rope_parameters' is missing"),
        (change(DEEPSEEK_V3, topk_method="greedy"), 'topk_method = "greedy": expected "noaux_tc"'),
        (change(DEEPSEEK_V3, num_key_value_heads=8), "num_key_value_heads = 8: expected 128"),
        (
            change(DEEPSEEK_V3, n_shared_experts=-1),
            "n_shared_experts = -1: expected zero or a positive integer",
        ),
        (change(DEEPSEEK_V2, norm_topk_prob=True), "norm_topk_prob = true: expected false"),
        (change(MIXTRAL, router_jitter_noise=0.1), "router_jitter_noise = 0.1: expected 0.0"),
        (
            change(GPT3, scale_attn_by_inverse_layer_idx=True),
            "scale_attn_by_inverse_layer_idx = true: expected false",
        ),
        ("{", "is not JSON"),
        ("[]", "is not a config.json"),
        ("\xff", "is not JSON"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_with_its_key(tmp_path, config, message):
    file = write(tmp_path / "a", config)
    if config == "\xff":
        file.write_bytes(b"\xff")
    with pytest.raises(UserError, match=message) as error:
        spec_from_config(file)
    assert str(file) in str(error.value)


def test_a_missing_file_and_a_folder_without_config_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"config\.json: No such file"):
        spec_from_config(tmp_path)
    with pytest.raises(UserError, match=r"other\.json: No such file"):
        load_spec(str(tmp_path / "other.json"))


def test_load_spec_takes_a_catalog_name_a_toml_a_config_or_a_folder(tmp_path, monkeypatch):
    file = write(tmp_path / "llama3-8b", LLAMA2)
    assert load_spec(str(file)) == load_spec(str(file.parent)) == spec_from_config(file)
    toml = tmp_path / "own.toml"
    toml.write_text(
        'name = "own"\nsource = "me"\nlayers = 1\nd_model = 8\nheads = 1\nkv_heads = 1\nhead_dim = 8\n'
        "d_ff = 8\nvocab = 8\n"
    )
    assert load_spec(str(toml)).name == "own"
    monkeypatch.chdir(tmp_path)
    assert load_spec("llama3-8b") == model.load("llama3-8b")  # the name wins over the folder
    assert load_spec("./llama3-8b").vocab == 32000
    with pytest.raises(UserError, match="unknown model 'llama9-8b'"):
        load_spec("llama9-8b")


@given(st.lists(st.sampled_from(["sliding_attention", "full_attention"]), min_size=1, max_size=12))
def test_a_pattern_of_windows_is_kept_exactly_or_refused(types):
    is_global = [t == "full_attention" for t in types]
    every = is_global.index(True) + 1 if any(is_global) else len(types) + 1
    repeats = all(is_global) or is_global == [i % every == every - 1 for i in range(len(types))]
    keys = ConfigKeys(change(GPT_OSS, num_hidden_layers=len(types), layer_types=types), "config.json")
    if not repeats:
        with pytest.raises(UserError, match="layer_types"):
            FAMILIES["gpt_oss"](keys)
        return
    spec = model.ModelSpec(name="a", source="b", **FAMILIES["gpt_oss"](keys))
    assert [spec.layer_is_global(i) for i in range(len(types))] == is_global


def test_reading_a_config_imports_neither_jax_nor_safetensors():
    code = (
        "import sys; from slicewise.interop.huggingface import load_spec;"
        f"load_spec({str(FIXTURES / 'llama')!r});"
        "sys.exit(', '.join({'jax', 'safetensors', 'numpy', 'transformers'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
