"""Forms of a number in a configuration: 5e8, "1e9", 15099494.4, "12GB", "1.5GiB".

There are three readings, depending on the counted things:

- whole: indivisible things (steps, buffers, threads); 2.5 is an error.
- count: elements; clients compute them as floats such as 0.9 * h * h, so they are rounded.
- bytes: like a count, and a string may have a unit (KB, MB, GB, TB: powers of 1000; KiB ... TiB: powers of 1024).
"""

from __future__ import annotations

import math
import re
from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from numbers import Integral, Real

LARGEST = 2**63 - 1  # Every count ends up in an int64_t.

UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
}
NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?)\s*([a-z]*)", re.IGNORECASE)


def parse_integer(value: object) -> int:
    """Read a number of indivisible things.

    Returns the number, 0 <= number < 2**63. Raises ValueError: the text says what was expected; a bool is not a number.
    `value`: an int, an integral float (8.0) or a string of either ("8", "1e3").
    """
    exact = _exact(value, units=("",), expected="a whole number such as 8")
    if exact != exact.to_integral_value():
        raise ValueError("a whole number such as 8")
    return int(exact)


def parse_count(value: object) -> int:
    """Read a number of elements.

    Returns the number, rounded half to even, 0 <= number < 2**63. Raises ValueError: the text says what was expected; a
    bool is not a number, and elements have no unit. `value`: an int, a float (5e8, 15099494.4) or a string of either
    ("1e9").
    """
    exact = _exact(value, units=("",), expected='a number of elements such as 5e8 or "1e9", without a unit')
    return int(exact.to_integral_value(ROUND_HALF_EVEN))


def parse_bytes(value: object) -> int:
    """Read a number of bytes.

    Returns bytes, rounded half to even, 0 <= bytes < 2**63. Raises ValueError: the text says what was expected; a bool
    is not a number. `value`: an int, a float, or a string with an optional unit ("12GB", "1.5GiB", "512 MB", "1e9").
    """
    exact = _exact(value, units=tuple(UNITS), expected='a number of bytes such as 1048576, 12e9, "12GB" or "1.5GiB"')
    return int(exact.to_integral_value(ROUND_HALF_EVEN))


def parse_number(value: object) -> float:
    """Read a finite real number; a string such as "2e-5" counts, a bool does not.

    Raises ValueError: the text says what was expected.
    """
    expected = "a finite number such as 1e-3"
    if isinstance(value, bool) or not isinstance(value, (Real, str)):
        raise ValueError(expected)
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError(expected) from None
    if not math.isfinite(number):
        raise ValueError(expected)
    return number


def _exact(value: object, *, units: tuple[str, ...], expected: str) -> Decimal:
    if isinstance(value, bool):
        raise ValueError(expected)
    if isinstance(value, Integral):
        exact = Decimal(int(value))
    elif isinstance(value, Real) and math.isfinite(value):
        exact = Decimal(float(value))
    elif isinstance(value, str):
        exact = _exact_text(value, units=units, expected=expected)
    else:
        raise ValueError(expected)
    # Compare before converting to int: 1e999999999 as an int would fill the memory.
    if not 0 <= exact <= LARGEST:
        raise ValueError(f"{expected}, from 0 to 2**63 - 1")
    return exact


def _exact_text(text: str, *, units: tuple[str, ...], expected: str) -> Decimal:
    match = NUMBER.fullmatch(text.strip())
    if match is None or match[2].lower() not in units:
        raise ValueError(expected)
    with localcontext() as context:
        context.prec = 60
        return Decimal(match[1]) * UNITS[match[2].lower()]
