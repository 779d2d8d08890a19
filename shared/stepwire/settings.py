"""Base of both services' settings: CLI flag = environment variable STEPWIRE_* = one documented name.

An unknown flag, an unknown STEPWIRE_ variable and an ill-formed value are errors that name it. The environment is
read here and nowhere else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict, SettingsError

ENV_PREFIX = "STEPWIRE_"
# Variables of the Makefile, the tests and the `stepwire` command; no setting of a service.
_FOREIGN = frozenset({"STEPWIRE_REQUIRE_ALL", "STEPWIRE_REQUIRE_ROOT", "STEPWIRE_TOKEN"})
# Of the images: the commit that they were built of. Not STEPWIRE_REVISION, which is a setting, of the model.
_BUILD_REVISION = "STEPWIRE_BUILD_REVISION"
# Where OpenTelemetry looks for what the flags do not say; those of traces alone come first.
OTLP_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
OTLP_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
OTLP_PROTOCOLS = ("grpc", "http/protobuf")

S = TypeVar("S", bound="Settings")


class Settings(BaseSettings):
    """Frozen settings; subclasses declare the fields with a description each. Here are those of every service."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        # A mistake raises SettingsError instead of printing a page of usage above the one sentence that matters.
        cli_exit_on_error=False,
    )

    otlp_endpoint: str = Field(
        "",
        pattern=r"^(https?://.+)?$",
        description="Where traces go: http[s]://host:port; empty = OTEL_EXPORTER_OTLP_ENDPOINT, if set.",
    )
    otlp_protocol: Literal["grpc", "http/protobuf"] | None = Field(
        None, description="How traces go there; unset = OTEL_EXPORTER_OTLP_PROTOCOL, or grpc."
    )
    trace_sample_ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of requests traced, where the caller has not decided; unset = OTEL_TRACES_SAMPLER, or all.",
    )

    trace_detail_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the engine's steps with spans, and of traced requests that show short work as well.",
    )
    check_config: bool = Field(
        False, description="Only read and check the settings: one line, and exit code 0, or 2 with the mistake."
    )

    @classmethod
    def from_command_line(cls: type[S], args: list[str] | None = None) -> S:
        """Settings from `args` (default: the process's own) over the environment; a mistake ends the process with 2.

        With --check-config settings without a mistake end it too, with 0.
        """
        unknown = unknown_variables(cls, os.environ)
        if unknown:
            _fail(f"unknown environment variable {unknown[0]}: no setting has that name; see --help")
        try:
            settings = CliApp.run(cls, cli_args=args)
        except ValidationError as error:
            _fail("; ".join(_describe(item) for item in error.errors()))
        except SettingsError as error:
            _fail(f"{str(error).removeprefix('error parsing CLI: ')}; see --help")
        if settings.exports_traces and settings.trace_protocol not in OTLP_PROTOCOLS:
            name = next(filter(library_variable, OTLP_PROTOCOL_VARIABLES))
            _fail(f"environment variable {name}: {settings.trace_protocol!r} is not {' or '.join(OTLP_PROTOCOLS)}")
        if settings.check_config:
            sys.stdout.write(f"the settings of {cls.model_config['cli_prog_name']} are valid\n")
            raise SystemExit(0)
        return settings

    @property
    def exports_traces(self) -> bool:
        """An endpoint is set: by flag, or by a variable of OpenTelemetry, where no other one turns traces off."""
        is_off = library_variable("OTEL_TRACES_EXPORTER").lower() == "none"
        return bool(self.otlp_endpoint) or (not is_off and bool(library_variable(*OTLP_ENDPOINT_VARIABLES)))

    @property
    def trace_protocol(self) -> str:
        """One of OTLP_PROTOCOLS, unless a variable names another."""
        return self.otlp_protocol or library_variable(*OTLP_PROTOCOL_VARIABLES) or OTLP_PROTOCOLS[0]


def set_default_variable(name: str, value: str) -> bool:
    """Set a variable of a library for this process, unless the operator has; to be called before it is loaded.

    Returns whether it was for us to set.
    """
    is_free = name not in os.environ
    if is_free:
        os.environ[name] = value
    return is_free


def library_variable(*names: str) -> str:
    """What the operator has set for a library: the first of these variables that is not empty, or an empty string."""
    return next((value for name in names if (value := os.environ.get(name, "").strip())), "")


def user_cache_dir() -> Path:
    """Where this user's programs keep what they can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepwire"


def unknown_variables(cls: type[Settings], environ: Mapping[str, str]) -> list[str]:
    """STEPWIRE_ variables that name no setting of this service."""
    known = {ENV_PREFIX + name.upper() for name in cls.model_fields} | _FOREIGN | {_BUILD_REVISION}
    return sorted(name for name in environ if name.startswith(ENV_PREFIX) and name not in known)


def environment_without_settings() -> dict[str, str]:
    """The process's environment less STEPWIRE_ variables: for a child that gets its settings as flags alone."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX) or name == _BUILD_REVISION
    }


def build_revision() -> str:
    """The commit that this program was built of, as its image says; `unknown` outside of images."""
    return os.environ.get(_BUILD_REVISION) or "unknown"


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """The process's environment and these: for a child that has the same settings."""
    return {**os.environ, **variables}


def _describe(item: Mapping[str, Any]) -> str:
    if not item["loc"]:
        return str(item["msg"]).removeprefix("Value error, ")
    flag = "--" + "-".join(str(part) for part in item["loc"]).replace("_", "-")
    return f"{flag}: {item['msg']} (got {item['input']!r})"


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"error: {message}\n")
    raise SystemExit(2)
