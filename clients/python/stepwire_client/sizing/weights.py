"""How many weights a model has, whole and on one of several workers. Pure."""

from __future__ import annotations

from stepwire_client.sizing.model_shape import ModelShape, SizingError

_QK_NORMS = frozenset({"qwen3", "qwen3_moe", "gemma3_text"})
_FOUR_NORMS = frozenset({"gemma2", "gemma3_text"})
# Experts are matrices of another kind, which are not cut.
_WHOLE = frozenset({"mixtral", "qwen3_moe", "gpt_oss", "phi3"})


def num_weights(shape: ModelShape) -> int:
    """All parameters of the model."""
    return _uncut(shape) + shape.num_layers * _attention_matrices(shape) + _all_feed_forward(shape)


def num_weights_of_worker(shape: ModelShape, tensor_parallel_size: int) -> int:
    """Those on the first of so many workers, which holds the biases of all rows. Raises SizingError."""
    if tensor_parallel_size == 1:
        return num_weights(shape)
    if shape.family in _WHOLE:
        raise SizingError(f"--tensor-parallel-size: models of family {shape.family} can not be cut")
    for name, count in (
        ("num_attention_heads", shape.num_heads),
        ("num_key_value_heads", shape.num_kv_heads),
        ("intermediate_size", shape.intermediate_size),
    ):
        if count % tensor_parallel_size:
            raise SizingError(f"--tensor-parallel-size: {tensor_parallel_size} does not divide {name}, {count}")
    cut = shape.num_layers * _attention_matrices(shape) + _all_feed_forward(shape)
    # Biases of outputs that are added up stay whole on the first worker.
    whole = shape.num_layers * (_has_output_bias(shape) + _has_mlp_bias(shape)) * shape.hidden_size
    return _uncut(shape) + (cut - whole) // tensor_parallel_size + whole


def _uncut(shape: ModelShape) -> int:
    """Embeddings and norms."""
    per_layer = (4 if shape.family in _FOUR_NORMS else 2) * shape.hidden_size
    if shape.family in _QK_NORMS:
        per_layer += 2 * shape.head_dim
    embeddings = (1 if shape.is_tied else 2) * shape.vocab_size * shape.hidden_size
    return embeddings + shape.num_layers * per_layer + shape.hidden_size


def _attention_matrices(shape: ModelShape) -> int:
    """Of one layer, with biases."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    total = shape.hidden_size * (2 * queries + 2 * keys)
    if _has_output_bias(shape) or shape.family == "qwen2":
        total += queries + 2 * keys
    if _has_output_bias(shape):
        total += shape.hidden_size
    # One sink a head.
    return total + (shape.num_heads if shape.family == "gpt_oss" else 0)


def _has_output_bias(shape: ModelShape) -> bool:
    if shape.family in ("mistral", "mixtral", "qwen2", "phi3"):
        return False
    return bool(shape.raw.get("attention_bias", shape.family == "gpt_oss"))


def _has_mlp_bias(shape: ModelShape) -> bool:
    return shape.family in ("llama", "smollm3") and bool(shape.raw.get("mlp_bias"))


def _all_feed_forward(shape: ModelShape) -> int:
    """Of all layers."""
    return sum(_experts(shape) if _has_experts(shape, i) else _dense(shape) for i in range(shape.num_layers))


def _dense(shape: ModelShape) -> int:
    biases = 2 * shape.intermediate_size + shape.hidden_size if _has_mlp_bias(shape) else 0
    return 3 * shape.hidden_size * shape.intermediate_size + biases


def _has_experts(shape: ModelShape, layer: int) -> bool:
    if shape.family == "qwen3_moe":
        step = int(shape.raw.get("decoder_sparse_step", 1))
        return layer not in (shape.raw.get("mlp_only_layers") or ()) and (layer + 1) % step == 0
    return shape.family in ("mixtral", "gpt_oss")


def _experts(shape: ModelShape) -> int:
    """All experts of one layer, and what chooses among them."""
    name = "num_local_experts" if "num_local_experts" in shape.raw else "num_experts"
    num_experts, inner = shape.raw.get(name), shape.intermediate_size
    if shape.family == "qwen3_moe":
        inner = shape.raw.get("moe_intermediate_size", 0)
    if type(num_experts) is not int or type(inner) is not int or num_experts < 1 or inner < 1:
        raise SizingError("num_local_experts, num_experts, moe_intermediate_size: a mixture of experts needs them")
    total = num_experts * (3 * shape.hidden_size * inner + shape.hidden_size)
    if shape.family == "gpt_oss":
        total += num_experts * (2 * inner + shape.hidden_size + 1)
    return total
