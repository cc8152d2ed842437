"""Where text goes: a terminal at its own width, anything else at a fixed one, so that output is the same
everywhere."""

import sys

from rich.console import Console
from rich.text import Text

PIPE_WIDTH = 140


def console() -> Console:
    if sys.stdout.isatty():
        return Console(highlight=False, emoji=False)
    return Console(highlight=False, emoji=False, width=PIPE_WIDTH, color_system=None)


def say(out: Console, line: str, style: str = "") -> None:
    """One line, never broken when it goes to a file."""
    out.print(Text(line, style=style), soft_wrap=not out.is_terminal)
