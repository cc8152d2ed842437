"""tune: the fastest settings of a run's kernels, compiler flags and rematerialisation, measured or by the compiler."""

import argparse
import math
import sys
from typing import TYPE_CHECKING

from slicewise.cli import hardware, quantities
from slicewise.cli.compile_more import check_writable
from slicewise.cli.train import load, takes_config
from slicewise.cli.verbs import Verbs
from slicewise.errors import ExitCode, UserError

if TYPE_CHECKING:
    from slicewise.config import AxisDegrees, RunConfig
    from slicewise.plan.run_config import Value
    from slicewise.tune.problems import Device
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
    config = load(arguments).config
    run = _compiled if arguments.chip else _measured
    return run(arguments, config, what, seconds)


def _what(text: str | None) -> tuple[str, ...]:
    asked = WHAT if text is None else tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if unknown := [word for word in asked if word not in WHAT]:
        raise UserError(f"--only {unknown[0] or repr(text)}: expected some of {', '.join(WHAT)}.")
    return asked


def _compiled(
    arguments: argparse.Namespace, config: "RunConfig", what: tuple[str, ...], seconds: float
) -> int:
    from slicewise.catalog import chips
    from slicewise.compile.compiler import compiler_name
    from slicewise.compile.kernels import KernelCompiler
    from slicewise.config import resolve_degrees
    from slicewise.tune.compiled import Compiled
    from slicewise.tune.kept import Kept
    from slicewise.tune.problems import Device

    arguments.chip_file = arguments.price_file = arguments.prefer = None
    cluster = hardware.cluster(arguments)
    compiler_name(cluster)
    chip = chips.load(arguments.chip).name
    degrees = resolve_degrees(config, num_slices=cluster.num_slices, devices_per_slice=cluster.slice.devices)
    with KernelCompiler(chip) as compiler:
        judge = Compiled(cluster, compiler, Kept("compiled"))
        return _search(arguments, config, what, seconds, judge, degrees, Device(chip, True))


def _measured(
    arguments: argparse.Namespace, config: "RunConfig", what: tuple[str, ...], seconds: float
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
        config, num_slices=devices.num_slices, devices_per_slice=devices.devices_per_slice
    )
    first = devices.array.flat[0]
    judge = Measured(devices, Kept("measured"))
    device = Device(chip_of(first), first.platform == "tpu")
    code = _search(
        arguments, config, what, seconds, judge, degrees, device, is_first=jax.process_index() == 0
    )
    runtime.stop()
    return code


def _search(
    arguments: argparse.Namespace,
    config: "RunConfig",
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

    spec = load_spec(config.model.model)
    found = problems.kernels(config, spec, degrees, device) if "kernels" in what else ()
    flags = (
        problems.flag_changes(config, device.chip, math.prod(degrees.dcn.values())) if "flags" in what else []
    )
    remat = problems.remat_changes(config) if "remat" in what else []
    if not (found or flags or remat):
        print(f"nothing to tune: {' and '.join(what)} have no settings on {device.chip} for this config.")
        return ExitCode.DONE
    with tuning.progress(Console(file=sys.stderr, quiet=not is_first)) as advance:
        outcome = Search(judge, seconds, advance).run(config, found, flags, remat)
    return _report(arguments, outcome) if is_first else ExitCode.DONE


def _report(arguments: argparse.Namespace, outcome: "Outcome") -> int:
    from slicewise.kernels import tuned
    from slicewise.report import tuning

    written = []
    if arguments.write and outcome.overrides:
        from slicewise.plan.write import write_config

        changed: dict[str, Value] = {}
        for override in outcome.overrides:
            key, _, changed[key] = override.partition("=")
        if "remat_tensors" in changed:
            changed["remat_tensors"] = {}  # the only place of a change is none
        write_config(arguments.write, changed, note="Found by slicewise tune.")
        written.append(arguments.write)
    hardware.show(
        arguments,
        lambda: tuning.document(outcome),
        lambda out: tuning.show(out, outcome, str(tuned.own_path())),
        written,
    )
    return ExitCode.DONE
