"""plan serve and plan goodput: serving a model within a latency, and a long run with failures."""

import argparse
from typing import TYPE_CHECKING

from slicewise.cli import hardware, quantities
from slicewise.cli.verbs import Verbs
from slicewise.errors import UserError

if TYPE_CHECKING:
    from slicewise.catalog.chips import Chip
    from slicewise.catalog.slices import Slice
    from slicewise.plan.goodput import Offer
    from slicewise.plan.goodput_plan import GoodputPlan
    from slicewise.plan.serving_point import Quantization

NAMES = ("plan serve", "plan goodput")  # argparse takes one word a verb: the command line joins them first


def register(verbs: Verbs) -> None:
    sub = verbs.add(NAMES[0], _serve, "the cheapest way to serve a model within a latency, and the trade-off")
    sub.add_argument("--model", required=True, metavar="MODEL",
                     help="catalog name, ModelSpec .toml or Hugging Face config.json")  # fmt: skip
    sub.add_argument("--prompt", required=True, metavar="TOKENS", help="of a request: 8192 or 8k")
    sub.add_argument("--output", required=True, metavar="TOKENS", help="of an answer")
    sub.add_argument(
        "--latency-ms", type=float, metavar="MS", help="most time between two tokens (default: any)"
    )
    hardware.takes_chip(sub)
    size = sub.add_mutually_exclusive_group()
    hardware.takes_slice(size, required=False, slices=False)
    size.add_argument("--chips", metavar="N", help="only replicas of so many chips")
    size.add_argument("--max-chips", default="256", metavar="N", help="most chips of a replica (default 256)")
    sub.add_argument("--quantization", action="append", metavar="W[/KV[/M]]",
                     help="formats of weights, cache and arithmetic, such as int8/int8; repeat for several"
                     " (default: bf16, int8/int8, int4/int8)")  # fmt: skip
    sub.add_argument("--prefill-utilization", type=float, default=0.4, metavar="U",
                     help="share of peak FLOP/s that prefill attains (default 0.4)")  # fmt: skip
    hardware.takes_json(sub)
    hardware.takes_html(sub)

    sub = verbs.add(
        NAMES[1], _goodput, "expected goodput, the best checkpoint interval, spot against reserved"
    )
    hardware.takes_chip(sub)
    hardware.takes_slice(sub)
    faults = sub.add_argument_group("failures")
    faults.add_argument(
        "--host-mtbf", required=True, metavar="TIME", help="mean time between failures of a host: 2y"
    )
    faults.add_argument(
        "--checkpoint-time", required=True, metavar="TIME", help="a checkpoint stops training for"
    )
    faults.add_argument(
        "--restart-time", required=True, metavar="TIME", help="from a failure until it trains again"
    )
    faults.add_argument("--save-latency", default="0", metavar="TIME",
                        help="until an asynchronous checkpoint can be used (default 0)")  # fmt: skip
    faults.add_argument("--interval", metavar="TIME", help="between checkpoints (default: the best)")
    money = sub.add_argument_group("prices a chip-hour, over those of the catalog or the price file")
    money.add_argument(
        "--training-time", metavar="TIME", help="compare offers for so much uninterrupted training"
    )
    for name, what in (("price", "on demand"), ("reserved-price", "reserved"), ("spot-price", "spot")):
        money.add_argument(f"--{name}", type=float, metavar="P", help=what)
    money.add_argument("--preemptions-per-day", type=float, default=1.0, metavar="N",
                       help="of the whole job on spot (default 1)")  # fmt: skip
    money.add_argument(
        "--wait", default="0", metavar="TIME", help="from a preemption until chips are back (default 0)"
    )
    config = sub.add_argument_group("config")
    config.add_argument(
        "--step-time", metavar="TIME", help="of a training step, to give the interval in steps"
    )
    config.add_argument(
        "--write", metavar="RUN.toml", help="set checkpoint_every in this config (needs --step-time)"
    )
    hardware.takes_json(sub)
    hardware.takes_html(sub)


def _serve(arguments: argparse.Namespace) -> None:
    from slicewise.plan.serving import COMMON, serve
    from slicewise.plan.serving_point import Workload
    from slicewise.report import jsonable, tables

    chip = hardware.chip(arguments)
    work = Workload(
        quantities.size(arguments.prompt, "--prompt"),
        quantities.size(arguments.output, "--output"),
        None if arguments.latency_ms is None else arguments.latency_ms / 1000,
    )
    plan = serve(
        hardware.model(arguments.model),
        chip,
        work,
        quantizations=[_quantization(t) for t in arguments.quantization]
        if arguments.quantization
        else COMMON,
        max_chips=quantities.whole(arguments.max_chips, "--max-chips"),
        replicas=_replicas(arguments, chip),
        prefill_utilization=arguments.prefill_utilization,
    )
    written = []
    if arguments.html:
        from slicewise.report import pages

        written.append(hardware.save_html(arguments.html, pages.serving(plan)))
    hardware.show(
        arguments,
        lambda: jsonable.document("serving plan", plan),
        lambda out: tables.serving(out, plan),
        written,
    )


def _replicas(arguments: argparse.Namespace, chip: "Chip") -> "list[Slice] | None":
    from slicewise.catalog import slices

    if arguments.topology:
        return [hardware.slice_of(arguments)]
    if arguments.chips:
        return [slices.of_chips(chip, quantities.whole(arguments.chips, "--chips"))]
    return None


def _quantization(text: str) -> "Quantization":
    from slicewise.plan.serving_point import Quantization

    parts = text.split("/")
    if len(parts) > 3:
        raise UserError(
            f"--quantization {text}: expected weights, cache and arithmetic, such as int8/int8/bf16."
        )
    return Quantization(*parts)


def _goodput(arguments: argparse.Namespace) -> None:
    from slicewise.plan.goodput_plan import Faults, plan_goodput
    from slicewise.report import jsonable, tables

    def seconds(option: str, zero: bool = False) -> float | None:
        value = getattr(arguments, option.replace("-", "_"))
        return None if value is None else quantities.seconds(value, f"--{option}", zero=zero)

    faults = Faults(
        seconds("host-mtbf") or 0.0,
        seconds("checkpoint-time", zero=True) or 0.0,
        seconds("restart-time", zero=True) or 0.0,
        seconds("save-latency", zero=True) or 0.0,
        seconds("interval"),
    )
    training_s = seconds("training-time")
    given = [
        f"--{n}" for n in ("price", "reserved-price", "spot-price") if getattr(arguments, n.replace("-", "_"))
    ]
    if given and training_s is None:
        raise UserError(
            f"{given[0]} needs --training-time: offers are compared for so much training, as 42d."
        )
    cluster = hardware.cluster(arguments)
    made = plan_goodput(
        cluster,
        faults,
        training_s=training_s,
        offers=_offers(arguments, cluster.chip, seconds("wait", zero=True) or 0.0) if training_s else (),
        step_time_s=seconds("step-time"),
    )
    written = []
    if arguments.html:
        from slicewise.report import pages

        written.append(hardware.save_html(arguments.html, pages.goodput(made)))
    if arguments.write:
        written.append(_write_interval(arguments.write, made))
    hardware.show(
        arguments,
        lambda: jsonable.document("goodput plan", made),
        lambda out: tables.goodput(out, made),
        written,
    )


def _offers(arguments: argparse.Namespace, chip: "Chip", wait_s: float) -> "tuple[Offer, ...]":
    from slicewise.plan import goodput

    own = {
        "price_per_chip_hour": arguments.price,
        "spot_price_per_chip_hour": arguments.spot_price,
        "reserved_price_per_chip_hour": arguments.reserved_price,
    }
    priced = chip.model_copy(update={key: value for key, value in own.items() if value is not None})
    return goodput.offers(priced, preemptions_per_day=arguments.preemptions_per_day, wait_s=wait_s)


def _write_interval(path: str, made: "GoodputPlan") -> str:
    from slicewise.plan import write

    if made.checkpoint_every is None:
        raise UserError(
            "--write needs --step-time: checkpoint_every counts steps, such as --step-time 11.6s."
        )
    write.write_config(path, {"checkpoint_every": made.checkpoint_every}, create=False)
    return f"{path}: checkpoint_every = {made.checkpoint_every}"
