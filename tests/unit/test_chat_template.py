"""Chat templates: transformers' conventions, the model's files, and templates that must not harm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frontend.chat_template import ChatTemplate
from stepwire.errors import InvalidRequestError

USER = [{"role": "user", "content": "Hello"}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, messages: object = USER, **options: bool) -> str:
    return ChatTemplate(source, TOKENS).render(messages, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hello</s>"),
        # Blocks take their line with them, indentation and line feed included.
        ("a\n    {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% generation %}x{{ messages[0].role }}{% endgeneration %}", "xuser"),
        ("{% if tools is not none %}tools{% endif %}{% if documents is none %}none{% endif %}", "none"),
        ("{{ undefined_variable }}{% if undefined_variable %}x{% endif %}", ""),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
    ],
)
def test_conventions(source: str, text: str) -> None:
    assert render(source) == text


def test_the_generation_prompt_is_the_callers_choice() -> None:
    source = "{% if add_generation_prompt %}go{% else %}stay{% endif %}"
    assert (render(source), render(source, add_generation_prompt=False)) == ("go", "stay")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ messages[0].content + 5 }}", "str"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_template_that_fails_is_the_requests_error(source: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        render(source)
    assert [violation.field for violation in caught.value.violations] == ["messages"]


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    messages = [dict(message) for message in USER]
    with pytest.raises(InvalidRequestError):
        render(source + "{{ raise_exception('it was let through as undefined') }}", messages)
    assert messages == USER


@pytest.mark.parametrize(
    "messages", [[], ["Hello"], [{"content": "Hello"}], [{"role": 5}], [{"role": "user"}, None], "Hello"]
)
def test_what_is_no_conversation_is_refused(messages: object) -> None:
    with pytest.raises(InvalidRequestError, match="messages"):
        render("x", messages)


@pytest.mark.parametrize("source", ["{% if %}", "{{ " + "(" * 900 + ")" * 900 + " }}", "{{ 10 ** 5000 }}"])
def test_a_broken_template_is_found_when_it_is_used(source: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"not valid|the chat template"):
        render(source)


@pytest.mark.parametrize("source", ["{{ '\\ud800' }}", "{{ tools | tojson }}"])
def test_half_a_character_is_no_prompt(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        render(source, tools=[{"name": json.loads('"\\ud800"')}])


def test_a_model_without_a_template_takes_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<b>"}, "eos_token": None}))
    template = ChatTemplate.from_directory(tmp_path)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        template.render(USER)
    assert template.with_source("{{ bos_token }}[{{ eos_token }}]").render(USER) == "<b>[]"


def test_where_models_keep_their_template(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "from config"}))
    assert ChatTemplate.from_directory(tmp_path).render(USER) == "from config"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "from list"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.from_directory(tmp_path).render(USER) == "from list"
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert ChatTemplate.from_directory(tmp_path).render(USER) == "from file"


def test_special_tokens_of_older_models(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<old>", "eos_token": "<end>"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<new>"}))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    assert ChatTemplate.from_directory(tmp_path).render(USER) == "<new><end>"
