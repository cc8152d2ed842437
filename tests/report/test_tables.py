"""Tables for a terminal."""

import io

import pytest
from rich.console import Console

from slicewise.report.tables import table


@pytest.mark.parametrize(
    "cell", ["pip install 'slicewise[compile]'", "[bold]a[/bold]", "[/a/b] :snake:", "a\\[b]"]
)
def test_brackets_in_a_cell_are_no_markup(cell):
    out = io.StringIO()
    made = table("what", "why", words=2)
    made.add_row(cell, cell)
    Console(file=out, width=100).print(made)
    assert out.getvalue().count(cell) == 2
