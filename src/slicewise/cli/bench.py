"""Verbs that time programs on the devices of this job: bench shardings."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from slicewise.cli import hardware, quantities
from slicewise.cli.verbs import Verbs
from slicewise.errors import UserError

if TYPE_CHECKING:
    from slicewise.config import RunConfig
    from slicewise.plan.stack import Stack

NAMES = ("bench shardings",)


def register(verbs: Verbs) -> None:
    sub = verbs.add(
        NAMES[0], _shardings, "time a bare stack of matrix products under one layout, or every one"
    )
    sub.add_argument("overrides", nargs="*", metavar="key=value", help="parallelism keys")
    sub.add_argument("--batch-size", default="131072", metavar="ROWS", help="rows a device (default 131072)")
    width = "width of a layer, which widens to four times it (default 2048)"
    sub.add_argument("--embedding-dimension", default="2048", metavar="D", help=width)
    sub.add_argument("--layers", default="4", metavar="N", help="layers, of two products each (default 4)")
    sub.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="default bfloat16")
    sub.add_argument(
        "--steps", default="10", metavar="N", help="steps to time, after one to warm up (default 10)"
    )
    sub.add_argument("--sweep", action="store_true", help="try every legal layout and rank them")
    local = "emulate a cluster here: slices x hosts per slice x devices per host, such as 2x2x2"
    sub.add_argument("--local", metavar="SxHxD", help=local)
    sub.add_argument("--chip", metavar="CHIP", help="only predict, for slices of this chip: v4, v5p, ...")
    hardware.takes_slice(sub, required=False)
    hardware.takes_json(sub)


def _shardings(arguments: argparse.Namespace) -> int | None:
    stack, config = _stack(arguments), _config(arguments)
    steps = quantities.whole(arguments.steps, "--steps")
    if arguments.chip or arguments.topology or arguments.slices:
        _predict(arguments, stack, config)
        return None
    if arguments.local:
        return _locally(arguments)
    _measure(arguments, stack, config, steps)
    return None


def _stack(arguments: argparse.Namespace) -> "Stack":
    from slicewise.plan.stack import Stack

    return Stack(
        quantities.size(arguments.batch_size, "--batch-size"),
        quantities.size(arguments.embedding_dimension, "--embedding-dimension"),
        quantities.whole(arguments.layers, "--layers"),
        arguments.dtype,
    )


def _config(arguments: argparse.Namespace) -> "RunConfig":
    from slicewise.config import SECTION_OF, RunConfig, with_overrides

    for override in arguments.overrides:
        key = override.partition("=")[0]
        if key in SECTION_OF and not key.endswith("_parallelism"):
            raise UserError(
                f"{key} has no part in this experiment; give degrees only, such as ici_fsdp_parallelism=4."
            )
    if arguments.sweep and arguments.overrides:
        raise UserError(f"--sweep tries every layout; leave {arguments.overrides[0]} out.")
    return with_overrides(RunConfig(), arguments.overrides)


def _predict(arguments: argparse.Namespace, stack: "Stack", config: "RunConfig") -> None:
    from slicewise.catalog import chips, slices
    from slicewise.config import resolve_degrees
    from slicewise.plan.stack import predict
    from slicewise.report import shardings

    if not (arguments.chip and arguments.topology):
        raise UserError("a prediction needs --chip and --topology, such as --chip v4 --topology 2x2x1.")
    for name in ("local", "sweep", "json"):
        if getattr(arguments, name):
            raise UserError(f"--{name} goes with devices that are here; leave out --chip and --topology.")
    chip = chips.load(arguments.chip)
    count = quantities.whole(arguments.slices, "--slices") if arguments.slices else 1
    cluster = slices.Cluster(slices.parse(arguments.topology, chip), count)
    degrees = resolve_degrees(config, num_slices=count, devices_per_slice=cluster.slice.devices)
    plan = predict(stack, cluster, degrees)
    held = stack.activation_bytes(1) + stack.parameter_bytes / (
        degrees.total("fsdp") * degrees.total("tensor")
    )
    stack.check_memory(held, f"a device of {chip.name}", chip.usable_hbm_bytes / chip.jax_devices)
    where = f"{count} x {chip.name} {cluster.slice.name}"
    peak = chip.peak_flops_per_s("bf16") / chip.jax_devices
    for line in (
        *shardings.title(stack, where, cluster.devices),
        *shardings.prediction(stack, degrees, plan, peak),
    ):
        print(line)


def _locally(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from slicewise.launch.targets.local import parse_shape, run_local

    command = ["-m", "slicewise", *NAMES[0].split(), *arguments.overrides]
    for name in ("batch_size", "embedding_dimension", "layers", "dtype", "steps"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    command += [f"--{name}" for name in ("sweep", "json", "debug") if getattr(arguments, name)]
    logs = Path("runs") / "bench-shardings" / "logs"
    return run_local(command, parse_shape(arguments.local), log_directory=logs, console=Console())


def _measure(arguments: argparse.Namespace, stack: "Stack", config: "RunConfig", steps: int) -> None:
    from slicewise.measure import bench_shardings
    from slicewise.train.progress import emit

    lines = bench_shardings.report(stack, config, steps, sweep_all=arguments.sweep, as_json=arguments.json)
    for line in lines:
        if not emit({"event": "text", "text": line}):
            print(line)
