"""The servicer for gateways: whether it is served, and what of their requests becomes of ours."""

from __future__ import annotations

import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb

from frontend import config
from frontend.api.compat.generate_request import to_generate_request
from frontend.config import FrontendSettings


def translated(**sampling: object):
    given = pb.SamplingParams(**sampling)
    return to_generate_request(pb.GenerateRequest(text="hello", sampling_params=given))


@pytest.mark.parametrize(("flag", "is_served"), [("auto", True), ("on", True), ("off", False)])
def test_it_is_served_where_its_package_is(flag: str, is_served: bool):
    assert FrontendSettings(vllm_compat=flag).serves_vllm_compat is is_served


def test_without_the_package_it_is_left_out_unless_it_must_be_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    assert not FrontendSettings().serves_vllm_compat
    with pytest.raises(ValueError, match=r"stepwire\[compat\]"):
        FrontendSettings(vllm_compat="on")


def test_unset_optionals_stay_unset():
    request = translated()
    assert not request.sampling.HasField("temperature")
    assert not request.sampling.HasField("seed")
    assert not request.stop.HasField("max_tokens")
    assert not request.HasField("truncate_prompt_tokens")
    assert not request.output.HasField("logprobs")
    assert not request.HasField("structured_output")


def test_text_is_made_for_stop_strings_alone():
    assert not translated().output.text
    with_stop = translated(stop=["end"], skip_special_tokens=True)
    assert with_stop.output.text
    assert with_stop.output.skip_special_tokens
    assert list(with_stop.stop.stop) == ["end"]


@pytest.mark.parametrize("kind", ["json_schema", "regex", "grammar", "structural_tag"])
def test_constraints_of_text_keep_their_kind(kind: str):
    assert getattr(translated(**{kind: "x"}).structured_output, kind) == "x"


def test_other_constraints():
    choice = translated(choice=pb.ChoiceConstraint(choices=["a", "b"]))
    assert list(choice.structured_output.choice.choices) == ["a", "b"]
    assert translated(json_object=True).structured_output.HasField("json_object")
    assert not translated(json_object=False).HasField("structured_output")


def test_every_other_field_arrives():
    request = translated(
        min_tokens=2, ignore_eos=True, presence_penalty=0.5, frequency_penalty=0.25, min_p=0.125, logit_bias={3: 2.0}
    )
    assert (request.stop.min_tokens, request.stop.ignore_eos) == (2, True)
    sampling = request.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.min_p) == (0.5, 0.25, 0.125)
    assert dict(sampling.logit_bias) == {3: 2.0}
    assert translated(truncate_prompt_tokens=-1).truncate_prompt_tokens == -1
    assert translated(top_k=2**32 - 1).sampling.top_k == 2**31 - 1
