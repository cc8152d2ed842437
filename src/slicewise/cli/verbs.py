"""How a verb is added to the command line."""

import argparse
import re
from collections.abc import Callable
from typing import Any, NoReturn

from slicewise.errors import ExitCode

Verb = Callable[[argparse.Namespace], int | None]


class Parser(argparse.ArgumentParser):
    """Errors as everywhere else: what is wrong, and where to look, instead of every option there is."""

    def error(self, message: str) -> NoReturn:
        message = message.replace(
            ", key=value", ""
        )  # argparse counts what may be absent among what is required
        self.exit(ExitCode.USER, f"slicewise: {message}. '{self.prog} --help' explains it.\n")


class Verbs:
    """The verbs of the command, or of one verb that has its own."""

    def __init__(self, subparsers: "argparse._SubParsersAction[Any]"):
        self._subparsers = subparsers

    def add(self, name: str, verb: Verb, help: str) -> argparse.ArgumentParser:
        """A parser for ``name`` that runs ``verb``."""
        parser = self._subparsers.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
        # the value of an option, such as -2x2, is judged by who reads it, and not taken for an unknown option
        parser._negative_number_matcher = re.compile(r"-\d")
        parser.add_argument("--debug", action="store_true", help="show tracebacks")
        parser.set_defaults(verb=verb)
        return parser
