"""Chip: what one accelerator can do, from the catalog or the user's own file; each number has a source."""

import functools
import math
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from slicewise.catalog.model import Record, first_problem
from slicewise.errors import UserError, did_you_mean

Precision = Literal["bf16", "int8", "fp8", "int4", "fp4"]
BITS: Mapping[str, int] = {"fp32": 32, "bf16": 16, "int8": 8, "fp8": 8, "int4": 4, "fp4": 4}


class Provenance(Record):
    """Where the number ``field`` of a chip comes from; ``also`` holds (value, source) where others differ."""

    field: str
    value: Any
    source: str
    note: str = ""
    also: tuple[tuple[Any, str], ...] = ()


class Shapes(Record):
    """The slice shapes that can be asked for, dims in nondecreasing order except 2x2x1.

    Either only ``list``, or also every box of at most ``max_cubes`` 4x4x4 cubes, and those in ``large``.
    """

    source: str
    list: tuple[tuple[PositiveInt, ...], ...]
    max_cubes: NonNegativeInt = 0
    large: tuple[tuple[PositiveInt, ...], ...] = ()
    wrap_at: NonNegativeInt = 0  # the size at which an axis of a 2D slice closes into a ring; 0 = never


class Level(Record):
    """One level of a switched network: ``units`` members of the level below, each with its own egress."""

    units: PositiveInt
    egress_bytes_per_s: PositiveFloat


class Chip(Record):
    """One accelerator. Rates are peak; numbers are per chip unless the name says device, link or host."""

    name: str
    kind: Literal["tpu", "gpu"]
    aliases: tuple[str, ...] = ()
    jax_device_kinds: tuple[str, ...] = ()  # what JAX calls a device of this chip
    type_prefix: str  # of accelerator types: v5litepod in v5litepod-16
    type_counts: Literal["cores", "chips"]  # what the number in an accelerator type counts
    cores: PositiveInt  # TensorCores, or SMs
    jax_devices: PositiveInt
    shapes: Shapes

    bf16_flops_per_s: PositiveFloat
    int8_flops_per_s: PositiveFloat | None = None  # None = no such unit
    fp8_flops_per_s: PositiveFloat | None = None
    int4_flops_per_s: PositiveFloat | None = None
    fp4_flops_per_s: PositiveFloat | None = None
    clock_hz: PositiveFloat | None = None
    vector_lanes: PositiveInt | None = None  # fp32 ALUs, all cores together
    mxu_dim: PositiveInt = 128  # weight dims are padded to a multiple of it

    hbm_bytes: PositiveFloat  # physical
    usable_hbm_bytes_per_device: PositiveFloat  # what a program can have
    hbm_bytes_per_s: PositiveFloat
    vmem_bytes: PositiveFloat  # on-chip memory a program can hold operands in

    ici_dims: NonNegativeInt = 0  # 0 = no torus
    ici_link_bytes_per_s: NonNegativeFloat = 0.0  # one way, one link
    hop_s: NonNegativeFloat = 1e-6
    core_link_bytes_per_s: PositiveFloat | None = None  # one way, between the devices of one chip
    levels: tuple[Level, ...] = ()  # switched network from the inside out
    dcn_bytes_per_s: PositiveFloat  # egress per chip into the data-centre network
    pcie_bytes_per_s: PositiveFloat  # one way, to the host's memory

    host_shape: tuple[PositiveInt, ...]  # chips of one host of a slice of several hosts
    host_ram_bytes: PositiveFloat | None = None
    price_per_chip_hour: PositiveFloat | None = None  # on demand, in the currency of the price source
    spot_price_per_chip_hour: PositiveFloat | None = None
    reserved_price_per_chip_hour: PositiveFloat | None = None

    provenance: tuple[Provenance, ...] = ()

    @property
    def usable_hbm_bytes(self) -> float:
        """Bytes a program can have on one chip, all its devices together."""
        return self.usable_hbm_bytes_per_device * self.jax_devices

    @property
    def ici_axis_bytes_per_s(self) -> float:
        """Bytes/s of one torus axis, both directions together (W2 = 2 W1)."""
        return 2 * self.ici_link_bytes_per_s

    @property
    def ici_egress_bytes_per_s(self) -> float:
        """Bytes/s that one chip can send over all its links."""
        return 2 * self.ici_dims * self.ici_link_bytes_per_s

    def peak_flops_per_s(self, precision: str = "bf16") -> float:
        """Peak FLOP/s in ``precision``. Raises UserError when the chip has no unit for it."""
        if precision not in BITS or precision == "fp32":
            raise UserError(
                f"unknown precision '{precision}'.{did_you_mean(precision, BITS)}"
                " Expected bf16, int8, fp8, int4 or fp4."
            )
        rate = getattr(self, f"{precision}_flops_per_s")
        if rate is None:
            have = [p for p in BITS if p != "fp32" and getattr(self, f"{p}_flops_per_s") is not None]
            raise UserError(f"{self.name} has no {precision} matrix unit; it computes in {', '.join(have)}.")
        return rate

    def source(self, field: str) -> Provenance:
        """Where ``field`` comes from. Raises KeyError for a field that is not a sourced number."""
        return next(p for p in self.provenance if p.field == field)


@functools.cache
def _tables() -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """The catalog: (what each source name means, the tables of chips)."""
    text = (resources.files("slicewise.catalog") / "chips.toml").read_text()
    tables = tomllib.loads(text)
    return tables.pop("sources"), tables


def sources() -> Mapping[str, str]:
    """What the source names of the catalog stand for."""
    return _tables()[0]


def names() -> tuple[str, ...]:
    """The chips of the catalog, in its order."""
    return tuple(_tables()[1])


@functools.cache
def of_device_kind(kind: str) -> Chip | None:
    """The chip of the catalog whose devices JAX calls ``kind``."""
    for name, table in _tables()[1].items():
        if kind in table.get("jax_device_kinds", ()):
            return load(name)
    return None


def saves_bytes_only(chip: Chip, quantization: str) -> str | None:
    """What to know where ``chip`` multiplies no faster in ``quantization``, of a config, than in bfloat16."""
    precision = "int8" if quantization == "int8" else "fp8"
    rate = chip.int8_flops_per_s if precision == "int8" else chip.fp8_flops_per_s
    if rate is not None and rate > chip.bf16_flops_per_s:
        return None
    return (
        f"{chip.name} has no {precision} matrix unit faster than bfloat16: quantization = '{quantization}' halves the"
        " bytes of gathered weights there and saves no time in products."
    )


def load(
    name: str, chip_file: str | None = None, price_file: str | None = None, prefer: str | None = None
) -> Chip:
    """The chip ``name`` of ``chip_file`` (a TOML of such tables; each may name a ``base``) or of the catalog.

    ``prefer`` takes the numbers of one source (such as 'book' or 'docs') where that source has its own.
    ``price_file`` overlays prices: ``[v5p]`` with on_demand, spot or reserved per chip-hour.
    Raises UserError for an unknown name or source, an unreadable file or a value out of range.
    """
    own = _read(chip_file, "chip file") if chip_file else {}
    tables = {**_tables()[1], **own}
    known = {alias: chip for chip, table in tables.items() for alias in (chip, *table.get("aliases", ()))}
    if name.lower() not in known:
        raise UserError(
            f"unknown chip '{name}'.{did_you_mean(name.lower(), known)} Known: {', '.join(tables)};"
            " or describe it in a chip file."
        )
    key = known[name.lower()]
    if prefer is not None and prefer not in sources():
        raise UserError(
            f"unknown source '{prefer}'.{did_you_mean(prefer, sources())} Known: {', '.join(sources())}."
        )
    where = f"chip {key} in {chip_file}" if key in own else f"chip {key}"
    table = _with_base(key, tables, where)
    chip = _build(key, table, where, default_source=chip_file or "", prefer=prefer)
    return _priced(chip, price_file, known) if price_file else chip


def _with_base(name: str, tables: Mapping[str, dict[str, Any]], where: str) -> dict[str, Any]:
    """The table of ``name`` over those of its chain of bases."""
    merged: dict[str, Any] = {}
    seen: list[str] = []
    while True:
        seen.append(name)
        merged = {**tables[name], **merged}
        base = merged.pop("base", None)
        if base is None:
            return merged
        if base not in tables or base in seen:
            raise UserError(f"{where}: base = '{base}' is not another chip.{did_you_mean(str(base), tables)}")
        merged.setdefault("aliases", [])  # a base's other names stay its own
        name = base


def _build(
    name: str, table: Mapping[str, Any], where: str, *, default_source: str, prefer: str | None
) -> Chip:
    values: dict[str, Any] = {"name": name}
    provenance = []
    for field, given in table.items():
        if isinstance(given, dict) and "value" in given:
            extra = set(given) - {"value", "source", "note", "also"}
            if extra:
                raise UserError(
                    f"{where}: {field} has an unknown key '{min(extra)}'; expected value, source, note, also."
                )
            choices = [given, *given.get("also", ())]
            chosen = next((c for c in choices if prefer and c.get("source") == prefer), given)
            others = [(_frozen(c["value"]), c.get("source", "")) for c in choices if c is not chosen]
            source = chosen.get("source", default_source)
            note = chosen.get("note", "")
            provenance.append(
                Provenance(
                    field=field, value=_frozen(chosen["value"]), source=source, note=note, also=tuple(others)
                )
            )
            values[field] = chosen["value"]
        else:
            values[field] = given
            if isinstance(given, int | float):
                provenance.append(Provenance(field=field, value=given, source=default_source or "catalog"))
    try:
        return Chip(**values, provenance=tuple(provenance))
    except ValidationError as e:
        raise UserError(f"{where}: {first_problem(e, Chip)}") from e


def _frozen(value: Any) -> Any:
    """TOML's lists and tables as tuples, so that records stay hashable."""
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _priced(chip: Chip, price_file: str, known: Mapping[str, str]) -> Chip:
    """``chip`` with the prices that ``price_file`` gives it; unchanged where the file does not name it."""
    tables = _read(price_file, "price file")
    if strange := next((name for name in tables if name not in known.values()), None):
        raise UserError(
            f"price file {price_file}: [{strange}] is no chip.{did_you_mean(strange, known.values())}"
            f" Known: {', '.join(dict.fromkeys(known.values()))}."
        )
    fields = {"on_demand": "", "spot": "spot_", "reserved": "reserved_"}
    update: dict[str, Any] = {}
    provenance = list(chip.provenance)
    for key, value in tables.get(chip.name, {}).items():
        if key not in fields:
            raise UserError(
                f"price file {price_file}: [{chip.name}] has an unknown key '{key}';"
                f" expected {', '.join(fields)}."
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UserError(
                f"price file {price_file}: {chip.name}.{key} = {value!r}:"
                " expected a price above 0 per chip-hour."
            )
        field = f"{fields[key]}price_per_chip_hour"
        update[field] = float(value)
        provenance = [p for p in provenance if p.field != field]
        provenance.append(Provenance(field=field, value=float(value), source=price_file))
    return chip.model_copy(update={**update, "provenance": tuple(provenance)})


def _read(path: str, what: str) -> dict[str, dict[str, Any]]:
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as e:
        raise UserError(f"{what} {path}: {e.strerror}.") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{what} {path} is not TOML: {e}.") from e
    tables.pop("sources", None)
    if stray := [key for key, value in tables.items() if not isinstance(value, dict)]:
        raise UserError(f"{what} {path}: '{stray[0]}' stands outside a table; put it under [<chip>].")
    return tables
