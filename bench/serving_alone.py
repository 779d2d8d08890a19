"""Tokens a second with a one-layer model, of the whole service and of `offline`: the serving system alone."""

from __future__ import annotations

from collections.abc import Iterator

from bench import engine_flags, one_layer_model, rows, running_service, whole_service
from bench.rows import Row
from offline import LLM

CONCURRENCIES = (64, 256)
PREFIX = "one-layer model: "


def measure() -> Iterator[Row]:
    changes: dict[str, object] = {"model": str(one_layer_model.make()), "max_num_seqs": max(CONCURRENCIES)}
    service_flags = engine_flags.flags(**changes)
    llm_settings = {**engine_flags.SETTINGS, **changes}
    with running_service.running(*service_flags) as service, LLM(**llm_settings) as llm:  # type: ignore[arg-type]  # settings by name
        yield from whole_service.compare(service, llm, CONCURRENCIES, target=None, prefix=PREFIX)


if __name__ == "__main__":
    rows.main(measure)
