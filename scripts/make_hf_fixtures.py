"""Makes tests/fixtures/hf: tiny random models of each supported family, run by Hugging Face transformers.

Tests compare our model with what is stored there, so they need neither torch nor transformers. To make it
again (the CPU build of torch is enough):

    python3.11 -m venv hf
    hf/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors numpy
    hf/bin/python scripts/make_hf_fixtures.py [family ...]

Each family's folder holds config.json, model.safetensors (float32) and expected.npz with
    input_ids  int64   [2, T]     none of them is 0, the padding token of some families
    logits     float32 [2, T, V]
    loss       float32 []         mean cross entropy of token t + 1 given tokens 0..t, in nats
    embedding_gradient float32 [V, D]   of the loss, by the embedding table in all its uses (with a tied head)
"""

import argparse
import copy
import json
import math
from pathlib import Path

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).parents[1] / "tests" / "fixtures" / "hf"
TOKENS, VOCAB = 24, 96  # more tokens than any sliding window here
LIMIT_BYTES = 300_000

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
MLA = {
    "num_key_value_heads": 4,
    "head_dim": 8,  # what transformers calls so is the rotary part
    "num_hidden_layers": 3,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 12,
    "rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.8},
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}

FAMILIES = {
    # Of the eight rotary frequencies some are kept, some blended and some divided by the factor.
    "llama": ("llama", {"rms_norm_eps": 1e-5, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000.0}}),
    # Seven layers: five local, one global, and one local again.
    "gemma3": ("gemma3_text", {"num_hidden_layers": 7, "sliding_window": 8, "num_attention_heads": 2,
        "num_key_value_heads": 1, "query_pre_attn_scalar": 24, "rope_parameters": GEMMA_ROPE}),
    "gemma2": ("gemma2", {"num_hidden_layers": 3, "sliding_window": 8, "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "gpt2": ("gpt2", {"vocab_size": VOCAB, "n_embd": 40, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    # The first of three layers is dense.
    "qwen3_moe": ("qwen3_moe", {"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 16, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "deepseek_v2": ("deepseek_v2", MLA | {"n_shared_experts": 2, "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 4.0, "norm_topk_prob": False}),
    "deepseek_v3": ("deepseek_v3", MLA | {"n_shared_experts": 1, "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
        "rope_parameters": YARN | {"truncate": False}}),
}  # fmt: skip


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Gives every parameter and routing bias a value that matters to the output.

    Freshly made models have zero biases and unit norms, which would hide a forgotten one.
    """

    def noise(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and name.endswith("sinks"):
                parameter.copy_(noise(parameter))
            elif parameter.ndim == 1:  # norms stay near one (or zero for zero-centred ones), biases near zero
                is_unit = parameter.mean().item() == 1.0
                parameter.copy_(0.3 * noise(parameter) + (1.0 if is_unit else 0.0))
            elif "embed" in name or "wte" in name or "wpe" in name:
                parameter.copy_(0.5 * noise(parameter))
            elif name.endswith("_bias"):  # [experts, width]
                parameter.copy_(0.3 * noise(parameter))
            else:
                parameter.copy_(1.5 * noise(parameter) / math.sqrt(parameter.shape[-1]))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * noise(buffer))


def make(family: str) -> None:
    model_type, changes = FAMILIES[family]
    values = changes if model_type == "gpt2" else BASE | changes
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}  # plain matrix products
    config = transformers.AutoConfig.for_model(model_type, **eager, **values)
    generator = torch.Generator().manual_seed(sorted(FAMILIES).index(family))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, generator)
    input_ids = torch.randint(1, VOCAB, (2, TOKENS), generator=generator)
    logits = model(input_ids=input_ids).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
    loss.backward()
    # Far from float32 noise: a larger difference would mean that two experts are nearly tied for a token.
    double = copy.deepcopy(model).double()(input_ids=input_ids).logits
    noise = (double - logits).abs().max().item()
    assert noise < 1e-4, noise
    gradient = model.get_input_embeddings().weight.grad
    folder = FOLDER / family
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)
    np.savez_compressed(
        folder / "expected.npz",
        input_ids=input_ids.numpy(),
        logits=logits.detach().numpy(),
        loss=loss.detach().numpy(),
        embedding_gradient=gradient.numpy(),
    )
    size_bytes = sum(file.stat().st_size for file in folder.iterdir())
    print(json.dumps({
        "family": family, "bytes": size_bytes, "loss": round(loss.item(), 4),
        "logits_std": round(logits.std().item(), 3), "gradient_max": round(gradient.abs().max().item(), 4),
        "float64_difference": noise,
    }))  # fmt: skip
    if size_bytes > LIMIT_BYTES:
        raise SystemExit(f"{family}: {size_bytes} bytes exceed {LIMIT_BYTES}; make the model smaller.")


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes tests/fixtures/hf.")
    parser.add_argument("family", nargs="*", help=f"default all: {', '.join(FAMILIES)}")
    families = parser.parse_args().family or list(FAMILIES)
    if unknown := set(families) - set(FAMILIES):
        parser.error(f"unknown family {', '.join(sorted(unknown))}; known: {', '.join(FAMILIES)}")
    torch.set_float32_matmul_precision("highest")
    transformers.utils.logging.disable_progress_bar()
    for family in families:
        make(family)


if __name__ == "__main__":
    main()
