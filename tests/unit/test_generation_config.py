"""Model files that say how to generate: what is taken, what is refused, and with which words."""

from __future__ import annotations

import json

import pytest

from frontend.generation_config import GenerationDefaults, read_defaults, read_eos_token_ids, read_json


def write(tmp_path, **config: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))


def test_no_file_means_neutral_defaults(tmp_path) -> None:
    assert read_defaults(tmp_path) == GenerationDefaults()


def test_values_are_taken_and_others_ignored(tmp_path) -> None:
    write(tmp_path, temperature=0, top_p=0.9, top_k=-1, min_p=None, repetition_penalty=1.1, do_sample=True, _x="y")
    assert read_defaults(tmp_path) == GenerationDefaults(temperature=0.0, top_p=0.9, repetition_penalty=1.1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 3),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_k", 1.5),
        ("top_k", True),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("nan")),
    ],
)
def test_a_bad_default_is_an_error_that_names_file_and_value(tmp_path, name, value) -> None:
    write(tmp_path, **{name: value})
    with pytest.raises(ValueError, match=rf"generation_config\.json: {name} is"):
        read_defaults(tmp_path)


@pytest.mark.parametrize("content", ["not json", "[1]"])
def test_a_file_that_is_no_object_is_an_error(tmp_path, content) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        read_json(path)


def test_eos_ids_of_all_files_are_joined(tmp_path) -> None:
    write(tmp_path, eos_token_id=[2, 9])
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 4}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert read_eos_token_ids(tmp_path, {"</s>": 1}.get) == (1, 2, 4, 9)


def test_unknown_eos_text_and_null_ids_are_no_ids(tmp_path) -> None:
    write(tmp_path, eos_token_id=None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<gone>"}))
    assert read_eos_token_ids(tmp_path, {"</s>": 1}.get) == ()
