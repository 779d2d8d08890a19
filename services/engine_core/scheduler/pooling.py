"""What a request wants that is answered by a vector instead of tokens. Pure values; computed by the workers."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

# Tasks; one of them pools.
GENERATE = "generate"
EMBED = "embed"


class PoolingType(enum.Enum):
    """Which hidden states of the prompt, behind the final norm, make the vector; the values are those of --pooling."""

    # The mean over all tokens.
    MEAN = "mean"
    # That of the last token: with causal attention the only one that has seen the whole prompt.
    LAST = "last"
    # That of the first one.
    CLS = "cls"


@dataclass(frozen=True, slots=True)
class ModelPooling:
    """What a model was trained for."""

    type: PoolingType = PoolingType.LAST
    is_normalized: bool = True

    @property
    def feature(self) -> str:
        """For Ready: engines that differ in it give vectors that can not be compared."""
        return f"pooling:{self.type.value}{'' if self.is_normalized else '/unscaled'}"


# Of a model whose files say nothing.
DEFAULT_POOLING = ModelPooling()


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """None = as the model was trained, or all dimensions; the input thread puts the model's values in."""

    task: str = EMBED
    type: PoolingType | None = None
    is_normalized: bool | None = None
    # Only the first so many, cut before they are scaled.
    num_dimensions: int | None = None

    @property
    def needs_all_tokens(self) -> bool:
        """What is read from the prefix cache has no hidden states; the last token is computed in any case."""
        return self.type is not PoolingType.LAST

    def completed(self, model: ModelPooling) -> PoolingParams:
        return replace(
            self,
            type=self.type or model.type,
            is_normalized=model.is_normalized if self.is_normalized is None else self.is_normalized,
        )
