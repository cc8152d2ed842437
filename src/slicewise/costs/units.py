"""Numbers as people read them: three digits, a prefix and the unit."""

import math

PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def quantity(value: float, unit: str = "") -> str:
    """``value`` with a decimal prefix: quantity(4.59e14, 'FLOP/s') is '459 TFLOP/s'."""
    if not math.isfinite(value):
        return f"{value} {unit}".strip()
    scale, prefix = next(((s, p) for s, p in PREFIXES if abs(value) >= 0.9995 * s), PREFIXES[-1])
    return f"{_three_digits(value / scale)} {prefix}{unit}".strip()


def duration(seconds: float) -> str:
    """``seconds`` in the unit that suits: '12.0 us', '3.40 s', '2.10 h', '44.3 days'."""
    if not math.isfinite(seconds) or seconds == 0:
        return f"{seconds:g} s"
    for scale, unit in ((86400, "days"), (3600, "h"), (60, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= 0.9995 * (2 * scale if scale > 1 else scale):
            return f"{_three_digits(seconds / scale)} {unit}"
    small = seconds * 1e9
    return f"{_three_digits(small) if abs(small) >= 0.01 else format(small, '.2g')} ns"


def count(value: float) -> str:
    """A number of things, with thousands separated: '73,440'."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def counted(number: int, what: str) -> str:
    """Things by their number: '1 worker', '1,000 workers'."""
    return f"{count(number)} {what}{'' if number == 1 else 's'}"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    if magnitude == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(magnitude) + 1e-4))
    return f"{value:.{min(decimals, 4)}f}"
