"""Settings of the frontend: CLI flag = environment variable STEPWIRE_* = one documented name. Frozen."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from frontend.access.token_file import read_token_file
from frontend.chat.model import AUTO, NONE, ChatOptions
from frontend.engine_client.discovery import DNS_PREFIX
from frontend.output_parsers.choice import REASONING_PARSERS, TOOL_PARSERS
from stepwire.exposure import check_server_tls, check_tls_files, is_loopback, refuse_exposed
from stepwire.settings import Settings
from stepwire.tls import TlsFiles


class FrontendSettings(Settings):
    """LLM frontend: validates, tokenizes and streams; sends the work to engine cores, one gRPC stream each."""

    model_config = SettingsConfigDict(cli_prog_name="python -m frontend")

    host: str = Field("127.0.0.1", description="Address of the public ports (gRPC, HTTP) and of the metrics port.")
    port: int = Field(50051, ge=0, le=65535, description="Public gRPC port; 0 = any free one.")
    http_port: int = Field(8000, ge=0, le=65535, description="Port of the OpenAI-compatible HTTP API; 0 = off.")
    tls_cert_file: Path | None = Field(
        None,
        description="PEM chain of the public and admin ports; they then speak TLS alone. Read again when changed.",
    )
    tls_key_file: Path | None = Field(None, description="Its private key, PEM, without a password.")
    tls_client_ca_file: Path | None = Field(None, description="PEM of CAs: clients need a certificate of one of them.")
    insecure: bool = Field(
        False, description="Allow addresses other than loopback without TLS; for networks that nobody else is on."
    )
    token_file: Path | None = Field(
        None, description="TOML with the bearer tokens that are let in, each with its class and limits; see the README."
    )
    metrics_port: int = Field(
        9100, ge=0, le=65535, description="Port of /metrics, /healthz, /readyz; 0 = any free one."
    )
    metrics_alias: Literal["vllm", "none"] = Field(
        "vllm", description="Serve metrics that other tools know by a vllm: name under that name too."
    )
    metrics_mirror_engines: bool = Field(
        False,
        description="Repeat the engines' own metrics under their vllm: names, for pickers that scrape frontends; what "
        "scrapes the engines as well counts twice.",
    )
    admin_host: str = Field(
        "127.0.0.1", description="Address of the admin port; anything but loopback lets others pause the engines."
    )
    admin_port: int = Field(50052, ge=0, le=65535, description="Admin gRPC port; 0 = any free one.")
    engine_endpoints: str = Field(
        "127.0.0.1:50061",
        description="Engine cores, comma separated: host:port, unix:/path/to/socket, or dns:///name:port for every "
        "address behind a name, looked up every 5 s.",
    )
    engine_tls_ca_file: Path | None = Field(
        None, description="PEM of the CAs of the engines' certificates; with it the engines are spoken to in TLS."
    )
    engine_tls_cert_file: Path | None = Field(None, description="PEM chain shown to engines that ask for one.")
    engine_tls_key_file: Path | None = Field(None, description="Its private key, PEM, without a password.")
    engine_tls_server_name: str = Field(
        "", description="The name in the engines' certificates, where it is not their address."
    )
    expect_model: str = Field("", description="Refuse engines that serve another model; empty = any.")
    tokenizer: str = Field("", description="Directory with the tokenizer files; empty = from the engine.")
    cache_dir: Path = Field(
        Path("~/.cache/stepwire").expanduser(), description="Where tokenizers received from engines are kept by hash."
    )
    client_id: str = Field("", description="Stable name towards engines, for logs and metrics; empty = the host name.")

    max_concurrent_requests: int = Field(
        1024, ge=1, description="Choices in flight (n counts n); one more is QUEUE_FULL."
    )
    max_concurrent_prompt_tokens: int = Field(
        4_000_000, ge=1, description="Prompt tokens in flight (n counts n); more is QUEUE_FULL."
    )
    tokenizer_threads: int = Field(2, ge=1, le=64, description="Threads that encode prompts and render chats.")
    slow_client_bytes: int = Field(
        4 * 1024 * 1024, ge=1024, description="A client that leaves more output unread is cut with SLOW_CLIENT."
    )
    slow_client_timeout_s: float = Field(
        30.0, gt=0, description="A client that reads nothing for this long while output waits is cut with SLOW_CLIENT."
    )

    chat_template: str = Field("", description="File with the Jinja template of chats; empty = the model's own.")
    allow_request_chat_template: bool = Field(
        False,
        description="Take templates from callers too: they run in a sandbox, which does not bound their time.",
    )
    tool_call_parser: str = Field(
        AUTO, description=f"Parser of tool calls: auto = by model family, or {', '.join((NONE, *TOOL_PARSERS))}."
    )
    reasoning_parser: str = Field(
        AUTO, description=f"Parser of reasoning: auto = by model family, or {', '.join((NONE, *REASONING_PARSERS))}."
    )

    ready_timeout_s: float = Field(600.0, gt=0, description="How long an engine may take to load before we say so.")
    pre_stop_delay_s: float = Field(
        0.0, ge=0, description="On SIGTERM: wait before refusing, so that balancers notice; 5 is right in Kubernetes."
    )
    drain_timeout_s: float = Field(30.0, ge=0, description="On SIGTERM: time for running requests; 0 = abort at once.")
    vllm_compat: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Serve vllm.grpc.engine.VllmEngine too, for gateways that speak it; auto = when the package "
        "smg-grpc-proto is installed.",
    )
    owner: Literal["none", "parent"] = Field(
        "none", description="parent: end when the parent process goes (a pipe on stdin reaches its end)."
    )
    enable_reflection: bool = Field(True, description="Let clients such as grpcurl discover the services.")

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Least severe level logged.")
    log_format: Literal["text", "json"] = Field("text", description="Readable lines or one JSON object a line.")

    @property
    def endpoints(self) -> list[str]:
        """The engine endpoints, one each."""
        return [part.strip() for part in self.engine_endpoints.split(",") if part.strip()]

    @property
    def serves_vllm_compat(self) -> bool:
        """Whether the servicer for gateways is there. Raises ValueError when it must be and its package is not."""
        has_package = find_spec("smg_grpc_proto") is not None
        if self.vllm_compat == "on" and not has_package:
            raise ValueError("--vllm-compat on needs the package smg-grpc-proto: pip install 'stepwire[compat]'")
        return self.vllm_compat != "off" and has_package

    @property
    def chat_options(self) -> ChatOptions:
        """How conversations are rendered and answers read."""
        return ChatOptions(
            template_file=Path(self.chat_template) if self.chat_template else None,
            tool_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            allows_request_template=self.allow_request_chat_template,
        )

    @model_validator(mode="after")
    def _check_compat(self) -> FrontendSettings:
        _ = self.serves_vllm_compat
        if self.metrics_mirror_engines and self.metrics_alias == "none":
            raise ValueError("--metrics-mirror-engines needs --metrics-alias vllm: it has no other names")
        return self

    @model_validator(mode="after")
    def _check_chat(self) -> FrontendSettings:
        if self.chat_template and not Path(self.chat_template).is_file():
            raise ValueError(f"--chat-template: {self.chat_template} is not a file")
        _check_parser("--tool-call-parser", self.tool_call_parser, TOOL_PARSERS)
        _check_parser("--reasoning-parser", self.reasoning_parser, REASONING_PARSERS)
        return self

    @property
    def tls(self) -> TlsFiles | None:
        """Of the public and of the admin port."""
        return check_server_tls(self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)

    @property
    def engine_tls(self) -> TlsFiles | None:
        """Towards the engines."""
        return check_tls_files(
            "--engine-tls", self.engine_tls_cert_file, self.engine_tls_key_file, self.engine_tls_ca_file
        )

    @model_validator(mode="after")
    def _check_security(self) -> FrontendSettings:
        addresses = {"--host": self.host, "--admin-host": self.admin_host}
        exposed = {flag: host for flag, host in addresses.items() if not is_loopback(host)}
        tls, engine_tls = self.tls, self.engine_tls
        if exposed and tls is None and not self.insecure:
            flag, host = next(iter(exposed.items()))
            raise refuse_exposed(flag, host, "carry prompts and tokens in clear", "give --tls-cert-file")
        if "--admin-host" in exposed and not (self.tls_client_ca_file or self.token_file or self.insecure):
            what = "let anybody pause the engines"
            raise refuse_exposed("--admin-host", self.admin_host, what, "give --tls-client-ca-file or --token-file")
        if engine_tls is not None and self.engine_tls_ca_file is None:
            raise ValueError("--engine-tls-cert-file needs --engine-tls-ca-file: an engine could be anybody")
        if self.engine_tls_server_name and engine_tls is None:
            raise ValueError("--engine-tls-server-name has no meaning without --engine-tls-ca-file")
        if self.token_file is not None:
            try:
                read_token_file(self.token_file)
            except ValueError as error:
                raise ValueError(f"--token-file: {error}") from None
        return self

    @model_validator(mode="after")
    def _check_endpoints(self) -> FrontendSettings:
        if not self.endpoints:
            raise ValueError("--engine-endpoints: at least one host:port is needed")
        if len(set(self.endpoints)) != len(self.endpoints):
            raise ValueError("--engine-endpoints: an endpoint is listed twice")
        for endpoint in self.endpoints:
            _check_endpoint(endpoint)
        if self.tokenizer and not Path(self.tokenizer).is_dir():
            raise ValueError(f"--tokenizer: {self.tokenizer} is not a directory")
        return self


def _check_parser(flag: str, name: str, known: Sequence[str]) -> None:
    if name not in (AUTO, NONE, *known):
        raise ValueError(f"{flag}: {name!r} is none of {', '.join((AUTO, NONE, *known))}")


def _check_endpoint(endpoint: str) -> None:
    if endpoint.startswith("unix:"):
        return
    host, separator, port = endpoint.removeprefix(DNS_PREFIX).rpartition(":")
    if not (host and separator and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"--engine-endpoints: {endpoint!r} is neither host:port nor unix:/path nor dns:///name:port")
