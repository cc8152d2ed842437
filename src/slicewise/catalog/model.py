"""ModelSpec: the shape of a decoder-only transformer, from the catalog or from the user's own file."""

import functools
import tomllib
from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError, model_validator

from slicewise.errors import UserError, did_you_mean


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RopeScaling(Record):
    """How rotary frequencies are stretched beyond the context length of pre-training."""

    kind: Literal["llama3", "linear", "yarn"]
    factor: PositiveFloat
    original_context: PositiveInt = 8192  # tokens
    low_freq_factor: PositiveFloat = 1.0  # llama3
    high_freq_factor: PositiveFloat = 4.0  # llama3
    beta_fast: PositiveFloat = 32.0  # yarn
    beta_slow: PositiveFloat = 1.0  # yarn


class Experts(Record):
    """The mixture-of-experts part of a layer: ``experts`` routed MLPs of which each token uses ``per_token``."""

    experts: PositiveInt
    per_token: PositiveInt
    d_ff: PositiveInt  # of one routed expert
    shared_d_ff: int = 0  # of all shared experts together, 0 = none
    first_dense_layers: int = 0  # leading layers that keep a dense MLP of ModelSpec.d_ff
    every: PositiveInt = 1  # one layer in ``every`` is sparse
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize_scores: bool = True  # the chosen scores sum to one
    groups: PositiveInt = 1  # node-limited routing: experts in equal groups ...
    groups_per_token: PositiveInt = 1  # ... of which a token may use so many
    score_scale: PositiveFloat = 1.0
    balancing_bias: bool = False  # aux-loss-free balancing bias per expert


class LatentAttention(Record):
    """Multi-head latent attention (MLA): low-rank queries and a shared compressed KV, dims per head."""

    kv_lora_rank: PositiveInt
    q_lora_rank: PositiveInt | None = None
    nope_head_dim: PositiveInt
    rope_head_dim: PositiveInt
    v_head_dim: PositiveInt


class ModelSpec(Record):
    """A decoder-only transformer. Sizes are counts of elements; see docs for the symbols L, D, N, K, H, F, V."""

    name: str
    source: str  # where the numbers are published
    layers: PositiveInt
    d_model: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    d_ff: PositiveInt
    vocab: PositiveInt
    tied_embeddings: bool = False

    gated_mlp: bool = True
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    mlp_bias: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: PositiveFloat = 1e-5
    zero_centered_norm: bool = False  # the stored scale is added to one (Gemma)
    post_norms: bool = False  # a second norm after attention and after the MLP (Gemma)
    qk_norm: bool = False  # RMS norm on each head of the queries and keys

    qkv_bias: bool = False
    attention_output_bias: bool = False
    attention_sinks: bool = False  # one learned logit per head in every softmax (gpt-oss)
    attention_softcap: PositiveFloat | None = None
    query_scale: PositiveFloat | None = None  # default head_dim ** -0.5
    sliding_window: PositiveInt | None = None  # tokens a local layer sees, itself included
    global_every: PositiveInt | None = None  # one layer in so many, the last of its group, sees everything

    position: Literal["rope", "learned"] = "rope"
    rope_theta: PositiveFloat = 10000.0
    local_rope_theta: PositiveFloat | None = None  # of sliding-window layers, default rope_theta
    rope_scaling: RopeScaling | None = None  # of global layers
    max_context: PositiveInt = 8192  # tokens; the length of a learned position table

    embedding_scale: bool = False  # embeddings are multiplied by sqrt(d_model) (Gemma)
    logits_softcap: PositiveFloat | None = None

    experts: Experts | None = None
    latent_attention: LatentAttention | None = None
    prediction_layers: int = 0  # extra layers of multi-token prediction

    @model_validator(mode="after")
    def _check(self) -> "ModelSpec":
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}")
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even for rotary positions")
        if self.global_every and not self.sliding_window:
            raise ValueError("global_every needs sliding_window")
        if self.experts and self.experts.per_token > self.experts.experts:
            raise ValueError(f"per_token = {self.experts.per_token} exceeds experts = {self.experts.experts}")
        return self

    def layer_is_global(self, layer: int) -> bool:
        """Whether layer ``layer`` (from 0) attends to the whole context instead of the sliding window."""
        if self.sliding_window is None:
            return True
        return self.global_every is not None and layer % self.global_every == self.global_every - 1


@functools.cache
def names() -> tuple[str, ...]:
    """The models of the catalog, sorted."""
    folder = resources.files("slicewise.catalog") / "models"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def load(name_or_path: str) -> ModelSpec:
    """The model called ``name_or_path`` in the catalog, or described by the ModelSpec ``.toml`` at that path.

    Raises UserError for an unknown name, an unreadable file or a shape that cannot be.
    """
    if name_or_path.endswith(".toml"):
        try:
            text = Path(name_or_path).read_text()
        except OSError as e:
            raise UserError(f"model file {name_or_path}: {e.strerror}.") from e
    elif name_or_path in names():
        text = (resources.files("slicewise.catalog") / "models" / f"{name_or_path}.toml").read_text()
    else:
        raise UserError(
            f"unknown model '{name_or_path}'.{did_you_mean(name_or_path, names())} Known: {', '.join(names())};"
            " or give a path to a ModelSpec .toml or a Hugging Face config.json."
        )
    try:
        return ModelSpec(**tomllib.loads(text))
    except tomllib.TOMLDecodeError as e:
        raise UserError(f"model file {name_or_path} is not TOML: {e}.") from e
    except ValidationError as e:
        raise UserError(f"model {name_or_path}: {first_problem(e, ModelSpec)}") from e


def first_problem(error: ValidationError, schema: type[BaseModel]) -> str:
    """The first problem of a pydantic ``error`` as one sentence that names the key, the value and the expectation."""
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key '{key}'.{did_you_mean(key, schema.model_fields)}"
    if problem["type"] == "missing":
        return f"key '{key}' is missing."
    if problem["type"] == "value_error":
        return f"{key + ': ' if key else ''}{problem['ctx']['error']}."
    return f"{key} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}."
