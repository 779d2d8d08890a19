"""Texts in many scripts from a seed: letters with their marks, emoji made of several characters, odd spaces.

What is drawn means nothing; it is what the code points do to a tokenizer that counts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Script:
    """Where letters and combining marks are, as (first, last) code points; and what stands between words."""

    letters: tuple[tuple[int, int], ...]
    marks: tuple[int, int] | None = None
    gap: str = " "


SCRIPTS = {
    "Latin": Script(((0x61, 0x7A), (0xE0, 0xF6), (0x100, 0x17F)), (0x300, 0x304)),
    "Cyrillic": Script(((0x430, 0x44F), (0x450, 0x45F)), (0x300, 0x301)),
    "Greek": Script(((0x3B1, 0x3C1), (0x1F00, 0x1F07)), (0x300, 0x301)),
    "Armenian": Script(((0x561, 0x586),)),
    "Georgian": Script(((0x10D0, 0x10F0),)),
    "Hebrew": Script(((0x5D0, 0x5EA),), (0x5B0, 0x5BC)),
    "Arabic": Script(((0x627, 0x63A), (0x641, 0x64A)), (0x64B, 0x652)),
    "Devanagari": Script(((0x905, 0x939),), (0x93E, 0x94D)),
    "Tamil": Script(((0xBAE, 0xBB9),), (0xBBE, 0xBC2)),
    "Thai": Script(((0xE01, 0xE2E),), (0xE34, 0xE3A), ""),
    "Han": Script(((0x4E00, 0x9FA5), (0x20000, 0x2A6D6)), None, ""),
    "Kana": Script(((0x3041, 0x3094), (0x30A1, 0x30FA)), (0x3099, 0x309A), ""),
    "Hangul": Script(((0xAC00, 0xD7A3), (0x1100, 0x1112))),
    "Ethiopic": Script(((0x1200, 0x1246),)),
}

_ZWJ, _VARIATION = "\u200d", "\ufe0f"
_PEOPLE = "👨👩👧👦🧑👶"
_HANDS = "👍👋✊🙏💪"
_PLAIN_EMOJI = "😀🦊🎉🥐🚀"
_BETWEEN = (". ", ", ", "  ", "\n", "\t", " — ", "! ", "\u00a0", "… ")


def script_text(seed: int, num_words: int = 5) -> str:
    """One text. Consecutive seeds go round all scripts, and every third text has a second script."""
    rng = random.Random(seed)
    names = list(SCRIPTS)
    scripts = [SCRIPTS[names[seed % len(names)]]]
    if seed % 3 == 0:
        scripts.append(SCRIPTS[rng.choice(names)])
    parts: list[str] = []
    for _ in range(num_words):
        script = rng.choice(scripts)
        parts += [_word(rng, script), rng.choice(_BETWEEN) if rng.random() < 0.3 else script.gap]
        if rng.random() < 0.3:
            parts.append(_emoji(rng))
    return "".join(parts)


def _word(rng: random.Random, script: Script) -> str:
    characters = []
    for _ in range(rng.randint(1, 5)):
        characters.append(chr(rng.randint(*rng.choice(script.letters))))
        if script.marks and rng.random() < 0.4:
            characters.append(chr(rng.randint(*script.marks)))
    return "".join(characters)


def _emoji(rng: random.Random) -> str:
    """A family, a flag, a hand with a skin tone, a key, a heart with its variation, or one of a single character."""
    kind = rng.randrange(6)
    if kind == 0:
        return _ZWJ.join(rng.choice(_PEOPLE) for _ in range(rng.randint(2, 4)))
    if kind == 1:
        return "".join(chr(0x1F1E6 + rng.randrange(26)) for _ in range(2))
    if kind == 2:
        return rng.choice(_HANDS) + chr(0x1F3FB + rng.randrange(5))
    if kind == 3:
        return rng.choice("0123456789#*") + _VARIATION + "\u20e3"
    return "❤" + _VARIATION if kind == 4 else rng.choice(_PLAIN_EMOJI)


def break_bytes(seed: int, token_ids: list[int], loose_ids: list[int]) -> list[int]:
    """The same tokens with some lost and some loose ones added, so that their bytes are not UTF-8 any more."""
    rng = random.Random(seed)
    broken = [token_id for token_id in token_ids if rng.random() > 0.08]
    for _ in range(rng.randint(1, 5)):
        broken.insert(rng.randint(0, len(broken)), rng.choice(loose_ids))
    return broken
