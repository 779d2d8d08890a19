"""The parameter table: what is accepted, with which default, and what every refusal says."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace

import pytest
from google.protobuf import json_format

from fakes.small_tokenizer import byte_level_tokenizer
from frontend.generation_config import GenerationDefaults
from frontend.input_processor import InputProcessor, ModelFacts
from frontend.input_processor.processed_request import MAX_ENGINE_BYTES
from stepwire import token_array
from stepwire.engine.v1 import engine_core_pb2
from stepwire.errors import InvalidRequestError, StepwireError, UnavailableError
from stepwire.v1.generation_service_pb2 import GenerateRequest

KINDS = ("json_schema", "json_object", "regex", "choice", "structural_tag")
FACTS = ModelFacts(
    served_model_name="small", max_model_len=100, vocab_size=293, kv_cache_tokens=80, structured_output_kinds=KINDS
)
TOKENIZER = byte_level_tokenizer()
DEFAULTS = GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)


class Clock:
    """Time as the test wants it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def processor(clock):
    processor = InputProcessor(TOKENIZER, FACTS, clock=clock)
    yield processor
    processor.close()


def request_of(**fields: object) -> GenerateRequest:
    """A request from JSON-like fields; a prompt unless one is given."""
    if not {"text", "token_ids"} & fields.keys():
        fields["text"] = "hello"
    return json_format.ParseDict(fields, GenerateRequest())


async def process(processor, **fields: object):
    return await processor.process(request_of(**fields), request_id="r1")


def engine_request(processed, choice: int, handle: int, now: float) -> engine_core_pb2.EngineCoreRequest:
    message = engine_core_pb2.EngineCoreRequest()
    processed.fill(choice, message, handle, now)
    return message


async def refused(processor, **fields: object) -> StepwireError:
    with pytest.raises(InvalidRequestError) as caught:
        await process(processor, **fields)
    return caught.value


async def test_plain_request_is_complete(processor) -> None:
    processed = await process(processor, text="hello world")
    message = engine_request(processed, 0, handle=7, now=1000.0)
    assert token_array.unpack(message.prompt_token_ids) == TOKENIZER.encode("hello world")
    assert (message.handle, message.request_id) == (7, "r1")
    assert list(message.eos_token_ids) == [0]
    assert (message.sampling.temperature, message.sampling.top_p, message.sampling.top_k) == (1.0, 1.0, 0)
    assert (message.sampling.min_p, message.sampling.repetition_penalty) == (0.0, 1.0)
    assert processed.model == "small"
    assert processed.output.text
    assert processed.output.skip_special_tokens
    assert processed.prompt_text is None


async def test_callers_message_is_not_changed(processor) -> None:
    request = request_of(text="hello", sampling={"badWords": ["stop"], "temperature": 0.001}, stop={"maxTokens": 9999})
    before = request.SerializeToString(deterministic=True)
    await processor.process(request, request_id="r")
    assert request.SerializeToString(deterministic=True) == before


async def test_engine_messages_are_copies(processor) -> None:
    processed = await process(processor)
    engine_request(processed, 0, 1, 1000.0).stop_token_ids.append(5)
    assert list(engine_request(processed, 0, 1, 1000.0).stop_token_ids) == []


# --- one row each: field, value, start of what is said ---
REFUSALS = [
    ({"sampling": {"temperature": 2.5}}, "sampling.temperature", "2.5 is outside [0, 2]"),
    ({"sampling": {"temperature": -1}}, "sampling.temperature", "-1 is outside [0, 2]"),
    ({"sampling": {"temperature": "NaN"}}, "sampling.temperature", "nan is outside"),
    # Nothing false about n, of which a wrong temperature says nothing.
    ({"sampling": {"temperature": 3, "n": 2}}, "sampling.temperature", "3 is outside"),
    ({"sampling": {"temperature": "Infinity"}}, "sampling.temperature", "inf is outside"),
    ({"sampling": {"topP": 7}}, "sampling.top_p", "7 is outside (0, 1]"),
    ({"sampling": {"topP": 0}}, "sampling.top_p", "0 is outside (0, 1]"),
    ({"sampling": {"topP": "NaN"}}, "sampling.top_p", "nan is outside"),
    ({"sampling": {"topK": -2}}, "sampling.top_k", "-2 is outside -1.."),
    ({"sampling": {"minP": 1.5}}, "sampling.min_p", "1.5 is outside [0, 1]"),
    ({"sampling": {"minP": -0.5}}, "sampling.min_p", "-0.5 is outside [0, 1]"),
    ({"sampling": {"presencePenalty": 2.5}}, "sampling.presence_penalty", "2.5 is outside [-2, 2]"),
    ({"sampling": {"frequencyPenalty": -3}}, "sampling.frequency_penalty", "-3 is outside [-2, 2]"),
    ({"sampling": {"repetitionPenalty": 0}}, "sampling.repetition_penalty", "0 is outside (0, infinity)"),
    ({"sampling": {"repetitionPenalty": "Infinity"}}, "sampling.repetition_penalty", "inf is outside"),
    ({"sampling": {"n": 0}}, "sampling.n", "0 is outside 1..16384"),
    ({"sampling": {"n": 16385}}, "sampling.n", "16385 is outside 1..16384"),
    ({"sampling": {"n": 2, "temperature": 0}}, "sampling.n", "2 choices with greedy sampling"),
    ({"sampling": {"logitBias": {"293": 1.0}}}, "sampling.logit_bias[293]", "token id 293 is outside 0..292"),
    ({"sampling": {"logitBias": {"5": "NaN"}}}, "sampling.logit_bias[5]", "nan is not a finite number"),
    (
        {"sampling": {"logitBias": {str(token_id): "NaN" for token_id in range(1025)}}},
        "sampling.logit_bias",
        "1025 entries, at most 1024",
    ),
    ({"sampling": {"allowedTokenIds": [400] * 294}}, "sampling.allowed_token_ids", "294 token ids, at most 293"),
    ({"sampling": {"allowedTokenIds": [1, 400]}}, "sampling.allowed_token_ids[1]", "token id 400 is outside 0..292"),
    ({"sampling": {"badWords": ["ok", ""]}}, "sampling.bad_words[1]", "the string is empty"),
    ({"sampling": {"badWords": ["w" * 257]}}, "sampling.bad_words[0]", "257 characters, at most 256"),
    ({"sampling": {"badWords": ["w"] * 1025}}, "sampling.bad_words", "1025 strings, at most 1024"),
    ({"stop": {"maxTokens": 0}}, "stop.max_tokens", "0 is less than 1"),
    ({"stop": {"maxTokens": 5, "minTokens": 6}}, "stop.min_tokens", "6 is more than stop.max_tokens, 5"),
    ({"stop": {"minTokens": 90}}, "stop.min_tokens", "90 is more than the 79 tokens"),
    ({"stop": {"stop": [""]}}, "stop.stop[0]", "the string is empty"),
    ({"stop": {"stop": ["x"] * 257}}, "stop.stop", "257 strings, at most 256"),
    ({"stop": {"stop": ["ok", "x" * 1025]}}, "stop.stop[1]", "1025 characters, at most 1024"),
    ({"stop": {"stop": ["x"]}, "output": {"text": False}}, "stop.stop", "stop strings need text output"),
    ({"stop": {"stopTokenIds": [293]}}, "stop.stop_token_ids[0]", "token id 293 is outside 0..292"),
    ({"stop": {"stopTokenIds": [293] * 1025}}, "stop.stop_token_ids", "1025 token ids, at most 1024"),
    (
        {"stop": {"repetitionDetection": {"maxPatternTokens": 257, "minPatternTokens": 1, "minRepeats": 2}}},
        "stop.repetition_detection.max_pattern_tokens",
        "257 is outside 1..256",
    ),
    (
        {"stop": {"repetitionDetection": {"maxPatternTokens": 4, "minPatternTokens": 5, "minRepeats": 2}}},
        "stop.repetition_detection.min_pattern_tokens",
        "5 is outside 1..4",
    ),
    (
        {"stop": {"repetitionDetection": {"maxPatternTokens": 4, "minPatternTokens": 1, "minRepeats": 1}}},
        "stop.repetition_detection.min_repeats",
        "1 is less than 2",
    ),
    ({"output": {"logprobs": 21}}, "output.logprobs", "21 asks for 21, at most 20"),
    ({"output": {"logprobs": -2}}, "output.logprobs", "-2 is neither -1 nor at least 0"),
    ({"output": {"promptLogprobs": -1}}, "output.prompt_logprobs", "-1 asks for 293, at most 20"),
    ({"output": {"logprobTokenIds": [999]}}, "output.logprob_token_ids[0]", "token id 999 is outside 0..292"),
    ({"output": {"logprobTokenIds": list(range(129))}}, "output.logprob_token_ids", "129 token ids, at most 128"),
    ({"text": ""}, "text", "the prompt is empty"),
    ({"token_ids": {"ids": []}}, "token_ids.ids", "the prompt is empty"),
    ({"token_ids": {"ids": [1, 293]}}, "token_ids.ids[1]", "token id 293 is outside 0..292"),
    (
        {"token_ids": {"ids": [5] * 150 + [293, 6]}, "truncatePromptTokens": 3},
        "token_ids.ids[150]",
        "token id 293 is outside 0..292",
    ),
    ({"resumeOutputTokenIds": {"ids": [293]}}, "resume_output_token_ids.ids[0]", "token id 293 is outside"),
    ({"resumeOutputTokenIds": {"ids": [5]}, "sampling": {"n": 2}}, "sampling.n", "2 choices cannot be resumed"),
    (
        {"resumeOutputTokenIds": {"ids": [5, 6]}, "stop": {"maxTokens": 2}},
        "resume_output_token_ids",
        "2 resumed tokens leave nothing to generate of at most 2",
    ),
    ({"queueTimeoutMs": 0}, "queue_timeout_ms", "0 is less than 1"),
    ({"truncatePromptTokens": 0}, "truncate_prompt_tokens", "0 is neither -1 nor in 1..100"),
    ({"truncatePromptTokens": 101}, "truncate_prompt_tokens", "101 is neither -1 nor in 1..100"),
    ({"structuredOutput": {}}, "structured_output.spec", "no kind of constraint is set"),
    ({"structuredOutput": {"regex": ""}}, "structured_output.regex", "the text is empty"),
    ({"structuredOutput": {"regex": "a" * 262_145}}, "structured_output.regex", "262145 characters, at most 262144"),
    ({"structuredOutput": {"jsonSchema": ""}}, "structured_output.json_schema", "the text is empty"),
    ({"structuredOutput": {"jsonSchema": '{"a": '}}, "structured_output.json_schema", "not JSON: Expecting value"),
    ({"structuredOutput": {"jsonSchema": "5"}}, "structured_output.json_schema", "the JSON is not an object or"),
    ({"structuredOutput": {"jsonSchema": "[" * 200_000}}, "structured_output.json_schema", "the JSON is nested too"),
    ({"structuredOutput": {"structuralTag": "true"}}, "structured_output.structural_tag", "the JSON is not an object"),
    ({"structuredOutput": {"grammar": ""}}, "structured_output.grammar", "the text is empty"),
    ({"structuredOutput": {"choice": {}}}, "structured_output.choice.choices", "0 choices, outside 1..10000"),
    ({"structuredOutput": {"choice": {"choices": ["a", ""]}}}, "structured_output.choice.choices[1]", "the string is"),
    (
        {"structuredOutput": {"choice": {"choices": ["a"] * 10_001}}},
        "structured_output.choice.choices",
        "10001 choices",
    ),
    (
        {"structuredOutput": {"choice": {"choices": ["a" * 200_000, "b" * 200_000]}}},
        "structured_output.choice.choices",
        "400000 characters",
    ),
]


@pytest.mark.parametrize(("fields", "field", "text"), REFUSALS, ids=[f"{row[1]}: {row[2]}" for row in REFUSALS])
async def test_each_bad_value_is_refused_by_name_value_and_limit(processor, fields, field, text) -> None:
    error = await refused(processor, **fields)
    assert error.reason == "FIELD_INVALID"
    [violation] = error.violations
    assert violation.field == field
    assert violation.description.startswith(text)
    assert field in error.message


async def test_missing_prompt_is_named(processor) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await processor.process(GenerateRequest(), request_id="r")
    assert [violation.field for violation in caught.value.violations] == ["prompt"]


async def test_all_violations_are_reported_at_once(processor) -> None:
    error = await refused(
        processor,
        token_ids={"ids": list(range(100))},
        sampling={"topP": 7, "n": 0},
        stop={"maxTokens": 0},
        output={"logprobs": 50},
    )
    fields = {violation.field for violation in error.violations}
    assert fields == {"sampling.top_p", "sampling.n", "stop.max_tokens", "output.logprobs", "token_ids"}
    assert error.reason == "FIELD_INVALID"


async def test_limits_themselves_are_accepted(processor) -> None:
    fields = {
        "sampling": {
            "logitBias": {str(token_id): 1 for token_id in range(293)},
            "allowedTokenIds": list(range(293)),
            "badWords": ["w" * 256],
        },
        "stop": {
            "stop": ["x" * 1024],
            "stopTokenIds": [5] * 1024,
            "repetitionDetection": {"maxPatternTokens": 256, "minPatternTokens": 256, "minRepeats": 2},
        },
    }
    processed = await process(processor, **fields)
    assert len(processed.template.sampling.allowed_token_ids) == 293
    assert processed.template.repetition_detection.max_pattern_tokens == 256


async def test_only_the_first_violations_are_collected(processor) -> None:
    error = await refused(processor, sampling={"badWords": [""] * 1000}, stop={"maxTokens": 0})
    assert [violation.field for violation in error.violations] == [f"sampling.bad_words[{i}]" for i in range(16)]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (
            {"output": {"spacesBetweenSpecialTokens": False, "skipSpecialTokens": False}},
            ["output.spaces_between_special_tokens"],
        ),
        ({"structuredOutput": {"grammar": "a"}}, ["structured_output.grammar"]),
        ({"kv": {"transferParams": {"a": 1}}}, ["kv.transfer_params"]),
        ({"loraName": "x"}, ["lora_name"]),
        ({"priority": -1}, ["priority"]),
        ({"priority": 1, "loraName": "x"}, ["lora_name", "priority"]),
    ],
)
async def test_what_is_not_built_yet_is_refused_by_name(processor, fields, names) -> None:
    error = await refused(processor, **fields)
    assert error.reason == "UNSUPPORTED_FEATURE"
    assert [violation.field for violation in error.violations] == names
    assert all(name in error.message for name in names)


async def test_priority_and_class_reach_the_engine_that_serves_by_priority(processor) -> None:
    processor.facts = replace(FACTS, has_priorities=True)
    processed = await processor.process(request_of(priority=-3), request_id="r1", client_class="gold")
    message = engine_request(processed, 0, handle=7, now=1000.0)
    assert (message.priority, message.client_class) == (-3, "gold")


async def test_joined_special_tokens_change_nothing_when_they_are_skipped(processor) -> None:
    await process(processor, output={"spacesBetweenSpecialTokens": False})


async def test_unknown_model_is_not_found(processor) -> None:
    error = await refused(processor, model="other")
    assert error.reason == "MODEL_NOT_FOUND"
    assert "'other'" in error.message
    assert "'small'" in error.message
    assert (await process(processor, model="small")).model == "small"


async def test_model_defaults_apply_to_unset_fields_only(clock) -> None:
    processor = InputProcessor(byte_level_tokenizer(DEFAULTS), FACTS, clock=clock)
    defaulted = (await process(processor)).template.sampling
    assert math.isclose(defaulted.temperature, 0.6, rel_tol=1e-6)
    assert (defaulted.top_k, round(defaulted.min_p, 6)) == (20, 0.1)
    own = (await process(processor, sampling={"topK": -1, "topP": 1, "minP": 0, "repetitionPenalty": 1})).template
    assert (own.sampling.top_k, own.sampling.top_p, own.sampling.min_p) == (0, 1.0, 0.0)
    assert own.sampling.repetition_penalty == 1.0
    processor.close()


async def test_greedy_switches_the_truncations_off(clock) -> None:
    processor = InputProcessor(byte_level_tokenizer(DEFAULTS), FACTS, clock=clock)
    sampling = (await process(processor, sampling={"temperature": 0})).template.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 1.0, 0, 0.0)
    processor.close()


async def test_tiny_temperature_is_raised(processor) -> None:
    sampling = (await process(processor, sampling={"temperature": 0.001})).template.sampling
    assert math.isclose(sampling.temperature, 0.01, rel_tol=1e-6)


async def test_top_k_of_the_whole_vocabulary_is_off(processor) -> None:
    assert (await process(processor, sampling={"topK": 293})).template.sampling.top_k == 0
    assert (await process(processor, sampling={"topK": 292})).template.sampling.top_k == 292


async def test_logit_bias_is_clamped(processor) -> None:
    sampling = (await process(processor, sampling={"logitBias": {"5": 500, "3": -500}})).template.sampling
    assert list(sampling.logit_bias_token_ids) == [3, 5]
    assert list(sampling.logit_bias_values) == [-100.0, 100.0]


async def test_bad_words_come_with_and_without_leading_space(processor) -> None:
    sampling = (await process(processor, sampling={"badWords": ["stop"]})).template.sampling
    variants = [list(variant.ids) for variant in sampling.bad_words]
    assert variants == [TOKENIZER.encode("stop"), TOKENIZER.encode(" stop")]


async def test_stop_parts_go_where_they_belong(processor) -> None:
    stop = {
        "stopTokenIds": [9, 8, 9],
        "stop": ["END"],
        "ignoreEos": True,
        "includeStopInOutput": True,
        "minTokens": 2,
        "repetitionDetection": {"maxPatternTokens": 4, "minPatternTokens": 2, "minRepeats": 3},
    }
    processed = await process(processor, stop=stop)
    assert processed.stop_strings == ("END",)
    assert processed.include_stop
    assert (processed.min_tokens, processed.template.min_tokens) == (2, 2)
    assert list(processed.template.stop_token_ids) == [8, 9]
    assert processed.template.ignore_eos
    # Below min_tokens they are masked, even when they do not stop.
    assert list(processed.template.eos_token_ids) == [0]
    assert processed.template.repetition_detection.min_repeats == 3


async def test_repetition_detection_of_no_tokens_is_off(processor) -> None:
    processed = await process(processor, stop={"repetitionDetection": {"maxPatternTokens": 0, "minRepeats": 0}})
    assert not processed.template.HasField("repetition_detection")


# --- log-probabilities ---
async def test_log_probabilities_go_to_the_engine_and_stay_known(processor) -> None:
    processed = await process(processor, output={"logprobs": 3, "promptLogprobs": 0, "logprobTokenIds": [9, 7, 9]})
    output, template = processed.output, processed.template
    assert (output.num_logprobs, output.num_prompt_logprobs, output.logprob_token_ids) == (3, 0, (7, 9))
    assert (output.has_logprobs, output.logprobs_width) == (True, 6)
    assert (template.logprobs, template.prompt_logprobs, list(template.logprob_token_ids)) == (3, 0, [7, 9])
    assert template.HasField("prompt_logprobs")


async def test_without_log_probabilities_the_engine_is_asked_for_none(processor) -> None:
    processed = await process(processor)
    assert not processed.output.has_logprobs
    assert not processed.template.HasField("logprobs")
    assert not processed.template.HasField("prompt_logprobs")


async def test_the_whole_vocabulary_needs_the_operator(processor) -> None:
    processor.facts = replace(FACTS, max_logprobs=-1)
    processed = await process(processor, output={"logprobs": -1, "promptLogprobs": 293})
    assert (processed.output.num_logprobs, processed.template.logprobs) == (293, 293)
    assert processed.output.num_prompt_logprobs == 293
    processor.facts = replace(FACTS, max_logprobs=0)
    assert (await process(processor, output={"logprobs": 0})).output.num_logprobs == 0
    assert (await refused(processor, output={"logprobs": 1})).violations[0].field == "output.logprobs"


async def test_more_of_a_prompt_than_one_message_holds_is_refused(processor) -> None:
    processor.facts = ModelFacts("small", 100_000, 293, max_logprobs=20)
    fits = await process(processor, token_ids={"ids": [5] * 47_619}, output={"promptLogprobs": 20})
    assert fits.output.num_prompt_logprobs == 20
    error = await refused(processor, token_ids={"ids": [5] * 47_620}, output={"promptLogprobs": 20})
    [violation] = error.violations
    assert violation.field == "output.prompt_logprobs"
    assert violation.description == "1000020 entries for 47620 prompt tokens, at most 1000000 are allowed"


# --- lengths ---
async def test_max_tokens_defaults_to_the_room_and_is_cut_to_it(processor) -> None:
    ids = {"ids": [5] * 30}
    # 100 - 30 by the context, 80 - 30 by the KV cache.
    assert (await process(processor, token_ids=ids)).max_tokens == 50
    assert (await process(processor, token_ids=ids, stop={"maxTokens": 60})).max_tokens == 50
    assert (await process(processor, token_ids=ids, stop={"maxTokens": 7})).max_tokens == 7
    processor.facts = ModelFacts("small", 100, 293)
    assert (await process(processor, token_ids=ids)).max_tokens == 70


async def test_min_tokens_follow_a_cut_limit(processor) -> None:
    processed = await process(processor, token_ids={"ids": [5] * 70}, stop={"maxTokens": 60, "minTokens": 40})
    assert (processed.max_tokens, processed.min_tokens) == (10, 10)


async def test_prompt_larger_than_the_cache_is_left_to_the_engine(processor) -> None:
    assert (await process(processor, token_ids={"ids": [5] * 90})).max_tokens == 10


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": {"ids": [5] * 100}},
        {"token_ids": {"ids": [5] * 100_000}},
        {"text": "xyz" * 50},
        {"token_ids": {"ids": [5] * 60}, "resumeOutputTokenIds": {"ids": [5] * 40}},
        {"resumeOutputTokenIds": {"ids": [5] * 100}},
    ],
    ids=["exactly the context", "absurd", "text", "with resumed", "resumed alone"],
)
async def test_too_long_prompt_has_its_own_reason(processor, fields) -> None:
    error = await refused(processor, **fields)
    assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert "the context holds 100 tokens" in error.message


async def test_absurdly_long_text_is_refused_without_tokenizing(processor, monkeypatch) -> None:
    def fail(*_args, **_kwargs):
        raise AssertionError("tokenized")

    monkeypatch.setattr(TOKENIZER, "encode", fail)
    text = "x" * (100 * TOKENIZER.max_token_bytes + 1)
    assert (await refused(processor, text=text)).reason == "CONTEXT_LENGTH_EXCEEDED"


async def test_prompt_of_one_token_less_than_the_context_is_accepted(processor) -> None:
    processor.facts = ModelFacts("small", 100, 293)
    assert (await process(processor, token_ids={"ids": [5] * 99})).max_tokens == 1


async def test_tokens_of_a_tokenizer_larger_than_the_model_are_refused(processor) -> None:
    processor.facts = ModelFacts("small", 100, 200)
    error = await refused(processor, text="hello")
    assert error.violations[0].description.endswith("is outside 0..199")


@pytest.mark.parametrize(("keep", "num_kept"), [(3, 3), (100, 99), (-1, 99)])
async def test_truncation_keeps_the_end(processor, keep, num_kept) -> None:
    ids = [*range(2, 101)] if keep == 100 else [*range(2, 122)]
    processed = await process(processor, token_ids={"ids": ids}, truncatePromptTokens=keep)
    assert processed.prompt_token_ids == ids[-num_kept:]


async def test_truncation_looks_only_at_the_ids_it_keeps(processor) -> None:
    processed = await process(processor, token_ids={"ids": [9999] * 200 + [7, 8, 9]}, truncatePromptTokens=3)
    assert processed.prompt_token_ids == [7, 8, 9]


@pytest.mark.parametrize("keep", [1, 7, -1])
async def test_truncation_encodes_no_more_text_than_it_can_keep(processor, monkeypatch, keep) -> None:
    text = "hello world, the café 😀 " * 10_000
    whole, lengths = TOKENIZER.encode(text), []
    real = TOKENIZER.encode
    monkeypatch.setattr(TOKENIZER, "encode", lambda text, **options: lengths.append(len(text)) or real(text, **options))
    num_kept = 99 if keep == -1 else keep
    assert (await process(processor, text=text, truncatePromptTokens=keep)).prompt_token_ids == whole[-num_kept:]
    assert lengths == [num_kept * TOKENIZER.max_token_bytes]


async def test_truncation_leaves_room_for_resumed_output(processor) -> None:
    fields = {"token_ids": {"ids": [5] * 150}, "resumeOutputTokenIds": {"ids": [6] * 10}, "truncatePromptTokens": -1}
    assert len((await process(processor, **fields)).prompt_token_ids) == 89


async def test_resumed_output_goes_to_the_engine(processor) -> None:
    processed = await process(processor, resumeOutputTokenIds={"ids": [5, 6]}, stop={"maxTokens": 9})
    assert processed.resume_output_token_ids == [5, 6]
    assert token_array.unpack(processed.template.resume_output_token_ids) == [5, 6]
    assert processed.max_tokens == 9


async def test_closing_drops_no_encoding_that_somebody_waits_for(monkeypatch) -> None:
    processor, may_encode = InputProcessor(TOKENIZER, FACTS, num_threads=1), threading.Event()
    real = TOKENIZER.encode
    monkeypatch.setattr(TOKENIZER, "encode", lambda *args, **options: may_encode.wait(30) and real(*args, **options))
    waiting = [asyncio.create_task(process(processor)) for _ in range(3)]
    await asyncio.sleep(0)
    processor.close()
    may_encode.set()
    expected = real("hello")
    assert [one.prompt_token_ids for one in await asyncio.gather(*waiting)] == [expected] * 3


# --- seeds ---
async def test_given_seed_is_kept_and_children_follow_it(processor) -> None:
    processed = await process(processor, sampling={"seed": 41, "n": 3})
    assert processed.seed == 41
    assert [engine_request(processed, choice, 1, 1000.0).sampling.seed for choice in range(3)] == [41, 42, 43]


async def test_largest_seed_has_neighbours(processor) -> None:
    processed = await process(processor, sampling={"seed": str(2**63 - 1), "n": 2})
    assert engine_request(processed, 1, 1, 1000.0).sampling.seed == -(2**63)


@pytest.mark.parametrize("sampling", [{}, {"seed": "-1"}])
async def test_seed_is_drawn_when_none_is_given(processor, sampling) -> None:
    seeds = {(await process(processor, sampling=sampling)).seed for _ in range(5)}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)


# --- times ---
async def test_times_are_relative_to_the_moment_of_sending(processor, clock) -> None:
    request = request_of(queueTimeoutMs=500)
    processed = await processor.process(request, request_id="r", deadline_in_s=2.0)
    message = engine_request(processed, 0, 1, clock.now + 0.25)
    assert message.age_us == 250_000
    assert message.deadline_in_us == 1_700_000
    assert message.queue_deadline_in_us == 250_000


async def test_no_time_limit_is_zero_and_a_passed_one_is_not(processor, clock) -> None:
    assert engine_request(await process(processor), 0, 1, clock.now).deadline_in_us == 0
    processed = await processor.process(request_of(queueTimeoutMs=1), request_id="r", deadline_in_s=1)
    late = engine_request(processed, 0, 1, clock.now + 60)
    assert (late.deadline_in_us, late.queue_deadline_in_us) == (1, 1)


async def test_deadline_inside_the_margin_has_passed(processor) -> None:
    with pytest.raises(StepwireError) as caught:
        await processor.process(request_of(), request_id="r", deadline_in_s=0.04)
    assert caught.value.reason == "DEADLINE"


# --- output ---
async def test_output_options_are_resolved(processor) -> None:
    output = {"text": False, "tokenIds": True, "skipSpecialTokens": False, "minChunkTokens": 4, "maxChunkDelayMs": 250}
    settings = (await process(processor, output={**output, "timings": True})).output
    assert not settings.text
    assert settings.token_ids
    assert not settings.skip_special_tokens
    assert (settings.min_chunk_tokens, settings.max_chunk_delay_s) == (4, 0.25)
    assert settings.timings


async def test_echo_has_the_text_as_given_or_decoded(processor) -> None:
    echo = {"output": {"echoPrompt": True}}
    assert (await process(processor, text="hello <|end|> x", **echo)).prompt_text == "hello <|end|> x"
    ids = TOKENIZER.encode("hello world")
    assert (await process(processor, token_ids={"ids": ids}, **echo)).prompt_text == "hello world"
    assert (await process(processor, text="hello world", truncatePromptTokens=1, **echo)).prompt_text == " world"


async def test_cache_options_are_passed_on(processor) -> None:
    template = (await process(processor, kv={"cacheSalt": "tenant", "bypassPrefixCache": True})).template
    assert template.cache_salt == "tenant"
    assert template.bypass_prefix_cache


async def test_errors_never_hold_the_prompt(processor) -> None:
    error = await refused(processor, text="confidential " * 40, sampling={"topP": 9})
    assert "confidential" not in error.message


async def test_choices_that_are_too_large_together_are_refused_with_the_limit(processor) -> None:
    token_ids = list(range(FACTS.vocab_size))
    sampling = {"allowedTokenIds": token_ids, "temperature": 1}
    small = await process(processor, sampling={**sampling, "n": 2})
    size = small.size_for_engine()
    message = engine_request(small, 1, 2**64 - 1, 1000.0)
    frame = engine_core_pb2.AddRequests(requests=[message])
    assert len(frame.SerializeToString()) <= size

    too_many = MAX_ENGINE_BYTES // size + 1
    many = replace(small, num_choices=too_many)
    with pytest.raises(InvalidRequestError) as caught:
        many.size_for_engine()
    assert [violation.field for violation in caught.value.violations] == ["sampling.n"]
    for said in (str(MAX_ENGINE_BYTES), "sampling.allowed_token_ids", "sampling.logit_bias", "sampling.bad_words"):
        assert said in caught.value.message
    assert replace(small, num_choices=too_many - 1).size_for_engine() == size


@pytest.mark.parametrize(
    "constraint",
    [
        {"jsonSchema": '{"type": "object"}'},
        {"jsonSchema": "true"},
        {"jsonObject": {}},
        {"regex": "a+"},
        {"choice": {"choices": ["yes", "no"]}},
        {"structuralTag": "{}"},
    ],
)
async def test_a_constraint_reaches_the_engine_as_it_is(processor, constraint) -> None:
    request = request_of(structuredOutput=constraint)
    processed = await processor.process(request, request_id="r")
    assert engine_request(processed, 0, 1, 1000.0).structured_output == request.structured_output


async def test_without_a_constraint_the_engine_gets_none(processor) -> None:
    assert not engine_request(await process(processor), 0, 1, 1000.0).HasField("structured_output")


# --- without an event loop ---
@pytest.mark.parametrize(
    "fields",
    [
        {"text": "hello world", "sampling": {"badWords": ["the"], "seed": 3}},
        {"token_ids": {"ids": [5, 6, 7]}, "sampling": {"seed": 3}},
        {"text": "hello world", "truncatePromptTokens": 1, "output": {"echoPrompt": True}, "sampling": {"seed": 3}},
        {"token_ids": {"ids": [5, 6]}, "output": {"echoPrompt": True}, "sampling": {"seed": 3}},
    ],
)
async def test_without_a_loop_the_result_is_the_same_and_no_thread_is_used(processor, fields) -> None:
    before = set(threading.enumerate())
    now = processor.process_now(request_of(**fields), request_id="r1")
    # One of an earlier test may end meanwhile.
    assert set(threading.enumerate()) <= before
    assert now == await process(processor, **fields)


async def test_a_long_text_is_encoded_in_a_thread_and_nothing_else_is(processor, monkeypatch) -> None:
    threads: list[threading.Thread] = []
    real = TOKENIZER.encode

    def encode(*args, **options):
        threads.append(threading.current_thread())
        return real(*args, **options)

    monkeypatch.setattr(TOKENIZER, "encode", encode)
    await process(processor, text="hello")
    processor.process_now(request_of(text="hello"), request_id="r1")
    assert threads[0] is not threading.current_thread()
    assert threads[1] is threading.current_thread()


async def test_once_another_model_has_come_what_needs_the_tokenizer_is_to_be_sent_again():
    processor = InputProcessor(TOKENIZER, FACTS)
    processor.close()
    with pytest.raises(UnavailableError, match="another model") as caught:
        await process(processor)
    assert caught.value.retry_after_ms > 0
