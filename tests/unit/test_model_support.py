"""Which models are refused, before their weights are read or right after."""

from __future__ import annotations

import pytest
import transformers

from engine_core.model_executor.attention.core import AttentionOptions
from engine_core.model_executor.attention.kv_cache import LayerSpec
from engine_core.model_executor.attention.layer_probe import LayerProbe
from engine_core.model_executor.models.support import context_limit, require_probed, require_supported
from engine_core.model_executor.startup_error import StartupError
from fakes.tiny_models import tiny_configs


@pytest.mark.parametrize("config", tiny_configs().values(), ids=tiny_configs())
def test_supported(config):
    require_supported("m", config)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.T5Config(), "encoder-decoder"),
        (transformers.ViTConfig(), "not a causal language model"),
        (transformers.MambaConfig(), "state other than attention's"),
        (transformers.BloomConfig(), "attention can not be replaced"),
        (transformers.GemmaConfig(use_bidirectional_attention=True), "not causal"),
        (transformers.MistralConfig(is_causal=False, sliding_window=8), "not causal and has a sliding window"),
        (transformers.Qwen3NextConfig(), "layers of type linear_attention|state other"),
        (transformers.Llama4TextConfig(), "chunked_attention"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_refused(config, reason):
    with pytest.raises(StartupError, match=rf"--model m: architecture {config.model_type} is not .*({reason})"):
        require_supported("m", config)


def probe_of(num_layers: int, sliding_window: int | None = None) -> LayerProbe:
    options = AttentionOptions(scale=1.0, sliding_window=sliding_window)
    return LayerProbe(
        specs={i: LayerSpec(1, 1, 1) for i in range(num_layers)}, options=dict.fromkeys(range(num_layers), options)
    )


def test_every_layer_must_use_attention():
    config = tiny_configs()["llama"]
    require_probed("m", config, probe_of(3), range(3))
    with pytest.raises(StartupError, match="2 of its 3 layers"):
        require_probed("m", config, probe_of(2), range(3))


def test_a_window_that_does_not_reach_attention_is_refused():
    config = tiny_configs()["mistral"]
    require_probed("m", config, probe_of(3, sliding_window=6), range(3))
    with pytest.raises(StartupError, match="layer 0 does not hand its sliding window"):
        require_probed("m", config, probe_of(3), range(3))


def test_context_limit_ends_where_frequencies_would_depend_on_the_batch():
    plain = transformers.LlamaConfig(max_position_embeddings=4096)
    assert context_limit(plain) == 4096
    scaled = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled["original_max_position_embeddings"] = 1024
    assert context_limit(transformers.LlamaConfig(max_position_embeddings=4096, rope_parameters=scaled)) == 4096
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    long = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
    assert context_limit(transformers.LlamaConfig(max_position_embeddings=4096, rope_parameters=long | factors)) == 1024
