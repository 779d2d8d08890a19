"""How a model was trained to pool, from the files that sentence-transformers puts beside its weights. Reads only."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from engine_core.scheduler.pooling import DEFAULT_POOLING, ModelPooling, PoolingType

logger = logging.getLogger(__name__)

_MODULES = "modules.json"
# By its switch in the config of the pooling module.
_TYPES = {
    "pooling_mode_mean_tokens": PoolingType.MEAN,
    "pooling_mode_cls_token": PoolingType.CLS,
    "pooling_mode_lasttoken": PoolingType.LAST,
}


def read_pooling(directory: Path) -> ModelPooling:
    """What the files say; the last token, scaled to unit length, where there are none or they say something else."""
    path = directory / _MODULES
    if not path.is_file():
        return DEFAULT_POOLING
    try:
        return _read(directory, json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("%s can not be used (%s): --pooling auto is that of the last token", path, error)
        return DEFAULT_POOLING


def _read(directory: Path, modules: list[dict[str, Any]]) -> ModelPooling:
    kinds = [str(module["type"]).rsplit(".", 1)[-1] for module in modules]
    others = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"})
    if others or "Pooling" not in kinds:
        raise ValueError(f"modules {others} are not known" if others else "there is no Pooling module")
    # Below the model's directory, as sentence-transformers has it, and nowhere else.
    config_dir = directory / Path(modules[kinds.index("Pooling")]["path"]).name
    config = json.loads((config_dir / "config.json").read_text())
    chosen = [name for name, is_on in config.items() if name.startswith("pooling_mode_") and is_on is True]
    if len(chosen) != 1 or chosen[0] not in _TYPES:
        raise ValueError(f"pooling modes {chosen} are not one of {sorted(_TYPES)}")
    return ModelPooling(_TYPES[chosen[0]], is_normalized="Normalize" in kinds)
