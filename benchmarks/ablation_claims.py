"""Published claims about TPU7x, held against the lines of compile_ablation.py."""

from collections.abc import Mapping
from typing import Any


def show(tables: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    pass
