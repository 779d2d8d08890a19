"""A .gguf file as an ordinary fp32 Hugging Face directory: weights, config, tokenizer, chat template.

Used by the thread that starts the engine. Done once, because reading a GGUF takes ten times as long as reading
safetensors, and because both services then see the same plain files. The only place of the engine where tokenizer code
runs: it writes the tokenizer's files and encodes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from pathlib import Path
from typing import Any

from engine_core.model_executor.model_cache import Progress, make_once
from engine_core.model_executor.startup_error import StartupError

# Changes with whatever changes the files written; old directories are then left alone and not used.
_CONVERSION = 1

# `tokenizer.ggml.pre` values that split every digit from its neighbours, which transformers does not know of.
_SPLITS_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
_DIGITS_AND_BYTE_LEVEL: dict[str, Any] = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
# Facts of the file or of the loading, not of the model.
_LOADING_KEYS = ("quantization_config", "_name_or_path", "transformers_version", "dtype", "architectures")


def prepare_gguf_model(gguf: Path, models_dir: Path, progress: Progress) -> Path:
    """The converted file under `models_dir`, made on first use; a changed file is converted again."""
    if not gguf.is_file():
        raise StartupError(f"--model {gguf}: no such file")
    stat = gguf.stat()
    identity = f"{_CONVERSION} {gguf.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return make_once(models_dir / f"{gguf.stem}-{key}", lambda staging: convert_gguf(gguf, staging, progress), progress)


def convert_gguf(gguf: Path, directory: Path, progress: Progress) -> None:
    """Write the model of `gguf` into `directory`. Raises StartupError when transformers can not read the file."""
    # Imported here: a start that finds its model converted must not pay seconds for it.
    from gguf import GGUFReader

    progress(f"converting {gguf.name}, once (about half a minute for a small model)")
    try:
        reader = GGUFReader(gguf)
        _require_plain_rope(gguf, reader)
        # The readers draw their own bars; what goes wrong they raise.
        with contextlib.redirect_stderr(io.StringIO()):
            config = _save_model(gguf, directory)
            _save_tokenizer(gguf, directory, config)
        if _text_field(reader, "tokenizer.ggml.pre") in _SPLITS_DIGITS:
            _split_digits(directory / "tokenizer.json")
    except (OSError, StartupError):
        raise
    except Exception as error:
        # Whatever a foreign file makes the readers raise, the operator needs the flag and the file.
        raise StartupError(f"--model {gguf}: can not be converted ({type(error).__name__}: {error})") from error


def _save_model(gguf: Path, directory: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model read from GGUF keeps a quantization config and refuses to be saved; a fresh one of its class does not.
    settings = {key: value for key, value in loaded.config.to_dict().items() if key not in _LOADING_KEYS}
    plain = type(loaded)(type(loaded.config)(**settings)).to(torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    _require_equal_logits(loaded.eval(), plain.eval())
    plain.save_pretrained(directory)
    return plain.config


def _require_equal_logits(loaded: Any, plain: Any) -> None:
    """A config key lost on the way (rope, norms, head size) shows here and nowhere else."""
    import torch

    token_ids = torch.arange(min(16, plain.config.vocab_size))[None]
    with torch.inference_mode():
        difference = (plain(token_ids).logits - loaded(token_ids).logits).abs().max().item()
    if not difference < 1e-3:
        raise StartupError(f"the converted model differs from its GGUF file: logits by {difference}")


def _save_tokenizer(gguf: Path, directory: Path, config: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(directory)


def _split_digits(path: Path) -> None:
    content = json.loads(path.read_text("utf-8"))
    content["pre_tokenizer"] = _DIGITS_AND_BYTE_LEVEL
    path.write_text(json.dumps(content, ensure_ascii=False), "utf-8")


def _require_plain_rope(gguf: Path, reader: Any) -> None:
    """transformers drops this tensor without a word, and long contexts would then come out wrong."""
    if any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        raise StartupError(
            f"--model {gguf}: its scaled rotary frequencies can not be converted; use the model's safetensors version"
        )


def _text_field(reader: Any, key: str) -> str:
    field = reader.get_field(key)
    return str(field.contents()) if field else ""
