"""Client classes as the command line has them: gold=4,free=1. Pure; a mistake is a ValueError that names the flag."""

from __future__ import annotations

MAX_WEIGHT = 1000
# The range of the field on the wire.
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1


def by_class(flag: str, text: str, least: int, most: int) -> dict[str, int]:
    """One number for each class; empty text = none."""
    values: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = (word.strip() for word in part.partition("="))
        if not name or name in values:
            raise ValueError(f"{flag}: {part!r} names no class, or one that is there already")
        values[name] = _number(flag, part, number, least, most)
    return values


def _number(flag: str, part: str, text: str, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{flag}: {part!r} is not like NAME=NUMBER") from None
    if not least <= number <= most:
        raise ValueError(f"{flag}: {part!r} is not between {least} and {most}")
    return number
