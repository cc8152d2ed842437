"""The small calculators: roofline matmul, collective, copy, model, sharded-matmul."""

import argparse
from typing import Any

from slicewise.cli import hardware, quantities
from slicewise.cli.verbs import Verbs

SIZES = "sizes of x[B, D] . w[D, F]; 8k is 8192"


def register(verbs: Verbs) -> None:
    top = verbs.add("roofline", _nothing, "small calculators: what a chip or a slice needs for one operation")
    sub = Verbs(top.add_subparsers(required=True, metavar="WHAT"))

    one = sub.add("matmul", _matmul, "one matrix product on one chip: compute or memory bound, from which B")
    for name in "BDF":
        one.add_argument(name, help=SIZES)
    _takes_precision(one)
    hardware.takes_chip(one)
    hardware.takes_json(one)

    one = sub.add("collective", _collective, "bytes and time of a collective in a slice or between slices")
    one.add_argument("op", metavar="OP", help="all_gather, reduce_scatter, all_reduce or all_to_all")
    one.add_argument("bytes", metavar="BYTES", help="of the whole array: 34MB, 2GiB")
    hardware.takes_chip(one)
    hardware.takes_slice(one)
    one.add_argument("--axes", metavar="0,1", help="physical axes that take part (default: all)")
    one.add_argument("--sharded-ways", default="1", metavar="N", help="ways other mesh axes split the array")
    one.add_argument("--across-slices", action="store_true", help="over the data-centre network")
    hardware.takes_json(one)

    one = sub.add("copy", _copy, "a copy between two chips of a slice")
    one.add_argument("bytes", metavar="BYTES", help="34MB, 2GiB")
    one.add_argument(
        "--from", dest="source", required=True, metavar="0,0,0", help="coordinates of the source"
    )
    one.add_argument("--to", dest="target", required=True, metavar="1,2,3", help="coordinates of the target")
    hardware.takes_chip(one)
    hardware.takes_slice(one, slices=False)
    hardware.takes_json(one)

    one = sub.add("model", _model, "what a model costs, and how far a chip lets it be split")
    one.add_argument(
        "model", metavar="MODEL", help="catalog name, ModelSpec .toml or Hugging Face config.json"
    )
    one.add_argument("--context", metavar="TOKENS", help="sequence length (default: 8k, or the model's)")
    one.add_argument("--state-bytes", type=float, default=10, metavar="N",
                     help="training state a parameter, weights included (default 10)")  # fmt: skip
    hardware.takes_chip(one)
    hardware.takes_json(one)

    one = sub.add(
        "sharded-matmul", _sharded, "a matrix product over a mesh: which collectives, the cheapest way"
    )
    one.add_argument(
        "layout", metavar="LAYOUT", help="'B_X,D * D_Y,F -> B_X,F': what mesh axes X and Y split"
    )
    for name in "BDF":
        one.add_argument(name, help=SIZES)
    one.add_argument(
        "--mesh", required=True, metavar="X=16,Y=4", help="mesh axes, laid on physical axes in order"
    )
    one.add_argument("--all-to-all", action="store_true", help="also try to move an axis between dims")
    _takes_precision(one)
    hardware.takes_chip(one)
    hardware.takes_slice(one, slices=False)
    hardware.takes_json(one)


def _takes_precision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precision", default="bf16", metavar="P", help="of the arithmetic (default bf16)")
    parser.add_argument("--weights", metavar="P", help="of the stored weights (default: as --precision)")


def _nothing(arguments: argparse.Namespace) -> None:
    raise AssertionError("argparse requires WHAT")


def _show(arguments: argparse.Namespace, kind: str, record: Any) -> None:
    from slicewise.report import jsonable, tables

    hardware.show(
        arguments,
        lambda: jsonable.document(kind, record),
        lambda out: tables.lines(out, record.explain()),
    )


def _sizes(arguments: argparse.Namespace) -> tuple[int, int, int]:
    b, d, f = (quantities.size(getattr(arguments, name), name) for name in "BDF")
    return b, d, f


def _matmul(arguments: argparse.Namespace) -> None:
    from slicewise.plan.roofline import matmul

    options = {"precision": arguments.precision, "weights": arguments.weights}
    _show(arguments, "matmul", matmul(*_sizes(arguments), hardware.chip(arguments), **options))


def _collective(arguments: argparse.Namespace) -> None:
    from slicewise.plan.roofline import collective

    record = collective(
        arguments.op.replace("-", "_"),
        quantities.byte_count(arguments.bytes, "BYTES"),
        hardware.cluster(arguments),
        axes=quantities.coordinates(arguments.axes, "--axes") if arguments.axes else None,
        sharded_ways=quantities.whole(arguments.sharded_ways, "--sharded-ways"),
        across_slices=arguments.across_slices,
    )
    _show(arguments, "collective", record)


def _copy(arguments: argparse.Namespace) -> None:
    from slicewise.plan.roofline import copy

    source = quantities.coordinates(arguments.source, "--from")
    target = quantities.coordinates(arguments.target, "--to")
    size = quantities.byte_count(arguments.bytes, "BYTES")
    _show(arguments, "copy", copy(size, source, target, hardware.slice_of(arguments)))


def _model(arguments: argparse.Namespace) -> None:
    from slicewise.plan.model_report import model

    context = quantities.size(arguments.context, "--context") if arguments.context else None
    spec, chip = hardware.model(arguments.model), hardware.chip(arguments)
    record = model(spec, chip, context=context, state_bytes_per_param=arguments.state_bytes)
    _show(arguments, "model", record)


def _sharded(arguments: argparse.Namespace) -> None:
    from slicewise.plan.sharded_matmul import parse_layout, parse_mesh, sharded_matmul
    from slicewise.report import jsonable, tables

    where = hardware.slice_of(arguments)
    record = sharded_matmul(
        *_sizes(arguments),
        parse_layout(arguments.layout),
        parse_mesh(arguments.mesh, where),
        where,
        precision=arguments.precision,
        weights=arguments.weights,
        all_to_all=arguments.all_to_all,
    )
    hardware.show(
        arguments,
        lambda: jsonable.document("sharded matmul", record),
        lambda out: tables.sharded_matmul(out, record),
    )
