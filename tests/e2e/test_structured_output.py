"""Structured output of the real model through both services: whatever ends by itself parses and validates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from core_driver import CoreDriver
from engine_core.scheduler.grammar import GRAMMAR_KINDS, GrammarSpec
from engine_core.scheduler.output import FinishReason
from engine_core.scheduler.request import SamplingParams
from running_stack import SERVING, Frontend, Service, running_stack
from stepwire.v1 import common_pb2, model_service_pb2
from stepwire.v1.generation_service_pb2 import GenerateRequest

pytestmark = pytest.mark.slow

TIMEOUT_S = 280.0
REPEATS = 2

NAME = {"type": "string", "maxLength": 12}
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {"type": "object", "properties": {"name": NAME, "age": {"type": "integer"}}, "required": ["name", "age"]},
    "nested": {
        "type": "object",
        "properties": {
            "person": {
                "type": "object",
                "properties": {"name": NAME, "home": {"type": "object", "properties": {"city": NAME}}},
                "required": ["name", "home"],
            }
        },
        "required": ["person"],
    },
    "array": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 4},
    "array of objects": {
        "type": "array",
        "items": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]},
        "minItems": 1,
        "maxItems": 2,
    },
    "enum": {"enum": ["red", "grün", "青", 7, None, {"deep": ["est"]}]},
    "unicode": {
        "type": "object",
        "properties": {"größe": {"enum": ["klein", "groß"]}, "名前": NAME, "😀": {"type": "boolean"}},
        "required": ["größe", "名前", "😀"],
        "additionalProperties": False,
    },
    "numbers": {
        "type": "object",
        "properties": {
            "percent": {"type": "integer", "minimum": 0, "maximum": 100},
            "ratio": {"type": "number", "minimum": -1, "maximum": 1},
            "even": {"type": "integer", "multipleOf": 2, "minimum": 10, "maximum": 98},
        },
        "required": ["percent", "ratio", "even"],
    },
    "union": {"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string", "pattern": "^[a-z]{2,5}$"}]},
    "references": {
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        "required": ["from", "to"],
        "$defs": {
            "point": {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "integer"}],
                "items": False,
                "minItems": 2,
            }
        },
    },
    "dates": {
        "type": "object",
        "properties": {"on": {"type": "string", "format": "date"}, "ok": {"const": True}},
        "required": ["on", "ok"],
    },
}
BROKEN = [
    '{"type": "banana"}',
    '{"$ref": "#/nowhere"}',
    '{"enum": []}',
    '{"not": {}}',
    '{"type": "string", "pattern": "("}',
]


def prompt_for(name: str) -> str:
    return f"<|im_start|>user\nShort example of JSON: {name}<|im_end|>\n<|im_start|>assistant\n"


def request_for(name: str, seed: int | None, constraint: common_pb2.StructuredOutput) -> GenerateRequest:
    """Greedy without a seed."""
    sampling = {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed}
    return GenerateRequest(
        text=prompt_for(name),
        sampling=common_pb2.SamplingParams(**sampling),  # type: ignore[arg-type]
        stop=common_pb2.StopConditions(max_tokens=120),
        output=common_pb2.OutputOptions(token_ids=True),
        structured_output=constraint,
    )


def reason_of(error: grpc.RpcError) -> str:
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert any(detail.Unpack(info) for detail in status.details)
    return str(info.reason)


def of_schema(schema: object) -> common_pb2.StructuredOutput:
    return common_pb2.StructuredOutput(json_schema=json.dumps(schema, ensure_ascii=False))


@pytest.fixture(scope="module")
def stack(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Frontend]]:
    with running_stack(embedded_model_dir, tmp_path_factory.mktemp("cache")) as stack:
        engine = stack.engine("--max-num-seqs", "16")
        frontend = stack.frontend(engine)
        frontend.wait_for_health(SERVING)
        yield engine, frontend


@pytest.mark.regression(10)
def test_answers_under_load_parse_and_validate_and_broken_schemas_harm_nobody(stack: tuple[Service, Frontend]) -> None:
    _, frontend = stack
    jobs = [(name, of_schema(schema), repeat or None) for name, schema in SCHEMAS.items() for repeat in range(REPEATS)]
    broken = [common_pb2.StructuredOutput(json_schema=text) for text in BROKEN]

    def run(job: tuple[str, common_pb2.StructuredOutput, int | None]) -> tuple[str, str] | None:
        name, constraint, seed = job
        answer = frontend.generation.Generate(request_for(name, seed, constraint), timeout=TIMEOUT_S)
        completion = answer.completions[0]
        return (name, completion.text) if completion.reason == common_pb2.FINISH_REASON_STOP else None

    def refuse(constraint: common_pb2.StructuredOutput) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as caught:
            frontend.generation.Generate(request_for("broken", None, constraint), timeout=TIMEOUT_S)
        return caught.value.code(), reason_of(caught.value)

    with ThreadPoolExecutor(32) as executor:
        refusals = executor.map(refuse, broken)
        answers = [answer for answer in executor.map(run, jobs) if answer is not None]
        assert set(refusals) == {(grpc.StatusCode.INVALID_ARGUMENT, "GRAMMAR_INVALID")}
    for name, text in answers:
        jsonschema.validate(json.loads(text), SCHEMAS[name])
    # Some may run into max_tokens; most have to end by themselves, or this test says nothing.
    assert len(answers) >= len(jobs) * 3 // 4
    assert len({name for name, _ in answers}) >= len(SCHEMAS) - 1


def test_every_kind_is_served_and_named_in_the_capabilities(stack: tuple[Service, Frontend]) -> None:
    _, frontend = stack
    model = frontend.models.ListModels(model_service_pb2.ListModelsRequest()).models[0]
    assert set(model.capabilities.structured_output_kinds) == set(GRAMMAR_KINDS)
    tag = {
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "x{1,3}"}, "end": "</a>"},
    }
    choices = common_pb2.StructuredOutput.Choice(choices=["yes", "no", "vielleicht größer"])
    constraints = {
        "[ab]{3}-\\d": common_pb2.StructuredOutput(regex="[ab]{3}-\\d"),
        "yes|no|vielleicht größer": common_pb2.StructuredOutput(choice=choices),
        r"\(*x\)*": common_pb2.StructuredOutput(grammar='root ::= "(" root ")" | "x"'),
        "<a>x{1,3}</a>": common_pb2.StructuredOutput(structural_tag=json.dumps(tag)),
        r"(?s)\{.*\}": common_pb2.StructuredOutput(json_object=common_pb2.StructuredOutput.JsonObject()),
    }
    for pattern, constraint in constraints.items():
        # A seed whose free JSON ends soon: one answer in eight is longer than the limit.
        completion = frontend.generation.Generate(request_for("any", 4, constraint), timeout=TIMEOUT_S).completions[0]
        assert completion.reason == common_pb2.FINISH_REASON_STOP
        assert re.fullmatch(pattern, completion.text), completion.text


def test_a_resumed_answer_goes_on_within_its_schema(stack: tuple[Service, Frontend]) -> None:
    _, frontend = stack
    request = request_for("numbers", 7, of_schema(SCHEMAS["numbers"]))
    whole = list(frontend.generation.Generate(request, timeout=TIMEOUT_S).completions[0].token_ids)
    request.resume_output_token_ids.ids.extend(whole[:9])
    rest = list(frontend.generation.Generate(request, timeout=TIMEOUT_S).completions[0].token_ids)
    assert whole[:9] + rest == whole


def test_preemption_in_a_tiny_cache_changes_no_answer(embedded_model_dir: Path) -> None:
    specs = {name: GrammarSpec("json_schema", json.dumps(SCHEMAS[name])) for name in ("flat", "numbers", "unicode")}
    # Chat markers are special tokens; any ids will do as a prompt.
    prompts = {name: list(range(1000 + 50 * number, 1040 + 50 * number)) for number, name in enumerate(specs)}

    def run(**settings: object) -> tuple[dict[str, list[int]], int]:
        driver = CoreDriver(embedded_model_dir, **settings)
        keys = {
            name: driver.add(prompts[name], 60, grammar_spec=spec, eos_token_ids=frozenset({2}))
            for name, spec in specs.items()
        }
        driver.run()
        assert set(driver.finishes.values()) <= {FinishReason.STOP, FinishReason.LENGTH}
        num_preemptions = driver.core.scheduler.stats().num_preemptions
        driver.core.shutdown()
        return {name: driver.tokens[key] for name, key in keys.items()}, num_preemptions

    expected, _ = run(num_blocks=400)
    tokens, num_preemptions = run(num_blocks=13)
    assert num_preemptions > 0
    assert tokens == expected


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9}, {"top_k": 50}], ids=str)
def test_allowed_ids_outside_the_grammar_end_that_request_alone(
    embedded_model_dir: Path, truncation: dict[str, Any]
) -> None:
    driver = CoreDriver(embedded_model_dir, num_blocks=64)
    prompt, digits = range(1000, 1020), GrammarSpec("regex", "[0-9]{3}")
    # Among special tokens there is no digit.
    nothing_left = SamplingParams(temperature=1.0, allowed_token_ids=(3, 4), seed=1, **truncation)
    refused = driver.add(prompt, 8, nothing_left, grammar_spec=digits, eos_token_ids=frozenset({2}))
    beside = driver.add(prompt, 8, SamplingParams(temperature=1.0, seed=2, **truncation))
    driver.run()
    driver.core.shutdown()
    assert driver.finishes == {refused: FinishReason.ERROR, beside: FinishReason.LENGTH}
    assert (len(driver.tokens[refused]), len(driver.tokens[beside])) == (0, 8)
