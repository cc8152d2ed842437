"""ModelSpec: the shape of a decoder-only transformer, from the catalog or from the user's own file."""

import functools
import tomllib
from importlib import resources
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from slicewise.errors import UserError, did_you_mean


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RopeScaling(Record):
    """How rotary frequencies are stretched beyond the context length of pre-training."""

    kind: Literal["llama3", "linear", "yarn"]
    factor: PositiveFloat
    original_context: PositiveInt = 8192  # tokens
    low_freq_factor: PositiveFloat = 1.0  # llama3
    high_freq_factor: PositiveFloat = 4.0  # llama3
    beta_fast: PositiveFloat = 32.0  # yarn
    beta_slow: PositiveFloat = 1.0  # yarn
    truncate: bool = True  # yarn: the dims between which frequencies blend are rounded outwards
    attention_factor: PositiveFloat = 1.0  # yarn: multiplies both cos and sin


class Experts(Record):
    """A layer's mixture of experts: ``experts`` routed MLPs, of which each token uses ``per_token``."""

    experts: PositiveInt
    per_token: PositiveInt
    d_ff: PositiveInt  # of one routed expert
    shared_d_ff: NonNegativeInt = 0  # of all shared experts together, 0 = none
    first_dense_layers: NonNegativeInt = 0  # leading layers that keep a dense MLP of ModelSpec.d_ff
    every: PositiveInt = 1  # one layer in so many, the last of its group, is sparse; the others are dense
    router_bias: bool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize_scores: bool = True  # the chosen scores sum to one
    groups: PositiveInt = 1  # node-limited routing: experts in equal groups ...
    groups_per_token: PositiveInt = 1  # ... of which a token may use so many
    score_scale: PositiveFloat = 1.0
    # Aux-loss-free balancing: a bias per expert that decides the choice but not the weight of an expert.
    # A group is then judged by the sum of its two best experts, otherwise by its best one (DeepSeek-V3, V2).
    balancing_bias: bool = False


class LatentAttention(Record):
    """Multi-head latent attention (MLA): low-rank queries and a shared compressed KV, dims per head."""

    kv_lora_rank: PositiveInt
    q_lora_rank: PositiveInt | None = None
    nope_head_dim: PositiveInt
    rope_head_dim: PositiveInt
    v_head_dim: PositiveInt


class Groups(NamedTuple):
    """``number`` equal groups of ``layers`` layers each, from layer ``first``."""

    first: int
    layers: int
    number: int


class ModelSpec(Record):
    """A decoder-only transformer. Sizes count elements; see docs for the symbols L, D, N, K, H, F, V."""

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
    # clamped_swiglu (gpt-oss): (u + 1) * g * sigmoid(1.702 g), with g <= 7 and -7 <= u <= 7
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"] = "silu"
    mlp_bias: bool = False  # on every matrix of the MLP, or of each expert
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
    rope_scaling: RopeScaling | None = None  # of the layers that use rope_theta
    # Of sliding-window layers, which are then not scaled; without it they turn as the global layers do.
    local_rope_theta: PositiveFloat | None = None
    max_context: PositiveInt = 8192  # tokens; the length of a learned position table

    embedding_scale: bool = False  # embeddings are multiplied by sqrt(d_model) (Gemma)
    logits_softcap: PositiveFloat | None = None

    experts: Experts | None = None
    latent_attention: LatentAttention | None = None
    prediction_layers: NonNegativeInt = 0  # extra layers of multi-token prediction

    @model_validator(mode="after")
    def _check(self) -> "ModelSpec":
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}")
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even for rotary positions")
        if self.global_every and not self.sliding_window:
            raise ValueError("global_every needs sliding_window")
        if self.experts:
            _check_experts(self.experts)
            if not any(map(self.layer_is_sparse, range(self.layers))):
                raise ValueError(f"first_dense_layers and every leave none of {self.layers} layers sparse")
        if (a := self.latent_attention) and self.head_dim != a.nope_head_dim + a.rope_head_dim:
            raise ValueError(f"head_dim = {self.head_dim} must be nope_head_dim + rope_head_dim")
        if self.activation == "clamped_swiglu" and not self.gated_mlp:
            raise ValueError("activation = 'clamped_swiglu' needs gated_mlp")
        return self

    @property
    def groups(self) -> Groups:
        """The equal groups of layers in a row; of a model with experts each ends in a sparse layer."""
        e = self.experts
        if e is None:
            return Groups(0, 1, self.layers)
        first = next(i for i in range(self.layers) if self.layer_is_sparse(i)) - (e.every - 1)
        return Groups(first, e.every, (self.layers - first) // e.every)

    @property
    def learned_positions(self) -> int | None:
        """The most tokens that a sequence can have; None where no position is learned."""
        return self.max_context if self.position == "learned" else None

    @property
    def staged_groups(self) -> int:
        """How many of them a pipeline can divide over its stages: 1 where dense layers of groups and around them are
        stored as one stack."""
        g = self.groups
        return 1 if g.layers > 1 and g.layers * g.number < self.layers else g.number

    def layer_is_global(self, layer: int) -> bool:
        """Whether layer ``layer`` (from 0) attends to the whole context instead of the sliding window."""
        if self.sliding_window is None:
            return True
        return self.global_every is not None and layer % self.global_every == self.global_every - 1

    def layer_is_sparse(self, layer: int) -> bool:
        """Whether layer ``layer`` (from 0) is a mixture of experts instead of a dense MLP."""
        e = self.experts
        return e is not None and layer >= e.first_dense_layers and layer % e.every == e.every - 1


def _check_experts(e: Experts) -> None:
    if e.per_token > e.experts:
        raise ValueError(f"per_token = {e.per_token} exceeds experts = {e.experts}")
    if e.experts % e.groups:
        raise ValueError(f"experts = {e.experts} must be a multiple of groups = {e.groups}")
    if e.groups_per_token > e.groups:
        raise ValueError(f"groups_per_token = {e.groups_per_token} exceeds groups = {e.groups}")
    if e.per_token > e.groups_per_token * (e.experts // e.groups):
        raise ValueError(f"per_token = {e.per_token} exceeds the experts of {e.groups_per_token} groups")


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
            text = Path(name_or_path).read_text(encoding="utf-8-sig")
        except OSError as e:
            raise UserError(f"model file {name_or_path}: {e.strerror}.") from e
        except UnicodeDecodeError as e:
            raise UserError(f"model file {name_or_path} is not TOML: {e}.") from e
    elif name_or_path in names():
        text = (resources.files("slicewise.catalog") / "models" / f"{name_or_path}.toml").read_text()
    else:
        raise UserError(
            f"unknown model '{name_or_path}'.{did_you_mean(name_or_path, names())}"
            f" Known: {', '.join(names())}; or the path of a ModelSpec .toml or a Hugging Face config.json."
        )
    try:
        return ModelSpec(**tomllib.loads(text))
    except tomllib.TOMLDecodeError as e:
        raise UserError(f"model file {name_or_path} is not TOML: {e}.") from e
    except ValidationError as e:
        raise UserError(f"model {name_or_path}: {first_problem(e, ModelSpec)}") from e


def first_problem(error: ValidationError, schema: type[BaseModel]) -> str:
    """The first problem of a pydantic ``error`` as one sentence: the key, the value and the expectation."""
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key '{key}'.{did_you_mean(key, schema.model_fields)}"
    if problem["type"] == "missing":
        return f"key '{key}' is missing."
    if problem["type"] == "value_error":
        return f"{key + ': ' if key else ''}{problem['ctx']['error']}."
    expected = problem["msg"].replace("tuple", "list")
    return f"{key} = {problem['input']!r}: {expected[0].lower()}{expected[1:]}."
