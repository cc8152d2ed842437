import pytest

from slicewise.catalog import model
from slicewise.costs.remat import POLICIES, chosen, custom, policy, recomputed, tensor_widths
from slicewise.costs.shapes import model_shape
from slicewise.errors import UserError

LLAMA = model_shape(model.load("llama3-8b")).layers[0]
MIXTRAL = model_shape(model.load("mixtral-8x7b")).layers[0]
GEMMA = model_shape(model.load("gemma3-27b")).layers[0]


def test_full_recomputes_all_but_the_last_matrix():
    again = recomputed(LLAMA, POLICIES["full"])
    assert again == {"query_proj", "key_proj", "value_proj", "context", "out_proj", "mlpwi_0", "mlpwi_1"}


def test_the_last_matrix_is_recomputed_where_its_output_is_read():
    assert "moe_mlpwo" in recomputed(MIXTRAL, POLICIES["full"])  # the router's gradient
    assert "mlpwo" in recomputed(GEMMA, POLICIES["full"])  # the norm behind it


def test_minimal_recomputes_only_attention():
    assert recomputed(LLAMA, POLICIES["minimal"]) == {"context"}
    assert recomputed(LLAMA, POLICIES["minimal_with_context"]) == frozenset()


def test_save_dot_with_context_except_mlp_recomputes_only_the_mlp():
    assert recomputed(LLAMA, POLICIES["save_dot_with_context_except_mlp"]) == {"mlpwi_0", "mlpwi_1"}


@pytest.mark.parametrize(
    ("name", "kept"),
    [("save_qkv_proj", {"query_proj", "key_proj", "value_proj"}), ("save_out_proj", {"out_proj"})],
)
def test_policies_named_by_what_they_save(name, kept):
    assert recomputed(LLAMA, POLICIES["full"]) - recomputed(LLAMA, POLICIES[name]) == kept


def test_offloaded_tensors_are_not_recomputed():
    p = custom({"decoder_layer_input": "offload", "query_proj": "offload", "mlpwi_0": "remat"})
    assert p.offloaded == {"decoder_layer_input", "query_proj"}
    assert p.saved == frozenset()
    assert "query_proj" not in recomputed(LLAMA, p)
    assert "mlpwi_0" in recomputed(LLAMA, p)


def test_the_layer_input_stays_on_the_device_unless_moved():
    assert custom({"context": "device"}).saved == {"decoder_layer_input", "context"}


def test_fused_names_stand_for_their_parts():
    assert custom({"qkv_proj": "device"}).saved >= {"query_proj", "key_proj", "value_proj"}


def test_widths_of_a_dense_layer():
    widths = {name: width for name, (width, _) in tensor_widths(LLAMA).items()}
    assert widths == {
        "decoder_layer_input": 4096, "query_proj": 4096, "key_proj": 1024, "value_proj": 1024,
        "context": 4096, "out_proj": 4096, "mlpwi_0": 14336, "mlpwi_1": 14336,
    }  # fmt: skip


def test_unknown_policy_names_the_nearest():
    with pytest.raises(UserError, match="Did you mean 'minimal'"):
        policy("minimall")


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"contxt": "device"}, "'context'"),
        ({"context": "disk"}, "disk"),
        ({"decoder_layer_input": "remat"}, "recomputed from its input; use device or offload"),
        ({"qkv_proj": "offload", "query_proj": "device"}, "gives query_proj two places, offload and device"),
        ({"moe_mlpwi_1": "device", "mlpwi": "remat"}, "gives mlpwi_1 two places, device and remat"),
    ],
)
def test_bad_custom_policies_say_what_is_wrong(places, message):
    with pytest.raises(UserError, match=message):
        custom(places)


def test_a_run_chooses_a_policy_by_name_or_tensor_by_tensor():
    assert chosen("minimal", {}) is POLICIES["minimal"]
    assert chosen("custom", {"context": "offload"}).offloaded == {"context"}


@pytest.mark.parametrize(
    ("name", "places", "message"),
    [
        ("custom", {}, "needs remat_tensors"),
        ("full", {"context": "device"}, "no effect with remat_policy = full; set remat_policy=custom"),
    ],
)
def test_places_belong_to_the_custom_policy(name, places, message):
    with pytest.raises(UserError, match=message):
        chosen(name, places)
