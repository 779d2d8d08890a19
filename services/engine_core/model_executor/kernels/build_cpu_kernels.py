"""Command `python -m engine_core.model_executor.kernels.build_cpu_kernels`: compile before the first start.

Runs alone, without an engine. Without a compiler it exits 1 with one sentence; the engine then serves without it.
"""

from __future__ import annotations

import argparse

from rich.console import Console

from engine_core.model_executor.kernels.cpu_build import BuildError, build


def main() -> None:
    """--debug: the variant that checks every slot, block and length it reads."""
    parser = argparse.ArgumentParser(prog="python -m engine_core.model_executor.kernels.build_cpu_kernels")
    parser.add_argument("--debug", action="store_true", help="the variant that checks every slot, block and length")
    is_debug = parser.parse_args().debug
    console = Console(stderr=True)
    try:
        library = build(lambda message: console.print(message, markup=False), is_debug=is_debug)
    except BuildError as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        raise SystemExit(1) from None
    console.print(f"the CPU kernels are ready in {library}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
