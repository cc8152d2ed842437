"""Options that several planning verbs share: chips, slices, models, and how to show the answer."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slicewise.cli import quantities
from slicewise.errors import UserError, write_whole

if TYPE_CHECKING:
    from rich.console import Console

    from slicewise.catalog.chips import Chip
    from slicewise.catalog.model import ModelSpec
    from slicewise.catalog.slices import Cluster, Slice


def takes_chip(parser: argparse._ActionsContainer, *, several: bool = False) -> None:
    what = "chip, or several with commas between, or 'any'" if several else "chip"
    parser.add_argument("--chip", required=True, metavar="CHIP", help=f"{what}: v5p, tpu7x, h100, ...")
    parser.add_argument("--chip-file", metavar="TOML", help="your own chips, beside the catalog's")
    parser.add_argument("--price-file", metavar="TOML", help="your prices: [v5p] on_demand, spot, reserved")
    parser.add_argument("--prefer", metavar="SOURCE", help="take this source's numbers where sources differ")


def takes_slice(parser: argparse._ActionsContainer, *, required: bool = True, slices: bool = True) -> None:
    name = "slice shape: 8x8x8, or a type such as v5p-1024"
    parser.add_argument("--topology", required=required, metavar="SHAPE", help=name)
    if slices:
        parser.add_argument("--slices", metavar="N", help="equal slices joined by the data-centre network")


def takes_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def takes_html(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", metavar="FILE", help="also write a self-contained page")


def chip(arguments: argparse.Namespace, name: str | None = None) -> "Chip":
    from slicewise.catalog import chips

    if name is None and (arguments.chip == "any" or "," in arguments.chip):
        raise UserError(
            f"--chip {arguments.chip}: expected one chip; several compete only in a plan with a goal"
            " (--min-cost, --deadline or --budget)."
        )
    options = (arguments.chip_file, arguments.price_file, arguments.prefer)
    return chips.load(arguments.chip if name is None else name, *options)


def chip_list(arguments: argparse.Namespace, precisions: "Sequence[str]" = ()) -> list["Chip"]:
    """The chips of ``--chip a,b``; 'any' is every TPU of the catalog that has the topology and computes in
    ``precisions``. Raises UserError for a named chip that does not."""
    from slicewise.catalog import chips, slices

    any_ = arguments.chip == "any"
    found, refused = [], []
    for name in chips.names() if any_ else arguments.chip.split(","):
        one = chip(arguments, name.strip())
        if any_ and one.kind != "tpu":
            continue
        try:
            for precision in precisions:
                one.peak_flops_per_s(precision)
            if arguments.topology:
                slices.parse(arguments.topology, one)
        except UserError as error:
            if not any_:
                raise
            refused.append(error)
        else:
            found.append(one)
    if not found:
        raise refused[-1]
    return found


def slice_of(arguments: argparse.Namespace) -> "Slice":
    from slicewise.catalog import slices

    return slices.parse(arguments.topology, chip(arguments))


def cluster(arguments: argparse.Namespace) -> "Cluster":
    from slicewise.catalog.slices import Cluster

    count = quantities.whole(arguments.slices, "--slices") if arguments.slices else 1
    return Cluster(slice_of(arguments), count)


def model(name: str) -> "ModelSpec":
    from slicewise.interop.huggingface import load_spec

    return load_spec(name)


def show(
    arguments: argparse.Namespace,
    document: Callable[[], dict[str, Any]],
    tables: "Callable[[Console], None]",
    written: Sequence[str] = (),
) -> None:
    """``document()`` as JSON or ``tables(console)`` as text; then what was ``written``, on stderr."""
    if arguments.json:
        from slicewise.report.jsonable import text

        print(text(document()))
    else:
        from slicewise.report.console import console

        tables(console())
    sys.stdout.flush()
    for line in written:
        print(f"wrote {line}", file=sys.stderr)


def save_html(path: str, text: str) -> str:
    """Writes a page and says where. Raises UserError when it cannot be written."""
    write_whole(path, text.encode(), f"--html {path}")
    return path
