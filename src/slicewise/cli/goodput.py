"""slicewise goodput: where the seconds of a run went."""

import argparse
from pathlib import Path

from slicewise.cli import hardware
from slicewise.cli.verbs import Verbs


def register(verbs: Verbs) -> None:
    sub = verbs.add("goodput", _goodput, "where the time of a run went, and what its restarts took")
    sub.add_argument("run", metavar="RUN", help="folder of a run, such as runs/demo")
    hardware.takes_json(sub)
    hardware.takes_html(sub)


def _goodput(arguments: argparse.Namespace) -> None:
    from slicewise.report import run_goodput
    from slicewise.train.goodput import account, read

    run = arguments.run.rstrip("/")
    found = account(read(Path(run)))
    written = []
    if arguments.html:
        written.append(hardware.save_html(arguments.html, run_goodput.page(run, found)))
    hardware.show(
        arguments,
        lambda: run_goodput.document(run, found),
        lambda out: run_goodput.text(out, run, found),
        written,
    )
