import pytest

from slicewise.catalog import model
from slicewise.errors import UserError

PLAIN = """
name = "mine"
source = "me"
layers = 4
d_model = 64
heads = 4
kv_heads = 2
head_dim = 16
d_ff = 192
vocab = 256
"""
EXPERTS = PLAIN + "[experts]\nexperts = 8\nper_token = 2\nd_ff = 32\n"
LATENT = "[latent_attention]\nkv_lora_rank = 8\nnope_head_dim = 8\nrope_head_dim = 4\nv_head_dim = 8\n"


def write(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", model.names())
def test_every_catalog_file_loads_under_its_own_name_with_a_source(name):
    spec = model.load(name)
    assert spec.name == name
    assert spec.source == "slicewise" if name.startswith("demo-") else spec.source.startswith("https://")


@pytest.mark.parametrize("size", ["8b", "70b"])
def test_llama_3_0_has_no_rope_scaling_and_3_1_stretches_its_context_eight_times(size):
    old, new = model.load(f"llama3-{size}"), model.load(f"llama3.1-{size}")
    assert old.rope_scaling is None
    assert old.max_context == 8192
    assert new.rope_scaling.factor == 8
    assert new.max_context == 131072
    same = {"name": None, "source": None, "max_context": None, "rope_scaling": None}
    assert old.model_copy(update=same) == new.model_copy(update=same)


def test_llama3_405b_is_llama3_1_405b_under_its_common_name():
    other = model.load("llama3.1-405b").model_copy(update={"name": "llama3-405b"})
    assert model.load("llama3-405b") == other


@pytest.mark.parametrize(
    ("name", "global_layers"),
    [
        ("llama3-8b", set(range(32))),
        ("mistral-7b", set()),
        ("gpt-oss-20b", set(range(1, 24, 2))),
        ("gemma2-9b", set(range(1, 42, 2))),
        ("gemma3-1b", {5, 11, 17, 23}),
    ],
)
def test_layers_that_see_the_whole_context(name, global_layers):
    spec = model.load(name)
    assert {i for i in range(spec.layers) if spec.layer_is_global(i)} == global_layers


def test_leading_layers_of_deepseek_are_dense_and_dense_models_have_no_sparse_layer():
    deepseek, llama = model.load("deepseek-v3"), model.load("llama3-8b")
    assert [deepseek.layer_is_sparse(i) for i in range(5)] == [False, False, False, True, True]
    assert not any(map(llama.layer_is_sparse, range(llama.layers)))


def test_every_other_layer_can_be_sparse(tmp_path):
    spec = model.load(write(tmp_path, EXPERTS + "every = 2\n"))
    assert [spec.layer_is_sparse(i) for i in range(4)] == [False, True, False, True]


def test_a_users_own_file_is_read(tmp_path):
    spec = model.load(write(tmp_path, PLAIN))
    assert (spec.name, spec.layers, spec.rope_theta) == ("mine", 4, 10000.0)


def test_an_unknown_name_is_answered_with_the_nearest_and_with_all_names():
    with pytest.raises(UserError, match=r"'lama3-8b'\. Did you mean 'llama3-8b'\? Known: .*qwen3-8b"):
        model.load("lama3-8b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PLAIN + "layerz = 3\n", r"unknown key 'layerz'\. Did you mean 'layers'\?"),
        (PLAIN.replace("vocab = 256\n", ""), "key 'vocab' is missing"),
        (PLAIN.replace("layers = 4", "layers = 0"), "layers = 0: input should be greater than 0"),
        (PLAIN.replace("layers = 4", 'layers = "four"'), "layers = 'four': input should be a valid integer"),
        (PLAIN.replace("kv_heads = 2", "kv_heads = 3"), "heads = 4 must be a multiple of kv_heads = 3"),
        (PLAIN.replace("head_dim = 16", "head_dim = 15"), "head_dim = 15 must be even"),
        (PLAIN + "global_every = 2\n", "global_every needs sliding_window"),
        (PLAIN + 'activation = "tanh"\n', "activation = 'tanh': input should be 'silu'"),
        (PLAIN + 'activation = "clamped_swiglu"\ngated_mlp = false\n', "needs gated_mlp"),
        (EXPERTS.replace("per_token = 2", "per_token = 9"), "per_token = 9 exceeds experts = 8"),
        (EXPERTS + "groups = 3\n", "experts = 8 must be a multiple of groups = 3"),
        (EXPERTS + "groups = 4\ngroups_per_token = 5\n", "groups_per_token = 5 exceeds groups = 4"),
        (EXPERTS + "groups = 8\n", "per_token = 2 exceeds the experts of 1 groups"),
        (EXPERTS + "first_dense_layers = 4\n", "leave none of 4 layers sparse"),
        (EXPERTS + "first_dense_layers = 3\nevery = 3\n", "leave none of 4 layers sparse"),
        (EXPERTS + "shared_d_ff = -1\n", "experts.shared_d_ff = -1: input should be greater than or equal"),
        (PLAIN + LATENT, r"head_dim = 16 must be nope_head_dim \+ rope_head_dim"),
        ("layers = [", "is not TOML"),
    ],
)
def test_a_file_with_a_mistake_is_refused_with_the_reason(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        model.load(write(tmp_path, text))


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"absent\.toml: No such file"):
        model.load(str(tmp_path / "absent.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary\.toml is not TOML"):
        model.load(str(tmp_path / "binary.toml"))
