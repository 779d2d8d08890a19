"""What chats need to know of the model: its template, and which parsers read its answers. A frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from frontend.chat_template import ChatTemplate
from frontend.generation_config import read_json
from frontend.output_parsers.choice import families

AUTO = "auto"
NONE = "none"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The operator's choices; parsers are names, AUTO = that of the model's family, NONE = no parser."""

    template_file: Path | None = None
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO
    allows_request_template: bool = False


@dataclass(frozen=True, slots=True)
class ChatModel:
    """Parsers are names, or None."""

    template: ChatTemplate
    tool_parser: str | None
    reasoning_parser: str | None
    allows_request_template: bool

    @property
    def has_template(self) -> bool:
        """Whether there can be chats: with the template of the model, or with one of the caller."""
        return self.template.source is not None or self.allows_request_template

    @classmethod
    def from_directory(cls, directory: Path, options: ChatOptions) -> ChatModel:
        """Of a model directory. Raises ValueError for files that cannot be read."""
        template = ChatTemplate.from_directory(directory)
        if options.template_file is not None:
            template = template.with_source(options.template_file.read_text(encoding="utf-8"))
        model_type = read_json(directory / "config.json").get("model_type")
        of_family = families(model_type if isinstance(model_type, str) else "", template.source or "")
        return cls(
            template,
            _chosen(options.tool_parser, of_family[0]),
            _chosen(options.reasoning_parser, of_family[1]),
            options.allows_request_template,
        )


def _chosen(name: str, of_family: str | None) -> str | None:
    return of_family if name == AUTO else None if name == NONE else name
