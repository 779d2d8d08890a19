"""Weights and config of a local model directory as a transformers module that uses stepwire's attention.

Owner: the thread that starts the engine. Refuses before it loads: an architecture stepwire can not run, or memory that
does not suffice, is one sentence and not a crash minutes later.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from engine_core.config import EngineSettings
from engine_core.model_executor.attention import transformers_interface
from engine_core.model_executor.checkpoint import CheckpointError, checkpoint_files, num_parameters, read_headers
from engine_core.model_executor.host_memory import available_bytes, format_gib
from engine_core.model_executor.model_cache import Progress
from engine_core.model_executor.models.support import require_supported
from engine_core.model_executor.parallel.pipeline_parallel import keep_stage, require_stages
from engine_core.model_executor.parallel.place import Place
from engine_core.model_executor.parallel.tensor_parallel import require_shardable, shard
from engine_core.model_executor.parallel.worker_group import WorkerGroup
from engine_core.model_executor.startup_error import StartupError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class LoadedModel:
    """A model ready to run, in eval mode, or one worker's part of it. `config` is that of the whole text model."""

    module: torch.nn.Module
    config: Any
    dtype: torch.dtype
    device: torch.device
    # Those that are here.
    layers: range
    # Of the parameters as they were loaded.
    weight_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.weight_bytes = sum(parameter.nbytes for parameter in self.module.parameters())


def load_model(
    settings: EngineSettings, path: Path, progress: Progress, group: WorkerGroup | None = None
) -> LoadedModel:
    """Load the model in `path`, or this worker's part of it. Raises StartupError."""
    device = choose_device(settings) if group is None else group.device
    config = _read_config(settings, path)
    require_supported(settings.model, config)
    text_config = config.get_text_config()
    require_shardable(settings.model, text_config, settings.tensor_parallel_size)
    require_stages(settings.model, text_config, settings.pipeline_parallel_size)
    dtype = _choose_dtype(settings, config, device)
    name = f"--model {settings.model}"
    num_workers = settings.tensor_parallel_size * settings.pipeline_parallel_size
    _require_memory(name, path, dtype, device, num_workers)
    progress(f"loading {settings.model} in {str(dtype).removeprefix('torch.')} on {device}")
    if group is None:
        module = _load_module(name, path, config, dtype, device)
        layers = range(text_config.num_hidden_layers)
    else:
        # No worker looks how much memory is free while another one takes some.
        group.wait_for_all()
        # Cut before it is on the device, which need not hold more than the part.
        module = _load_module(name, path, config, dtype, torch.device("cpu"))
        keep_stage(module, group)
        shard(module, text_config, group)
        module.to(device)
        layers = group.place.layers(text_config.num_hidden_layers)
    if device.type == "cpu":
        _copy_out_of_files(module)
    return LoadedModel(module.eval(), text_config, dtype, device, layers)


def load_again(running: LoadedModel, path: Path, device: torch.device) -> torch.nn.Module:
    """Another module like the running one, with the weights in `path`. Raises StartupError.

    The configuration is the running model's: whatever lies in `path`, only its weights count.
    """
    config: Any = running.module.config
    _require_memory(str(path), path, running.dtype, device)
    # A copy, because loading writes to it.
    return _load_module(str(path), path, copy.deepcopy(config), running.dtype, device)


def choose_device(settings: EngineSettings, place: Place | None = None) -> torch.device:
    """The device of this process, or of the worker in this place. Raises StartupError."""
    has_cuda = torch.cuda.is_available()
    if settings.device == "cuda" and not has_cuda:
        raise StartupError("--device cuda: torch sees no CUDA device")
    if not has_cuda or settings.device == "cpu":
        return torch.device("cpu")
    if place is None:
        return torch.device("cuda")
    if torch.cuda.device_count() < place.num_workers:
        raise StartupError(
            f"--tensor-parallel-size {place.tensor_parallel_size} with --pipeline-parallel-size "
            f"{place.pipeline_parallel_size} needs {place.num_workers} CUDA devices; torch sees "
            f"{torch.cuda.device_count()}"
        )
    return torch.device("cuda", place.rank)


def _choose_dtype(settings: EngineSettings, config: Any, device: torch.device) -> torch.dtype:
    if settings.dtype != "auto":
        return _DTYPES[settings.dtype]
    own = config.get_text_config().dtype or config.dtype
    # Few CPUs are faster in 16 bits than in 32, and all are more exact in 32.
    return own if device.type == "cuda" and own in _DTYPES.values() else torch.float32


def _read_config(settings: EngineSettings, path: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise StartupError(f"--model {settings.model}: config.json can not be used ({_first_line(error)})") from error


def _load_module(name: str, path: Path, config: Any, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    transformers_interface.register()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers' own
    # What comes back depends on the arguments, and transformers' annotation does not say so.
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained
    # Without one it wants a file of that, or of the config, beside the weights. Nothing here uses it.
    generation_config = GenerationConfig()  # type: ignore[no-untyped-call]  # transformers' own
    try:
        module, report = from_pretrained(
            path,
            config=config,
            dtype=dtype,
            device_map=str(device),
            attn_implementation=transformers_interface.NAME,
            local_files_only=True,
            # Never pickles, which run code.
            use_safetensors=True,
            generation_config=generation_config,
            output_loading_info=True,
        )
    except Exception as error:
        # Corrupt files, missing quantisation packages, shapes that differ: all are this model's fault.
        raise StartupError(f"{name}: can not be loaded ({_first_line(error)})") from error
    if report["missing_keys"]:
        # transformers fills them with random numbers and goes on.
        example = min(report["missing_keys"])
        raise StartupError(f"{name}: the checkpoint lacks weights, {example} among them")
    loaded: torch.nn.Module = module
    return loaded


def _copy_out_of_files(module: torch.nn.Module) -> None:
    """What is loaded to a CPU in its own type is a mapping of the file: whoever overwrites that ends the engine."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()


def _require_memory(name: str, path: Path, dtype: torch.dtype, device: torch.device, num_workers: int = 1) -> None:
    try:
        needed = num_parameters(read_headers(checkpoint_files(path))) * dtype.itemsize
    except CheckpointError as error:
        # A shard that is missing, a download that broke off.
        raise StartupError(f"{name}: its weights can not be read ({_first_line(error)})") from error
    if device.type == "cuda":
        needed, free = needed // num_workers, torch.cuda.mem_get_info(device)[0]
    else:
        # Each worker holds all weights until it has cut out its part.
        needed, free = needed * num_workers, available_bytes()
    if needed > free:
        raise StartupError(
            f"{name}: the weights need {format_gib(needed)} of memory in "
            f"{str(dtype).removeprefix('torch.')}, and {format_gib(free)} are free on {device}"
        )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
