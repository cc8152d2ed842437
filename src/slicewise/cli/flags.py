"""What the groups of TPU compiler flags are, and each flag."""

import argparse
import re

from slicewise.cli.verbs import Verbs
from slicewise.errors import UserError


def register(verbs: Verbs) -> None:
    top = verbs.add("flags", _nothing, "compiler flags for TPUs: groups with purpose, chips and source")
    sub = Verbs(top.add_subparsers(required=True, metavar="WHAT"))

    one = sub.add("list", _list, "the groups that the key compiler_flags may name")
    one.add_argument("--chip", metavar="CHIP", help="only those for this chip: v5p, v6e, ...")

    one = sub.add("explain", _explain, "what a group or a single flag does, and where it is published")
    one.add_argument(
        "name", metavar="NAME", help="a group, or a flag such as xla_tpu_scoped_vmem_limit_kib, as pasted"
    )
    # flags are pasted with their dashes; no option of ours has an underscore
    one._negative_number_matcher = re.compile(r"-+\w+_")


def _nothing(arguments: argparse.Namespace) -> None:
    raise AssertionError("argparse requires WHAT")


def _list(arguments: argparse.Namespace) -> None:
    from slicewise.catalog import chips, flags
    from slicewise.report import tables
    from slicewise.report.console import console

    chip = None if arguments.chip is None else chips.load(arguments.chip).name
    found = [group for group in flags.groups().values() if chip is None or chip in group.chips]
    if not found:
        known = {chip: None for group in flags.groups().values() for chip in group.chips}
        raise UserError(
            f"there are no groups of compiler flags for {chip}; there are for {', '.join(known)}."
        )
    made = tables.table("group", "chips", "default for", "purpose", words=4)
    for group in found:
        made.add_row(group.name, ", ".join(group.chips), ", ".join(group.default), group.purpose)
    console().print(made)


def _explain(arguments: argparse.Namespace) -> None:
    from slicewise.catalog import flags
    from slicewise.report import tables
    from slicewise.report.console import console

    tables.lines(console(), flags.explain(arguments.name))
