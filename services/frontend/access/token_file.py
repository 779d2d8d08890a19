"""The operator's token file: one table for each token, in TOML. Read only; a mistake never repeats what a token is.

[tokens.alice]
sha256 = "…"                  # of the token; or token = "…" itself
class = "gold"                # client class; without it the caller names one
requests_per_minute = 60
tokens_per_minute = 100000    # of prompts and outputs together
share = 0.5                   # most of the frontend's limits that it may hold at once
models = ["SmolLM2-135M-Instruct"]
admin = true                  # also lets into the admin port
"""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

# A shorter one can be guessed.
MIN_TOKEN_CHARS = 16
# As long as the name of a class in a request's metadata.
MAX_CLASS_CHARS = 128

Rate = Annotated[int, Field(ge=1, strict=True)]


@dataclass(frozen=True, slots=True)
class Grant:
    """What the operator allows the bearer of one token."""

    name: str
    # SHA-256 of the token.
    digest: bytes
    # Empty = the caller names it.
    client_class: str = ""
    # None = no limit.
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    share: float = 1.0
    # Empty = all.
    models: frozenset[str] = frozenset()
    is_admin: bool = False


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    sha256: str = Field("", pattern="^([0-9a-fA-F]{64})?$")
    token: str = ""
    client_class: str = Field("", alias="class", max_length=MAX_CLASS_CHARS)
    requests_per_minute: Rate | None = None
    tokens_per_minute: Rate | None = None
    share: float = Field(1.0, gt=0, le=1)
    models: frozenset[str] = frozenset()
    admin: bool = False

    @model_validator(mode="after")
    def _check_secret(self) -> _Entry:
        if bool(self.sha256) == bool(self.token):
            raise ValueError("needs either sha256 or token")
        if self.token and len(self.token) < MIN_TOKEN_CHARS:
            raise ValueError(f"a token of less than {MIN_TOKEN_CHARS} characters can be guessed")
        return self

    def grant(self, name: str) -> Grant:
        return Grant(
            name=name,
            digest=bytes.fromhex(self.sha256) if self.sha256 else digest_of(self.token),
            client_class=self.client_class,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            share=self.share,
            models=self.models,
            is_admin=self.admin,
        )


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    tokens: dict[str, _Entry] = Field(min_length=1)


def digest_of(token: str) -> bytes:
    """What is kept and compared instead of a token."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def read_token_file(path: Path) -> tuple[Grant, ...]:
    """The grants of a file. Raises ValueError, in words that name the place and never a token."""
    try:
        file = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}") from None
    except tomllib.TOMLDecodeError as error:
        # Its text would quote the file.
        raise ValueError(f"{path} is not TOML{_place(str(error))}") from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path}: {place}: {first['msg'].removeprefix('Value error, ')}") from None
    grants = tuple(entry.grant(name) for name, entry in file.tokens.items())
    if len({grant.digest for grant in grants}) != len(grants):
        raise ValueError(f"{path}: two entries have the same token")
    return grants


def _place(text: str) -> str:
    _, found, place = text.rpartition("(at ")
    return f" (at {place}" if found else ""
