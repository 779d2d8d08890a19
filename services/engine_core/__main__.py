"""`python -m engine_core`: the composition root."""

from __future__ import annotations

# Before all that takes time to import.
import stepwire.early_stop  # noqa: F401

# isort: split
import logging
import sys
from pathlib import Path

from engine_core.config import EngineSettings
from engine_core.model_executor.checkpoint import content_version
from engine_core.model_executor.executor import Executor, FailureCallback
from engine_core.process import EngineProcess
from engine_core.resolved_config import ServedModel
from engine_core.startup import LoadedModel, Progress
from engine_core.structured_output.vocabulary import Vocabulary, VocabularyError, read_vocabulary
from stepwire import log, tokenizer_archive
from stepwire.listen_address import BindError
from stepwire.settings import set_default_variable

logger = logging.getLogger("engine_core")


def load_model(settings: EngineSettings, failure_callback: FailureCallback, progress: Progress) -> LoadedModel:
    """The model in this process, or in workers when it is to be shared by several."""
    # By default math threads spin while they wait. Beside a frontend on few cores that costs the step loop its core: a
    # decode step took ten times as long next to one busy process. Asleep at once they pay a wake-up for each operator.
    if set_default_variable("OMP_WAIT_POLICY", "passive"):
        # GNU's OpenMP: some 0.1 ms, as long as the way from one operator to the next takes.
        set_default_variable("GOMP_SPINCOUNT", "3000")
    # Here and not at the top: importing torch takes seconds, and the health port must be up before that.
    from engine_core.model_executor.model_source import resolve_model
    from engine_core.model_executor.pooling_files import read_pooling

    model = resolve_model(settings, progress)
    archive = tokenizer_archive.build(model.path)
    executor = _executor(settings, model.path, failure_callback, progress)
    try:
        # After the loader, which has checked the files.
        weight_version = content_version(model.path)
        sha256 = tokenizer_archive.sha256(archive)
        pooling = read_pooling(model.path)
        served_model = ServedModel(model.name, model.revision, sha256, weight_version, model.path, pooling)
        return LoadedModel(executor, served_model, archive, _vocabulary(model.path, executor.model_info.vocab_size))
    except BaseException:
        executor.shutdown()
        raise


def _executor(
    settings: EngineSettings, model_path: Path, failure_callback: FailureCallback, progress: Progress
) -> Executor:
    if settings.tensor_parallel_size * settings.pipeline_parallel_size > 1:
        from engine_core.model_executor.multiproc_executor import MultiprocExecutor

        return MultiprocExecutor(settings, model_path, failure_callback, progress)
    from engine_core.model_executor.in_process_executor import InProcessExecutor

    # Its failures leave the call that meets them, so the callback has no use.
    return InProcessExecutor(settings, model_path, progress)


def _vocabulary(model_path: Path, vocab_size: int) -> Vocabulary | None:
    try:
        return read_vocabulary(model_path, vocab_size)
    except VocabularyError as error:
        logger.warning("structured output is off: %s", error)
        return None


def main() -> int:
    settings = EngineSettings.from_command_line()
    log.configure(settings.log_level, settings.log_format, "engine_core")
    try:
        return EngineProcess(settings, load_model).run()
    except BindError as error:
        logger.critical("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
