"""The tokenizer with the files of the embedded model, and its detokenizer over random ids; texts: test_every_script."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.detokenizer import Detokenizer
from frontend.tokenizer import Tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer(embedded_model_dir) -> Tokenizer:
    return Tokenizer.from_directory(embedded_model_dir)


def test_facts_of_the_model_directory(tokenizer) -> None:
    assert tokenizer.max_token_id == 49151
    assert tokenizer.eos_token_ids == tuple(tokenizer.encode("<|im_end|>"))
    assert tokenizer.special_token_ids.issuperset(tokenizer.eos_token_ids)


def pieces_of(tokenizer, prompt, output) -> str:
    detokenizer = Detokenizer(tokenizer, prompt)
    return "".join(map(detokenizer.step, output)) + detokenizer.flush()


@given(ids=st.lists(st.integers(0, 49151), max_size=60))
@settings(deadline=None)
def test_any_stream_equals_a_full_decode(tokenizer, ids) -> None:
    assert pieces_of(tokenizer, [], ids) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 49151), max_size=60))
@settings(deadline=None)
def test_bytes_of_tokens_join_to_what_a_full_decode_says(tokenizer, ids) -> None:
    joined = b"".join(map(tokenizer.token_bytes, ids))
    assert joined.decode("utf-8", "replace") == tokenizer.decode(ids, skip_special_tokens=False)


def test_every_token_of_the_vocabulary_has_bytes(tokenizer) -> None:
    for token_id in range(tokenizer.max_token_id + 1):
        text = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        assert text == tokenizer.decode([token_id], skip_special_tokens=False)
