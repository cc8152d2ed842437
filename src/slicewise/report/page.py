"""One self-contained HTML page: tiles, cards with charts or tables, no network. Plotly draws."""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from slicewise import __version__
from slicewise.errors import UserError

# The page may load nothing at all; inline script and style are its own.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"

Figure = dict[str, Any]  # Plotly's 'data' and 'layout'; colours are '@name' of page.js


@dataclass(frozen=True)
class Tile:
    value: str
    label: str


@dataclass(frozen=True)
class Chart:
    title: str
    note: str
    figure: Figure
    wide: bool = False


@dataclass(frozen=True)
class Grid:
    """A table; the first ``words`` columns hold words. ``marked`` is the row to stand out."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    marked: int | None = 0
    texts: Sequence[str] = ()  # columns whose text may be broken


@dataclass(frozen=True)
class Point:
    """A line of a list: with a sign where it is an inequality that holds or not."""

    text: str
    holds: bool | None = None


@dataclass(frozen=True)
class Prose:
    title: str
    paragraphs: Sequence[str]
    lists: Sequence[tuple[str, Sequence[Point]]] = ()


Card = Chart | Grid | Prose


def render(title: str, subtitle: str, tiles: Sequence[Tile], cards: Sequence[Card]) -> str:
    """The page. Raises UserError when plotly, which carries the drawing library, is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as e:
        raise UserError("--html needs plotly: pip install 'slicewise[report]'.") from e
    said = html.escape
    narrow = [k for k, card in enumerate(cards) if isinstance(card, Chart) and not card.wide]
    alone = narrow[-1] if len(narrow) % 2 else None  # it would leave half a row empty
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{said(title)}</title><style>{_asset('page.css')}</style></head><body><main>",
            f'<h1>{said(title)}</h1><p class="sub">{said(subtitle)}</p>',
            '<div class="tiles">',
            *(f'<div class="tile"><b>{said(t.value)}</b><span>{said(t.label)}</span></div>' for t in tiles),
            '</div><div class="grid">',
            *(_card(card, k, wide=k not in narrow or k == alone) for k, card in enumerate(cards)),
            f"</div><footer>slicewise {__version__}</footer></main>",
            f"<script>{get_plotlyjs()}</script><script>{_asset('page.js')}</script></body></html>",
        ]
    )


def _asset(name: str) -> str:
    return (resources.files("slicewise.report") / "assets" / name).read_text()


def _card(card: Card, number: int, *, wide: bool) -> str:
    body = {Chart: _chart, Grid: _grid, Prose: _prose}[type(card)](card, number)  # type: ignore[operator]
    return (
        f'<section class="card{" wide" if wide else ""}"><h2>{html.escape(card.title)}</h2>{body}</section>'
    )


def _chart(card: Chart, number: int) -> str:
    # "<" would end the script element inside a string
    data = json.dumps(card.figure, allow_nan=False).replace("<", "\\u003c")
    height = card.figure["layout"]["height"]
    return (
        f'<p class="note">{html.escape(card.note)}</p>'
        f'<div class="chart" id="chart{number}" style="height:{height}px"></div>'
        f'<script type="application/json" id="chart{number}-data">{data}</script>'
    )


def _grid(card: Grid, number: int) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        kinds = (_CELLS[_kind(card, k)] for k in range(len(row)))
        return "".join(f"<{tag}{kind}>{html.escape(c)}</{tag}>" for c, kind in zip(row, kinds, strict=True))

    rows = (
        f"<tr{' class="first"' if k == card.marked else ''}>{cells(row, 'td')}</tr>"
        for k, row in enumerate(card.rows)
    )
    return (
        f'<p class="note">{html.escape(card.note)}</p><div class="scroll"><table><thead>'
        f"<tr>{cells(card.columns, 'th')}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


_CELLS = {"word": "", "number": ' class="number"', "text": ' class="text"'}


def _kind(card: Grid, column: int) -> str:
    if card.columns[column] in card.texts:
        return "text"
    return "word" if column < card.words else "number"


def _prose(card: Prose, number: int) -> str:
    parts = [f"<p>{html.escape(text)}</p>" for text in card.paragraphs]
    for title, points in card.lists:
        parts.append(f"<h3>{html.escape(title)}</h3><ul>")
        for p in points:
            sign = {None: "", True: ' class="holds"', False: ' class="broken"'}[p.holds]
            parts.append(f"<li{sign}>{html.escape(p.text)}</li>")
        parts.append("</ul>")
    return "".join(parts)
