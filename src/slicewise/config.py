"""RunConfig: everything that decides a run, from TOML sections plus flat ``key=value`` overrides."""

import json
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from slicewise.catalog.model import first_problem
from slicewise.costs import effects, limits
from slicewise.costs.adapters import Lora as Adapters
from slicewise.costs.batch import LARGEST
from slicewise.costs.layout import ContextExchange
from slicewise.costs.remat import RematPolicy, chosen
from slicewise.costs.shapes import ModelShape
from slicewise.errors import UserError, did_you_mean

# Mesh axes, slowest first; each has an ici_ and a dcn_ key.
AXES = ("data", "pipeline", "fsdp", "expert", "context", "tensor")
STORED = "the run's config"  # origin of values that were accepted once: they are not judged again
ALWAYS_LISTED = (
    "data",
    "fsdp",
    "tensor",
)  # where a message lists degrees; the others where they are asked for


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise PydanticCustomError("truth_value", "input should not be true or false")
        return value

    @field_validator("*")
    @classmethod
    def _fits_a_device(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, int) and value > LARGEST and info.field_name != "seed":
            raise PydanticCustomError("too_large", f"input should be at most {LARGEST}")
        return value


Degree = typing.Annotated[int, Field(ge=-1)]  # of parallelism: -1 fills what the other axes leave
ContextStrategy = ContextExchange
QuantizationName = Literal["none", "fp8", "fp8_e4m3", "int8"]


class Run(Part):
    run_name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Names the run's folder under output_directory."""
    output_directory: str = Field("runs", min_length=1)
    """Where runs are kept: a local path, or any URL that the checkpoint library writes (gs://...)."""
    steps: PositiveInt = 100
    """Optimiser steps of the whole run."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Decides the initial weights and the order of the data."""


class Model(Part):
    model: str = Field("demo-1m", min_length=1)
    """A catalog name, a ModelSpec .toml, or a Hugging Face config.json."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of activations and matrix products; weights stay float32."""
    remat_policy: Literal[
        "full",
        "save_qkv_proj",
        "save_out_proj",
        "save_dot_except_mlp",
        "save_dot_except_mlpwi",
        "save_dot_with_context_except_mlp",
        "minimal",
        "minimal_with_context",
        "qkv_proj_offloaded",
        "minimal_offloaded",
        "none",
        "custom",
    ] = "minimal"
    """Activations of a layer that the backward pass finds, the others are recomputed; custom: see remat_tensors."""
    remat_tensors: dict[str, Literal["device", "offload", "remat"]] = {}
    """With remat_policy = custom, where named activations wait: device, offload (to the host) or remat."""
    layers_per_round: PositiveInt = 1
    """Layers in one round of the loop over them: the weights of the next travel beside the first's compute."""
    attention: Literal["auto", "reference", "splash", "xla_chunked"] = "auto"
    """Implementation; auto is the splash kernel on TPU and the reference elsewhere."""
    use_max_logits_estimate: float = Field(0.0, ge=0, le=1e6)
    """Splash attention subtracts it from every logit instead of the running maximum; 0 = the maximum."""
    use_qwix_quantization: bool = True
    """False computes everything in compute_dtype, whatever quantization says."""
    quantization: QuantizationName = "none"
    """8-bit products in the layers: e4m3 with e5m2 or e4m3 gradients, or int8."""
    quantization_layers: str = ".*"
    """Regular expression that a matrix's whole name in a layer must match, such as w_(gate|up|down)."""
    quantization_scaling: Literal["tensor", "axis", "tile"] = "tensor"
    """One scale for an operand, for each of its rows, or for each tile of a row."""
    quantization_tile: PositiveInt = 128
    """Elements of a tile."""
    quantization_fixed_range: NonNegativeFloat = 0.0
    """Largest weight and activation that 8 bits hold; 0 = the largest there is, at each step."""
    quantization_calibrate_every: NonNegativeInt = 0
    """Steps for which scales of weights and activations stay as they are; 0 = they are taken anew at each step."""
    quantization_stochastic_rounding: bool = False
    """Rounds gradients up or down at random instead of to the nearest."""
    moe_dispatch: Literal["dropless", "capacity"] = "dropless"
    """Whether experts compute every token that chose them, or drop what exceeds their capacity."""
    capacity_factor: PositiveFloat = 1.25
    """Room for an expert's tokens relative to an even share; when dropless, for a part of an all-to-all."""
    load_balance_loss_weight: NonNegativeFloat = 0.001
    """Weight of each sparse layer's balance loss."""
    prediction_loss_weight: NonNegativeFloat = 0.3
    """Weight of the mean loss of the layers of multi-token prediction."""
    z_loss_weight: NonNegativeFloat = 0.0
    """Weight of the squared log-normaliser in the loss."""


class Data(Part):
    dataset: Literal[
        "python-stdlib", "text", "jsonl", "parquet", "arrayrecord", "huggingface", "synthetic"
    ] = "python-stdlib"
    """Kind of source; the default is the source text of the running Python's standard library."""
    dataset_path: str = ""
    """File, directory or glob of the source; for huggingface the dataset's name."""
    text_field: str = "text"
    """Field of a record that holds the text."""
    messages_field: str = ""
    """Field of a record that holds a conversation, for fine-tuning on its answers; empty = documents are text."""
    chat_template: str = "auto"
    """How a conversation becomes text: auto (the tokenizer's own, else builtin), builtin, or a Jinja file."""
    tokenizer: str = Field("bytes", min_length=1)
    """'bytes', a tokenizer.json, or a SentencePiece .model."""
    sequence_length: PositiveInt = 256
    """Tokens a packed sequence."""
    global_batch_size: PositiveInt = 16
    """Sequences a step over all devices."""
    held_out_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of the documents kept for evaluation and never trained on."""


class Parallelism(Part):
    ici_data_parallelism: Degree = 1
    """Replicas of the parameters within a slice; in every group -1 fills what the other axes leave."""
    ici_pipeline_parallelism: Degree = 1
    """Stages within a slice: each holds its share of the layers, and microbatches pass through all of them."""
    ici_fsdp_parallelism: Degree = -1
    """Devices of a slice over which parameters are sharded and gathered where they are used."""
    ici_expert_parallelism: Degree = 1
    """Devices of a slice that share the experts; they divide the batch and all other weights as fsdp does."""
    ici_context_parallelism: Degree = 1
    """Devices of a slice that share the tokens of each sequence; they divide all weights as fsdp does."""
    ici_tensor_parallelism: Degree = 1
    """Devices of a slice that share heads, MLP columns and the vocabulary."""
    dcn_data_parallelism: Degree = -1
    """Slices that each hold a replica."""
    dcn_pipeline_parallelism: Degree = 1
    """Slices or groups of them that are stages of a pipeline."""
    dcn_fsdp_parallelism: Degree = 1
    """Slices over which parameters are sharded."""
    dcn_expert_parallelism: Degree = 1
    """Slices that share the experts."""
    dcn_context_parallelism: Degree = 1
    """Slices that share the tokens of each sequence."""
    dcn_tensor_parallelism: Degree = 1
    """Slices that share heads, MLP columns and the vocabulary."""
    context_strategy: ContextStrategy = "all_gather"
    """How attention crosses the context axis: keys and values gathered, passed round a ring, or heads exchanged."""
    elastic: Literal["off", "accumulate", "batch"] = "off"
    """A job that lost slices goes on with the others: same batch by gradient accumulation, or smaller batches."""
    min_slices: PositiveInt = 1
    """Fewest slices with which an elastic job goes on."""
    pipeline_microbatches: NonNegativeInt = 0
    """Parts of the batch on their way through the stages, a multiple of the stages; 0 = derived."""
    pipeline_repeats: PositiveInt = 1
    """Times a microbatch passes each stage, with other layers each time: above 1 the schedule is circular."""
    pipeline_gather: Literal["step", "microbatch"] = "step"
    """How often a stage gathers weights that are sharded over fsdp: once, to keep them, or for each microbatch."""

    def degrees(self, network: Literal["ici", "dcn"]) -> dict[str, int]:
        """The degree asked for on each axis over one network, -1 where it fills."""
        return {axis: getattr(self, f"{network}_{axis}_parallelism") for axis in AXES}


def _listed(value: Any) -> Any:
    """A list may be written as one string with commas between, as on a command line."""
    return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value


class Compiler(Part):
    compiler_flags: typing.Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    """For TPUs: groups of 'slicewise flags list' and flag=value, over the chip's defaults."""
    scoped_vmem_limit_kib: NonNegativeInt = 0
    """For TPUs: VMEM that one fusion or kernel may use; 0 = the compiler's limit."""
    executable: str = ""
    """File of slicewise compile --serialize with this run's step, for a start without compiling."""


class Optimizer(Part):
    optimizer_type: Literal["adamw", "adafactor", "lion", "muon"] = "adamw"
    """The update rule; muon takes the matrices of the layers and leaves the rest to adamw."""
    learning_rate: PositiveFloat = 3e-4
    """Peak of the schedule."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of linear warm-up; by default a twentieth of the run."""
    final_learning_rate_fraction: float = Field(0.1, ge=0, le=1)
    """Where the cosine ends, as a share of the peak."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled, on weights that multiply activations; not on norms and biases."""
    adam_b1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment of adamw and lion."""
    adam_b2: float = Field(0.95, ge=0, lt=1)
    """Decay of adamw's second moment, and of what lion remembers."""
    gradient_clip_norm: NonNegativeFloat = 1.0
    """Global norm above which gradients are scaled down; 0 = never."""
    gradient_accumulation_steps: PositiveInt = 1
    """Parts into which a step divides its batch, one after the other: less memory, the same result."""
    optimizer_state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Of the optimiser's state of each matrix; the narrow ones round at random, without bias."""
    optimizer_state_memory: Literal["device", "host"] = "device"
    """Where the optimiser's state waits between steps."""
    shard_optimizer_over_data: bool = False
    """ZeRO-1: replicas share out the optimiser's state, whose parameters each of them holds."""


class Checkpoint(Part):
    checkpoint_every: NonNegativeInt = 100
    """Steps between checkpoints (one more at the end); 0 = none."""
    checkpoint_interval_s: NonNegativeFloat = 0.0
    """Seconds between checkpoints, in place of checkpoint_every; 0 = by steps."""
    failures_per_day: NonNegativeFloat = 0.0
    """Of the whole job; above 0 checkpoints come at the interval of best expected goodput."""
    checkpoint_keep: PositiveInt = 3
    """Newest checkpoints kept."""
    checkpoint_keep_every: NonNegativeInt = 0
    """Also keeps for good the first checkpoint at or after each multiple of so many steps; 0 = none."""
    checkpoint_keep_best: NonNegativeInt = 0
    """Also keeps so many with the lowest loss of eval_every's evaluations, each of which then saves; 0 = none."""
    resume: Literal["auto", "never"] = "auto"
    """auto continues from the run's newest complete checkpoint; never refuses to touch an existing run."""
    initial_weights: str = ""
    """Where the weights of a new run come from: a Hugging Face folder or another run; empty = random."""
    local_checkpoint_directory: str = ""
    """Where each host keeps its own part of the newest states: a disk of its own, or memory such as /dev/shm."""
    local_checkpoint_every: NonNegativeInt = 0
    """Steps between local checkpoints; 0 = none."""
    replica_check_every: NonNegativeInt = 0
    """Steps between comparisons, bit by bit, of what data-parallel replicas hold; 0 = none."""
    replay_check_every: NonNegativeInt = 0
    """Steps between steps that are taken twice, to compare their results; 0 = none."""


class Lora(Part):
    lora_rank: NonNegativeInt = 0
    """Rank of the adapters that are trained instead of the weights; 0 trains the weights."""
    lora_alpha: PositiveFloat = 16.0
    """What an adapter adds is multiplied by lora_alpha / lora_rank."""
    lora_layers: str = ""
    """Regular expression for the matrices with adapters, such as w[qv]; empty = all but routed experts."""
    lora_base_dtype: Literal["bfloat16", "float32", "int8"] = "bfloat16"
    """How the frozen matrices are kept; int8 has one scale a column."""


class Faults(Part):
    stop_grace_s: PositiveFloat = 50.0
    """Seconds from a request to stop, or the notice of a preemption, in which the state is saved."""
    on_bad_step: Literal["stop", "skip", "rollback"] = "stop"
    """What follows a loss or gradient that is no number, and with stop or rollback a spike."""
    loss_spike_ratio: float = Field(0.0, ge=0)
    """A loss of so many times the median of the last 16 is a spike; 0 = there are none."""
    rollback_steps: PositiveInt = 1
    """With rollback: how far before the bad step the checkpoint lies, at least. Data go on behind the bad step."""


class Evaluation(Part):
    eval_every: NonNegativeInt = 0
    """Steps between evaluations on held-out text (one more at the end); 0 = only at the end."""
    eval_batches: NonNegativeInt = 8
    """Batches an evaluation; 0 = no evaluation."""


class Metrics(Part):
    log_every: PositiveInt = 1
    """Steps between metric records."""
    tensorboard: bool = True
    """Write TensorBoard event files beside metrics.jsonl."""
    goodput_logger: str = ""
    """Log of Google Cloud Logging to which ml-goodput-measurement reports as well; empty = none."""
    profile_from: NonNegativeInt = 0
    """First step of the profiling window."""
    profile_steps: NonNegativeInt = 0
    """Steps of the profiling window; 0 = no profile."""


class RunConfig(Part):
    """One run. Sections of the TOML file are the fields here; every key below them is unique over all sections."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    parallelism: Parallelism = Parallelism()
    compiler: Compiler = Compiler()
    optimizer: Optimizer = Optimizer()
    lora: Lora = Lora()
    checkpoint: Checkpoint = Checkpoint()
    faults: Faults = Faults()
    evaluation: Evaluation = Evaluation()
    metrics: Metrics = Metrics()

    @property
    def directory(self) -> str:
        """The run's folder: output_directory/run_name."""
        return f"{self.run.output_directory.rstrip('/')}/{self.run.run_name}"

    @property
    def local_directory(self) -> Path:
        """Where a machine keeps metrics, profiles and logs: the run's folder, or runs/NAME when that is a URL."""
        return Path("runs") / self.run.run_name if "://" in self.directory else Path(self.directory)

    @property
    def adapters(self) -> Adapters | None:
        """The adapters that are trained instead of the weights; None where the weights are."""
        l = self.lora
        return Adapters(l.lora_rank, l.lora_alpha, l.lora_layers, l.lora_base_dtype) if l.lora_rank else None

    @property
    def quantization(self) -> QuantizationName:
        """What is done: none where it is switched off."""
        return self.model.quantization if self.model.use_qwix_quantization else "none"

    @property
    def remat(self) -> RematPolicy:
        """Raises UserError for tensors or places that there are not."""
        return chosen(self.model.remat_policy, self.model.remat_tensors)

    @property
    def warmup_steps(self) -> int:
        if self.optimizer.warmup_steps is not None:
            return self.optimizer.warmup_steps
        return self.run.steps // 20


SECTION_OF = {
    key: section
    for section, field in RunConfig.model_fields.items()
    for key in typing.cast(type[Part], field.annotation).model_fields
}


@dataclass(frozen=True)
class LoadedConfig:
    config: RunConfig
    origins: Mapping[str, str]  # key -> "default", the file's name or "command line"


def load_config(path: str | None, overrides: Iterable[str] = ()) -> LoadedConfig:
    """Reads TOML sections from ``path`` (None = all defaults) and applies ``key=value`` overrides.

    Raises UserError for an unreadable file, an unknown or misplaced key, a wrong type or a value that no run takes.
    """
    sections: dict[str, dict[str, Any]] = {section: {} for section in RunConfig.model_fields}
    origins = dict.fromkeys(SECTION_OF, "default")
    for section, values in (_read_toml(path) if path is not None else {}).items():
        if section not in sections or not isinstance(values, dict):
            raise UserError(f"{path}: {_misplaced(section)}")
        for key, value in values.items():
            if SECTION_OF.get(key) != section:
                raise UserError(f"{path}: in [{section}]: {_misplaced(key)}")
            sections[section][key] = value
            origins[key] = str(path)
    return _validate(sections, overrides, origins)


def with_overrides(config: RunConfig, overrides: Iterable[str]) -> RunConfig:
    """``config`` with ``key=value`` overrides. Raises UserError as load_config does."""
    origins = dict.fromkeys(SECTION_OF, STORED)
    return _validate(config.model_dump(), overrides, origins).config


def _validate(
    sections: dict[str, dict[str, Any]], overrides: Iterable[str], origins: dict[str, str]
) -> LoadedConfig:
    for override in overrides:
        key, sign, value = override.partition("=")
        if not sign or not key:
            raise UserError(f"'{override}' is not an override; write key=value, such as steps=100.")
        if key not in SECTION_OF:
            raise UserError(_misplaced(key))
        sections[SECTION_OF[key]][key] = _parse(key, value)
        origins[key] = "command line"
    try:
        loaded = LoadedConfig(RunConfig(**typing.cast(Any, sections)), origins)
    except ValidationError as e:
        key = str(e.errors()[0]["loc"][:2][-1])
        raise UserError(f"{first_problem(e, RunConfig)} (from {origins.get(key, 'default')})") from e
    here = {key: value for key, value in changed(loaded.config).items() if origins[key] != STORED}
    effects.check_keys(flat(loaded.config), here)
    limits.check(flat(loaded.config), here)
    return loaded


def flat(config: RunConfig) -> dict[str, Any]:
    """The value of every key."""
    return {key: getattr(getattr(config, section), key) for key, section in SECTION_OF.items()}


def changed(config: RunConfig) -> dict[str, Any]:
    """The keys whose value is not the default."""
    default = flat(RunConfig())
    return {key: value for key, value in flat(config).items() if value != default[key]}


def check_effects(
    config: RunConfig, shape: ModelShape | None, degrees: "AxisDegrees", num_slices: int
) -> None:
    """Raises UserError for a key that has no effect on the model, or on the layout over ``num_slices``.

    ``shape`` is None where only the devices that train need to know the model.
    """
    asked = changed(config)
    if shape is not None:
        effects.check_model(shape, asked)
    effects.check_layout({axis: degrees.total(axis) for axis in AXES}, num_slices, asked)


def _read_toml(path: str) -> dict[str, Any]:
    try:
        # Some editors begin files with a mark.
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as e:
        raise UserError(f"config file {path or repr('')}: {e.strerror}.") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"config file {path} is not TOML: {e}.") from e


def _misplaced(key: str) -> str:
    if key in SECTION_OF:
        return f"key '{key}' belongs in section [{SECTION_OF[key]}]."
    if key in RunConfig.model_fields:
        return f"'{key}' is a section and takes no value; write [{key}], and its keys below."
    known = [*SECTION_OF, *RunConfig.model_fields]
    return f"unknown key '{key}'.{did_you_mean(key, known)} 'slicewise config' lists all keys."


def _parse(key: str, text: str) -> Any:
    """``text`` as TOML would read it, except that a string needs no quotes."""
    annotation = _field_type(key)
    if annotation is str or typing.get_origin(annotation) is Literal:
        return text
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text  # of the wrong type: validation names the key, the value and what was expected


def _field_type(key: str) -> Any:
    part = typing.cast(type[Part], RunConfig.model_fields[SECTION_OF[key]].annotation)
    annotation = part.model_fields[key].annotation
    if isinstance(annotation, types.UnionType):
        return next(arg for arg in annotation.__args__ if arg is not types.NoneType)
    return annotation


@dataclass(frozen=True)
class AxisDegrees:
    """Resolved degrees of parallelism of each axis: no -1 left, products equal the cluster's shape."""

    ici: Mapping[str, int]
    dcn: Mapping[str, int]

    def total(self, axis: str) -> int:
        return self.ici[axis] * self.dcn[axis]


def resolve_degrees(config: RunConfig, *, num_slices: int, devices_per_slice: int) -> AxisDegrees:
    """Fills the -1 of each network and checks both products against the cluster.

    Raises UserError when a product differs, with both numbers and the degrees that would fit.
    """
    return AxisDegrees(
        ici=_fill(config, "ici", devices_per_slice, f"{devices_per_slice} devices per slice"),
        dcn=_fill(config, "dcn", num_slices, f"{num_slices} slices" if num_slices > 1 else "1 slice"),
    )


def _fill(config: RunConfig, network: Literal["ici", "dcn"], size: int, found: str) -> dict[str, int]:
    degrees = config.parallelism.degrees(network)
    keys = {axis: f"{network}_{axis}_parallelism" for axis in AXES}
    if zero := [keys[a] for a, d in degrees.items() if d == 0]:
        raise UserError(f"{zero[0]} = 0: expected 1 or more, or -1 to fill.")
    fill = [axis for axis, degree in degrees.items() if degree == -1]
    if len(fill) > 1:
        raise UserError(
            f"{' and '.join(keys[a] for a in fill)} are both -1: only one {network}_ axis may fill."
        )
    product = math.prod(d for d in degrees.values() if d != -1)
    asked = " x ".join(f"{keys[a]}={d}" for a, d in degrees.items() if d not in (1, -1)) or "all axes 1"
    if (fill and size % product) or (not fill and product != size):
        relation = "does not divide" if fill else "is not"
        listed = {a: d for a, d in degrees.items() if a in ALWAYS_LISTED or d > 1}
        raise UserError(
            f"the {network}_ axes multiply to {product} ({asked}), which {relation} the {found} found;"
            f" these fit ({' x '.join(listed)}): {_factorisations(size, listed)}."
        )
    return {axis: size // product if degree == -1 else degree for axis, degree in degrees.items()}


def _factorisations(size: int, asked: Mapping[str, int], limit: int = 12) -> str:
    """The factorisations of ``size`` over the axes of ``asked``: first those that keep what was asked of an axis that
    not every layout has, then the simplest."""
    chosen = [(k, d) for k, (axis, d) in enumerate(asked.items()) if axis not in ALWAYS_LISTED]

    def order(split: tuple[int, ...]) -> tuple:
        changed = sum(split[k] != degree for k, degree in chosen)
        return changed, sum(d > 1 for d in split), split[0], split[-1]

    splits = sorted(_splits(size, len(asked)), key=order)
    shown = ", ".join("x".join(map(str, split)) for split in splits[:limit])
    return shown + (", ..." if len(splits) > limit else "")


def _splits(size: int, axes: int) -> list[tuple[int, ...]]:
    """Every way to write ``size`` as a product of so many degrees."""
    if axes == 1:
        return [(size,)]
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return [(d, *rest) for d in divisors for rest in _splits(size // d, axes - 1)]


@dataclass(frozen=True)
class Row:
    """One key of a resolved config, as TOML, with where its value came from and what it means."""

    section: str
    key: str
    value: str
    origin: str
    meaning: str


def describe(loaded: LoadedConfig, degrees: AxisDegrees | None = None) -> Sequence[Row]:
    """Every key in the order of the sections; with ``degrees`` the -1 of the parallelism keys are filled in."""
    rows = []
    for section, field in RunConfig.model_fields.items():
        part = typing.cast(type[Part], field.annotation)
        for key, info in part.model_fields.items():
            value, origin = getattr(getattr(loaded.config, section), key), loaded.origins[key]
            if value is None:
                value, origin = getattr(loaded.config, key), "derived"
            if degrees and value == -1:
                network, axis, _ = key.split("_")
                value, origin = getattr(degrees, network)[axis], "derived from the cluster"
            rows.append(Row(section, key, toml(value), origin, info.description or ""))
    return rows


def toml(value: Any) -> str:
    """``value`` as TOML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else json.dumps(value)
