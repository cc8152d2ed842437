"""tune: the fastest settings of a run's kernels, compiler flags and rematerialisation, measured or by the compiler."""

import argparse
import contextlib
import importlib.util
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from slicewise.cli import hardware, quantities
from slicewise.cli.compile_more import beside, check_writable, write_found
from slicewise.cli.train import load, takes_config
from slicewise.cli.verbs import Verbs
from slicewise.errors import ExitCode, UserError

if TYPE_CHECKING:
    from slicewise.config import AxisDegrees, LoadedConfig
    from slicewise.plan.run_config import Value
    from slicewise.tune.problems import Device, Problem
    from slicewise.tune.search import Judged, Outcome

WHAT = ("kernels", "flags", "remat")


def register(verbs: Verbs) -> None:
    sub = verbs.add("tune", _tune, "find the fastest kernels, compiler flags and rematerialisation of a run")
    takes_config(sub)
    where = sub.add_argument_group("for what (default: the devices of this job, by the clock)")
    where.add_argument(
        "--chip", metavar="CHIP", help="absent slices of this chip, by the compiler: v5p, v6e, ..."
    )
    hardware.takes_slice(where, required=False)
    how = sub.add_argument_group("how")
    how.add_argument("--only", metavar="A,B", help=f"of {', '.join(WHAT)} (default: all)")
    how.add_argument("--minutes", default="20", metavar="M", help="time to spend (default 20)")
    how.add_argument("--write", metavar="RUN.toml", help="write flags and rematerialisation into a config")
    hardware.takes_json(sub)


def _tune(arguments: argparse.Namespace) -> int:
    from slicewise.kernels import tuned

    what = _what(arguments.only)
    seconds = quantities.minutes(arguments.minutes, "--minutes")
    if bool(arguments.chip) != bool(arguments.topology):
        raise UserError("absent slices need --chip and --topology, such as --chip v6e --topology 16x16.")
    if arguments.slices and not arguments.chip:
        raise UserError("--slices is for absent slices; give --chip and --topology too.")
    if arguments.write is not None:
        check_writable("write", arguments.write)
    tuned.own()  # one that cannot be read should not wait for the first result
    run = _compiled if arguments.chip else _measured
    return run(arguments, load(arguments), what, seconds)


def _what(text: str | None) -> tuple[str, ...]:
    asked = WHAT if text is None else tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if unknown := [word for word in asked if word not in WHAT]:
        raise UserError(f"--only {unknown[0] or repr(text)}: expected some of {', '.join(WHAT)}.")
    return asked


def _compiled(
    arguments: argparse.Namespace, loaded: "LoadedConfig", what: tuple[str, ...], seconds: float
) -> int:
    from slicewise.catalog import chips
    from slicewise.compile.compiler import Request, check
    from slicewise.compile.kernels import KernelCompiler
    from slicewise.config import resolve_degrees
    from slicewise.tune.compiled import Compiled
    from slicewise.tune.kept import Kept
    from slicewise.tune.problems import Device

    arguments.chip_file = arguments.price_file = arguments.prefer = None
    cluster = hardware.cluster(arguments)
    check(Request(loaded.config, cluster))
    chip = chips.load(arguments.chip).name
    degrees = resolve_degrees(
        loaded.config, num_slices=cluster.num_slices, devices_per_slice=cluster.slice.devices
    )
    with _terminable(), KernelCompiler(chip) as compiler:
        judge = Compiled(cluster, compiler, Kept("compiled"))
        return _search(arguments, loaded, what, seconds, judge, degrees, Device(chip, True))


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM within leaves as Ctrl-C does: what compiles is ended, and its folders are removed."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _measured(
    arguments: argparse.Namespace, loaded: "LoadedConfig", what: tuple[str, ...], seconds: float
) -> int:
    import jax

    from slicewise.config import resolve_degrees
    from slicewise.kernels.attention.api import chip_of
    from slicewise.parallel import cluster
    from slicewise.train import runtime
    from slicewise.tune.kept import Kept
    from slicewise.tune.measured import Measured
    from slicewise.tune.problems import Device

    runtime.start()
    devices = cluster.found()
    degrees = resolve_degrees(
        loaded.config, num_slices=devices.num_slices, devices_per_slice=devices.devices_per_slice
    )
    first = devices.array.flat[0]
    judge = Measured(devices, Kept("measured"))
    device = Device(chip_of(first), first.platform == "tpu")
    code = _search(
        arguments, loaded, what, seconds, judge, degrees, device, is_first=jax.process_index() == 0
    )
    runtime.stop()
    return code


def _search(
    arguments: argparse.Namespace,
    loaded: "LoadedConfig",
    what: tuple[str, ...],
    seconds: float,
    judge: "Judged",
    degrees: "AxisDegrees",
    device: "Device",
    *,
    is_first: bool = True,
) -> int:
    from rich.console import Console

    from slicewise.interop.huggingface import load_spec
    from slicewise.report import tuning
    from slicewise.tune import problems
    from slicewise.tune.search import Search

    config = loaded.config
    spec = load_spec(config.model.model)
    found = problems.kernels(config, spec, degrees, device) if "kernels" in what else ()
    flags = (
        problems.flag_changes(config, device.chip, math.prod(degrees.dcn.values())) if "flags" in what else []
    )
    remat = problems.remat_changes(config) if "remat" in what else []
    if not (found or flags or remat):
        print(f"nothing to tune: {' and '.join(what)} have no settings on {device.chip} for this config.")
        return ExitCode.DONE
    _check_packages(found)
    with tuning.progress(Console(file=sys.stderr, quiet=not is_first)) as advance:
        outcome = Search(judge, seconds, advance).run(config, found, flags, remat)
    return _report(arguments, loaded, outcome, is_first)


def _check_packages(found: "Sequence[Problem]") -> None:
    """Raises UserError where the kernels to tune are not installed."""
    if any(p.key.kernel != "xla_chunked" for p in found) and importlib.util.find_spec("tokamax") is None:
        raise UserError("kernels of TPUs need tokamax; pip install 'slicewise[tpu]'.")


def _report(arguments: argparse.Namespace, loaded: "LoadedConfig", outcome: "Outcome", is_first: bool) -> int:
    from slicewise.kernels import tuned
    from slicewise.report import tuning

    code = ExitCode.DONE
    if outcome.failure:
        code = ExitCode.INTERNAL if outcome.failure[1] else ExitCode.USER
    if not is_first:
        return code
    hardware.show(
        arguments,
        lambda: tuning.document(outcome),
        lambda out: tuning.show(out, outcome, str(tuned.own_path())),
    )
    if outcome.failure:
        print(f"slicewise: {outcome.failure[0]}", file=sys.stderr)
    if arguments.write:
        print(_write(arguments.write, loaded, outcome), file=beside(arguments))
    return code


def _write(path: str, loaded: "LoadedConfig", outcome: "Outcome") -> str:
    """A line that says what was written."""
    if outcome.step_s is None:
        return f"{path}: not written, for there is no time of a step."
    changed: dict[str, Value] = {}
    for override in outcome.overrides:
        key, _, value = override.partition("=")
        changed[key] = [f for f in value.split(",") if f] if key == "compiler_flags" else value
    if "remat_tensors" in changed:
        changed["remat_tensors"] = {}  # the only place of a change is none
    name = ", ".join(outcome.overrides) or "as it is"
    return write_found(path, loaded, changed, name, "Found by slicewise tune.")
