"""What there is to tune in a run: the kernels of its step with their settings, compiler flags, rematerialisation."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from slicewise.catalog import flags
from slicewise.catalog.model import ModelSpec
from slicewise.config import AxisDegrees, RunConfig
from slicewise.costs import pipeline
from slicewise.kernels.attention import tiles as attention_tiles
from slicewise.kernels.grouped_matmul import tiles as matmul_tiles
from slicewise.kernels.tuned import Key

REMAT = ("minimal_with_context", "minimal", "save_dot_with_context_except_mlp", "save_dot_except_mlp",
         "save_qkv_proj", "save_out_proj", "full")  # fmt: skip
EIGHT_BIT = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "int8": "int8"}


@dataclass(frozen=True)
class Problem:
    """A kernel of the step, at the shape that one device gives it; the rule's settings are the first candidate.

    ``part`` is forward or backward where these have settings of their own: ``varying`` names them.
    """

    key: Key
    part: str
    varying: tuple[str, ...]
    candidates: tuple[Mapping[str, int], ...]

    @property
    def text(self) -> str:
        return f"{self.key.text}{self.part and ', '}{self.part}"

    def shown(self, values: Mapping[str, int]) -> str:
        """Such as '1024 x 1024 x 512'."""
        return " x ".join(str(values[name]) for name in self.varying)


@dataclass(frozen=True)
class Device:
    """What decides kernels: the chip's name in the catalog, or the platform where it has none."""

    chip: str
    is_tpu: bool


def kernels(config: RunConfig, spec: ModelSpec, degrees: AxisDegrees, device: Device) -> tuple[Problem, ...]:
    """The kernels of a training step whose settings can be tuned on ``device``; none where it has no such kernel."""
    return (
        *_attention(config, spec, device),
        *(_experts(config, spec, degrees, device) if device.is_tpu else ()),
    )


def _attention(config: RunConfig, spec: ModelSpec, device: Device) -> Iterator[Problem]:
    asked, dtype = config.model.attention, config.model.compute_dtype
    qk, v = _head_dims(spec)
    length, limit_kib = config.data.sequence_length, config.compiler.scoped_vmem_limit_kib
    for window in _windows(spec):
        if device.is_tpu and asked in ("auto", "splash"):
            key = attention_tiles.key(device.chip, length, qk, v, window, limit_kib, dtype)
            for part, varying in attention_tiles.PARTS.items():
                found = [attention_tiles.values(t) for t in attention_tiles.candidates(key, part)]
                yield Problem(key, part, varying, tuple(found))
        elif asked == "xla_chunked":
            from slicewise.kernels.attention import chunked

            key = chunked.key(device.chip, length, qk, v, window, dtype)
            blocks = tuple({"block": block} for block in chunked.candidates(key))
            yield Problem(key, "", ("block",), blocks)


def _head_dims(spec: ModelSpec) -> tuple[int, int]:
    a = spec.latent_attention
    return (spec.head_dim, a.v_head_dim) if a else (spec.head_dim, spec.head_dim)


def _windows(spec: ModelSpec) -> tuple[int | None, ...]:
    """Of the layers of a model, each kind once."""
    if spec.sliding_window is None:
        return (None,)
    return (spec.sliding_window, None) if spec.global_every else (spec.sliding_window,)


def _experts(config: RunConfig, spec: ModelSpec, degrees: AxisDegrees, device: Device) -> Iterator[Problem]:
    e = spec.experts
    if e is None or config.model.moe_dispatch != "dropless":
        return
    ways, tensor = degrees.total("expert"), degrees.total("tensor")
    tokens = config.data.sequence_length // degrees.total("context")
    rows = matmul_tiles.padded(_sequences(config, spec, degrees) * tokens * e.per_token)
    hidden, limit_kib = e.d_ff // tensor, config.compiler.scoped_vmem_limit_kib
    dtype = EIGHT_BIT.get(config.quantization, config.model.compute_dtype)
    for name in ("gmm", "gmm_t", "tgmm"):
        for summed, columns in ((spec.d_model, hidden), (hidden, spec.d_model)):
            key = matmul_tiles.key(
                name, device.chip, rows, summed, columns, e.experts // ways, dtype, limit_kib
            )
            found = matmul_tiles.candidates(key)
            values = tuple(dict(zip(matmul_tiles.NAMES, tile, strict=True)) for tile in found)
            yield Problem(key, "", matmul_tiles.NAMES, values)


def _sequences(config: RunConfig, spec: ModelSpec, degrees: AxisDegrees) -> int:
    """Those that pass a layer of one device at once: of an accumulation step, and of one microbatch of a pipeline.

    Raises UserError where the batch gives no whole microbatches.
    """
    shards = degrees.total("data") * degrees.total("fsdp") * degrees.total("expert")
    steps, batch = config.optimizer.gradient_accumulation_steps, config.data.global_batch_size
    microbatches = pipeline.settled(
        spec.name,
        spec.staged_groups,
        stages=degrees.total("pipeline"),
        shards=shards,
        batch=batch,
        steps=steps,
        asked=config.parallelism.pipeline_microbatches,
        repeats=config.parallelism.pipeline_repeats,
    )
    return batch // (shards * steps * microbatches)


def flag_changes(config: RunConfig, chip: str, num_slices: int = 1) -> list[tuple[str, tuple[str, ...]]]:
    """(what, compiler_flags) for each group that ``config`` could put on or off on ``num_slices`` of ``chip``."""
    asked = config.compiler.compiler_flags
    defaults = flags.defaults(chip, offloads=bool(config.remat.offloaded), num_slices=num_slices)
    found = []
    for group in flags.groups().values():
        if chip not in group.chips:
            continue
        is_default, is_on = group.name in defaults, group.name in asked
        if is_on:
            off = [f"no-{group.name}"] if is_default else []
            found.append((f"without {group.name}", (*(f for f in asked if f != group.name), *off)))
        elif is_default and f"no-{group.name}" not in asked:
            found.append((f"without {group.name}", (*asked, f"no-{group.name}")))
        elif not is_default:
            clear = tuple(f for f in asked if f not in group.conflicts)
            found.append((f"with {group.name}", (*clear, group.name)))
    return found


def remat_changes(config: RunConfig) -> list[dict[str, str]]:
    """Keys by which ``config`` would have another policy than its own."""
    places = {"remat_tensors": "{}"} if config.model.remat_tensors else {}
    return [{"remat_policy": name} | places for name in REMAT if name != config.model.remat_policy]
