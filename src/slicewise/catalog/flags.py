"""Flags of the TPU compiler: named groups with purpose, chips, source and conflicts, and the names libtpu knows."""

import functools
import importlib.metadata
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from types import MappingProxyType
from typing import Any

from slicewise.catalog import chips
from slicewise.catalog.model import Record
from slicewise.errors import UserError, did_you_mean

Value = bool | int | float | str
SCOPED_VMEM = "xla_tpu_scoped_vmem_limit_kib"
LEAST_VMEM_KIB = 2048  # with 1025 and less the compiler of libtpu 0.0.50.1 crashes on demo-tiny


class Group(Record):
    """Flags that belong together."""

    name: str
    purpose: str
    chips: tuple[str, ...]  # generations that have what it uses
    source: tuple[str, ...]  # names in sources()
    flags: Mapping[str, Value]
    conflicts: tuple[str, ...] = ()  # groups that cannot be on beside it
    default: tuple[str, ...] = ()  # generations whose runs get it unasked
    one_slice: bool = False  # by default only where one slice is the whole run
    default_offloading: tuple[str, ...] = ()  # where activations go to the host, instead of what excludes it
    note: str = ""


class Refused(Record):
    """A setting with which no program compiles for ``chips``; every value where ``value`` is None."""

    flag: str
    chips: tuple[str, ...]
    reason: str
    source: str
    value: Value | None = None
    instead: str = ""  # a group


@functools.cache
def _file() -> dict:
    return tomllib.loads((resources.files("slicewise.catalog") / "flags.toml").read_text())


def sources() -> Mapping[str, str]:
    """What the source names of the groups stand for."""
    return _file()["sources"]


@functools.cache
def groups() -> Mapping[str, Group]:
    """All groups by name, in the order of the file."""
    return MappingProxyType({n: Group(name=n, **table) for n, table in _file()["groups"].items()})


@functools.cache
def refused() -> tuple[Refused, ...]:
    return tuple(Refused(**table) for table in _file()["refused"])


def installed() -> str:
    """The libtpu whose options apply: the installed one, or without any the newest that the catalog lists."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return listed()[-1]


@functools.cache
def listed() -> tuple[str, ...]:
    """Versions of libtpu whose options the catalog lists, oldest first."""
    folder = resources.files("slicewise.catalog") / "libtpu"
    versions = [f.name.removesuffix(".tsv") for f in folder.iterdir() if f.name.endswith(".tsv")]
    return tuple(sorted(versions, key=_number))


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


@functools.cache
def options(version: str) -> Mapping[str, str]:
    """Every option of the compiler of libtpu ``version`` with its default ("" = none).

    Those of the nearest version before it where the catalog does not list it, or else of the oldest.
    """
    text = (resources.files("slicewise.catalog") / "libtpu" / f"{_list_for(version)}.tsv").read_text()
    rows = (line.partition("\t") for line in text.splitlines() if not line.startswith("#"))
    return MappingProxyType({flag: default for flag, _, default in rows})


def _list_for(version: str) -> str:
    before = [v for v in listed() if _number(v) <= _number(version)]
    return before[-1] if before else listed()[0]


def defaults(chip: str, *, offloads: bool = False, num_slices: int = 1) -> list[str]:
    """The groups that a run on ``chip`` gets unasked; with ``offloads`` one that keeps activations on the host."""
    fitting = {name: group for name, group in groups().items() if num_slices == 1 or not group.one_slice}
    names = [name for name, group in fitting.items() if chip in group.default]
    instead = [group for group in groups().values() if offloads and chip in group.default_offloading]
    for group in instead:
        names = [*(n for n in names if not _exclude(groups()[n], group)), group.name]
    return names


def resolve(
    asked: Sequence[str],
    chip: str,
    scoped_vmem_limit_kib: int = 0,
    version: str | None = None,
    *,
    offloads: bool = False,
    num_slices: int = 1,
) -> dict[str, Value]:
    """Options for a program on ``chip``, a TPU of the catalog: its default groups, then ``asked`` in order.

    An item is a group, ``no-`` and a default group, or ``flag=value``, with or without leading dashes. A single flag
    counts over groups, which must agree. A group that is asked for replaces default ones that exclude it.
    ``scoped_vmem_limit_kib`` 0 leaves the compiler's.
    Raises UserError for what is unknown, not for this chip, contradictory or refused by the compiler.
    """
    version = version or installed()
    names = defaults(chip, offloads=offloads, num_slices=num_slices)
    can_be_off = {*defaults(chip), *defaults(chip, offloads=True)}
    overrides: dict[str, Value] = {}
    for item in asked:
        word = item.strip().lstrip("-")
        if "=" in word:
            _override(overrides, word, version)
        elif (off := word.removeprefix("no-")) in {*names, *can_be_off} and word not in groups():
            names = [name for name in names if name != off]
        elif (group := _group(word, chip)).name not in names:
            names = [n for n in names if n in asked or not _exclude(groups()[n], group)]
            names.append(word)
    chosen = _merged([groups()[name] for name in names], overrides)
    for flag in chosen:
        _known(flag, version)
    if scoped_vmem_limit_kib:
        if SCOPED_VMEM in overrides:
            raise UserError(
                f"compiler_flags sets {SCOPED_VMEM} and scoped_vmem_limit_kib does too; set only the key."
            )
        _check_vmem(scoped_vmem_limit_kib, chip)
        overrides[SCOPED_VMEM] = scoped_vmem_limit_kib
    chosen |= overrides
    _check_refused(chosen, chip)
    return dict(sorted(chosen.items()))


def check_names(asked: Sequence[str], version: str | None = None) -> None:
    """Raises UserError for an item of ``asked`` that no chip has, a value that its flag does not take, and a flag that
    is set twice."""
    version = version or installed()
    overrides: dict[str, Value] = {}
    for item in asked:
        word = item.strip().lstrip("-")
        if "=" in word:
            _override(overrides, word, version)
        elif word not in groups() and word.removeprefix("no-") not in groups():
            raise _unknown(word, [*groups(), *(f"no-{name}" for name in groups())])


def explain(name: str, version: str | None = None) -> list[str]:
    """What a group or a flag is, in lines; the first is the heading. Raises UserError for an unknown name."""
    version = version or installed()
    name = name.lstrip("-").partition("=")[0]
    if group := groups().get(name) or groups().get(name.removeprefix("no-")):
        name = group.name
        lines = [name, group.purpose, f"chips: {', '.join(group.chips)}"]
        lines += [f"on by default: {', '.join(group.default)}"] if group.default else []
        lines += ["by default on one slice only"] if group.one_slice else []
        if group.default_offloading:
            chips_ = ", ".join(group.default_offloading)
            lines.append(f"on by default where activations go to the host: {chips_}")
        lines += [f"not beside: {', '.join(group.conflicts)}"] if group.conflicts else []
        lines += [f"note: {group.note}"] if group.note else []
        lines += [f"source: {sources()[source]}" for source in group.source]
        width = max(map(len, group.flags))
        return lines + [f"  {flag:{width}}  {_shown(value)}" for flag, value in group.flags.items()]
    stops = [r for r in refused() if r.flag == name]
    if name not in options(version) and not stops:
        raise UserError(
            f"unknown group or flag '{name}'.{did_you_mean(name, [*groups(), *options(version)])}"
            " 'slicewise flags list' shows the groups."
        )
    default = options(version).get(name)
    lines = [name]
    if default is not None:
        listed_version = _list_for(version)
        other = (
            f" (installed: {version}, which the catalog does not list)" if listed_version != version else ""
        )
        lines.append(f"default in libtpu {listed_version}{other}: {default or 'left to the compiler'}")
    if name == SCOPED_VMEM:
        lines.append("set by the key scoped_vmem_limit_kib, which tiles of kernels follow too")
    for group in groups().values():
        if name in group.flags:
            lines.append(f"{_shown(group.flags[name])} in the group {group.name}: {group.purpose}")
    return lines + [_refusal(r) for r in stops]


def _exclude(one: Group, other: Group) -> bool:
    return other.name in one.conflicts or one.name in other.conflicts


def _group(name: str, chip: str) -> Group:
    if name not in groups():
        if (other := name.removeprefix("no-")) in groups():
            raise UserError(f"compiler_flags: {name}: {other} is not on by default on {chip}; leave it out.")
        known = [*groups(), *(f"no-{n}" for n, group in groups().items() if chip in group.default)]
        raise _unknown(name, known)
    group = groups()[name]
    if chip not in group.chips:
        fit = ", ".join(n for n, g in groups().items() if chip in g.chips)
        raise UserError(
            f"compiler_flags: {name} is for {', '.join(group.chips)} and not for {chip}, which has: {fit}."
        )
    return group


def _unknown(name: str, known: Sequence[str]) -> UserError:
    if name in options(installed()):
        return UserError(f"compiler_flags: the flag '{name}' has no value; write {name}=VALUE.")
    return UserError(
        f"compiler_flags: unknown group '{name}'.{did_you_mean(name, known)} 'slicewise flags list' shows all; a single"
        " flag is written flag=value."
    )


def _known(flag: str, version: str) -> str:
    if flag not in options(version):
        stops = [r for r in refused() if r.flag == flag]
        why = f": {stops[0].reason}." if stops else f".{did_you_mean(flag, options(version))}"
        raise UserError(f"compiler_flags: libtpu {version} has no option '{flag}'{why}")
    return flag


def _override(overrides: dict[str, Value], word: str, version: str) -> None:
    """Adds ``flag=value``. Raises UserError for a flag that is unknown or there already, and for a value of another
    type than its default."""
    flag, _, text = word.partition("=")
    default, value = _parsed(options(version)[_known(flag, version)]), _parsed(text)
    if flag in overrides:
        raise UserError(
            f"compiler_flags: {flag} is set twice, to {_shown(overrides[flag])} and to {_shown(value)}; leave one out."
        )
    expected = (
        "true or false" if isinstance(default, bool) else "" if isinstance(default, str) else "a number"
    )
    has_type = isinstance(value, bool) == isinstance(default, bool) and not isinstance(value, str)
    if not text or (expected and not has_type):
        raise UserError(
            f"compiler_flags: {flag} = '{text}': expected {expected or 'a value'}"
            f"{f', by default {_shown(default)}' if default != '' else ''}."
        )
    if flag == SCOPED_VMEM:
        check_least_vmem(value)
    overrides[flag] = value


def _parsed(text: str) -> Value:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _merged(chosen: Sequence[Group], overrides: Mapping[str, Value]) -> dict[str, Value]:
    merged: dict[str, Value] = {}
    owner: dict[str, str] = {}
    for group in chosen:
        if clash := next((g.name for g in chosen if g.name in group.conflicts), None):
            raise UserError(f"compiler_flags: {group.name} and {clash} exclude each other; choose one.")
        for flag, value in group.flags.items():
            if merged.get(flag, value) != value and flag not in overrides:
                raise UserError(
                    f"compiler_flags: {owner[flag]} sets {flag} to {_shown(merged[flag])}, {group.name} to"
                    f" {_shown(value)}; choose one, or add {flag}=VALUE."
                )
            merged[flag] = value
            owner.setdefault(flag, group.name)
    return merged


def check_least_vmem(limit_kib: Any) -> None:
    """Raises UserError for a scoped_vmem_limit_kib at which the compiler crashes; 0, or below, is its own."""
    if 0 < limit_kib < LEAST_VMEM_KIB:
        raise UserError(
            f"scoped_vmem_limit_kib = {limit_kib}: expected at least {LEAST_VMEM_KIB}, or 0 for the compiler's limit."
        )


def _check_vmem(limit_kib: int, chip: str) -> None:
    check_least_vmem(limit_kib)
    physical_kib = int(chips.load(chip).vmem_bytes) // 1024
    if limit_kib > physical_kib:
        raise UserError(
            f"scoped_vmem_limit_kib = {limit_kib} exceeds the {physical_kib} KiB of VMEM of {chip}; lower it."
        )


def _check_refused(chosen: Mapping[str, Value], chip: str) -> None:
    for r in refused():
        if chip in r.chips and r.flag in chosen and r.value in (None, chosen[r.flag]):
            raise UserError(f"compiler_flags: {_refusal(r)} (chip {chip}).")


def _refusal(r: Refused) -> str:
    setting = r.flag if r.value is None else f"{r.flag}={_shown(r.value)}"
    return f"{setting} is refused for {', '.join(r.chips)}: {r.reason}" + (
        f"; use {r.instead}" if r.instead else ""
    )


def _shown(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
