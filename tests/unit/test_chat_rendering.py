"""Conversations through templates of several families: roles, tools, reasoning, and answers that go on."""

from __future__ import annotations

import json

import pytest

from frontend.chat.rendering import Conversation, RenderedPrompt, render
from frontend.chat_template import ChatTemplate
from stepwire.errors import InvalidRequestError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Trims what it is given, as the Llama family does.
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
R1 = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<Assistant><think>\n"
MISTRAL = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate, not ' + m.content) }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


def said(*turns: str) -> list[dict[str, object]]:
    """A conversation: role, text, role, text, ..."""
    return [{"role": role, "content": text} for role, text in zip(turns[::2], turns[1::2], strict=True)]


def rendered(source: str, messages: list[dict[str, object]], **options: object) -> RenderedPrompt:
    options = {"tools": (), "variables": {}, **options}
    return render(ChatTemplate(source, {"bos_token": "<s>"}), Conversation(messages, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (CHATML, "<|im_start|>user\n Hi \n<|im_end|>\n<|im_start|>assistant\n"),
        (
            LLAMA,
            "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (QWEN, "<|im_start|>user\n Hi \n<|im_end|>\n<|im_start|>assistant\n"),
        (MISTRAL, "[INST]  Hi \n [/INST]"),
    ],
)
def test_a_turn_in_several_families(source: str, text: str):
    assert rendered(source, said("user", " Hi \n")) == RenderedPrompt(text, False, False)


def test_tools_and_calls_reach_the_template():
    tool = {"type": "function", "function": {"name": "add"}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": "é"}}}
    messages = [*said("user", "Hi"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = rendered(QWEN, messages, tools=[tool]).text
    assert f"<tools>{json.dumps(tool)}</tools>" in text
    assert '<tool_call>{"name": "add", "arguments": {"a": "é"}}</tool_call>' in text


def test_no_tools_are_none():
    assert rendered("{{ tools is none }}", said("user", "x")).text == "True"


@pytest.mark.parametrize(
    ("source", "variables", "is_open", "is_over"),
    [(R1, {}, True, False), (QWEN, {}, False, False), (QWEN, {"enable_thinking": False}, False, True)],
)
def test_where_the_reasoning_stands(source: str, variables: dict[str, object], is_open: bool, is_over: bool):
    prompt = rendered(source, said("user", "Hi"), variables=variables)
    assert (prompt.is_reasoning_open, prompt.is_reasoning_over) == (is_open, is_over)


@pytest.mark.parametrize("start", ["The answer", "ends in space ", "Hi", "\n", "", "<|im_end|>"])
@pytest.mark.parametrize("source", [CHATML, QWEN, MISTRAL, LLAMA])
def test_an_answer_goes_on_where_it_ends(source: str, start: str):
    messages = said("user", "Hi", "assistant", start)
    prompt = rendered(source, messages, is_continued=True, add_generation_prompt=False)
    # The leading space is the template's to trim; what stands before the end stays as it is.
    assert prompt.text.endswith(start if source is not LLAMA else start.lstrip())
    assert prompt.text.count("Hi") == rendered(source, messages).text.count("Hi")
    assert "assistant" not in prompt.text[prompt.text.rfind("Hi") :].replace("assistant", "", 1)


@pytest.mark.parametrize(("start", "is_open"), [("<think>Well", True), ("<think>Well</think>So", False), ("So", False)])
def test_reasoning_of_an_answer_that_goes_on(start: str, is_open: bool):
    prompt = rendered(CHATML, said("assistant", start), is_continued=True, add_generation_prompt=False)
    assert (prompt.is_reasoning_open, prompt.is_reasoning_over) == (is_open, not is_open)


def test_a_template_that_leaves_the_last_message_out():
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        rendered("{{ messages[0].content }}", said("user", "a", "assistant", "b"), is_continued=True)


KNOWING = "developer: {{ messages[0].role }}"


@pytest.mark.parametrize(("source", "role"), [("{{ messages[0].role }}", "system"), (KNOWING, "developer: developer")])
def test_developers_are_the_system_where_templates_do_not_know_them(source: str, role: str):
    assert rendered(source, said("developer", "x")).text == role


def test_a_refusal_that_quotes_the_conversation_is_not_passed_on():
    with pytest.raises(InvalidRequestError) as caught:
        rendered(MISTRAL, said("user", "hello", "user", "canary"))
    assert caught.value.message == "messages: the chat template fails: it refuses the conversation"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('canary') }}",
        "{{ canary.canary }}",
        "{% canary %}",
        "\n{% if 'canary' canary %}",
        "{{ 'canary' + 1 }}",
        "{{ messages[0]['canary']['canary'] }}",
    ],
)
def test_a_callers_template_is_not_quoted(source: str):
    template = ChatTemplate("", {}).with_source(source, is_callers=True)
    with pytest.raises(InvalidRequestError) as caught:
        render(template, Conversation(said("user", "canary"), (), {}))
    assert "canary" not in str(caught.value)
