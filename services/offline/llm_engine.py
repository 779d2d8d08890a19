"""LLMEngine: requests in, steps, outputs; the frontend's two halves joined to an engine core by hand.

Owner: one thread, the caller's. No event loop, no thread of its own. Every request leaves the maps exactly once: at its
end, at its abort, or with the death of the engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from engine_core.__main__ import load_model
from engine_core.config import EngineSettings
from engine_core.model_executor.startup_error import StartupError
from engine_core.startup import ModelLoader
from frontend.abort_kind import AbortKind
from frontend.chat.model import ChatModel, ChatOptions
from frontend.serving_model import ServingModel
from frontend.tokenizer import Tokenizer
from offline.generate_request import Prompt, to_generate_request
from offline.inproc_client import InprocClient
from offline.outputs import RequestOutput
from offline.request_answer import RequestAnswer
from offline.sampling_params import SamplingParams
from stepwire import tokenizer_archive
from stepwire.errors import EngineDeadError, InvalidRequestError


class LLMEngine:
    """`add_request` whenever there is one, `step` while `has_unfinished_requests`, `close` at the end."""

    def __init__(self, settings: EngineSettings, loader: ModelLoader = load_model) -> None:
        self._client = InprocClient(settings, loader)
        try:
            self._model = _load_frontend(self._client)
        except BaseException:
            self._client.close()
            raise
        self.chat_template = self._model.chat.template
        self._handles = itertools.count(1)
        self._answers: dict[str, RequestAnswer] = {}
        self._by_handle: dict[int, RequestAnswer] = {}

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> None:
        """Queue a request. Raises InvalidRequestError; what goes wrong later comes as the `error` of its output.

        `add_special_tokens` is for texts; a rendered chat template holds its own.
        """
        if request_id in self._answers:
            raise InvalidRequestError(f"request_id {request_id!r} is in flight", reason="DUPLICATE_REQUEST")
        given = params or SamplingParams()
        message = to_generate_request(prompt, given, add_special_tokens=add_special_tokens)
        processed = self._model.input_processor.process_now(message, request_id=request_id)
        handles = list(itertools.islice(self._handles, processed.num_choices))
        collector = self._model.output_processor.add_request(processed, handles)
        answer = RequestAnswer(
            processed,
            handles,
            prompt if isinstance(prompt, str) else None,
            given.output_kind,
            collector,
            self._model.tokenizer.token_bytes,
        )
        self._answers[request_id] = answer
        self._by_handle.update(dict.fromkeys(handles, answer))
        try:
            self._client.add_request(processed, handles)
        except BaseException:
            self.abort([request_id])
            raise

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; no output of them comes any more. Unknown and finished ids are skipped."""
        for request_id in list(request_ids):
            if request_id in self._answers:
                self._forget(self._answers[request_id])

    @property
    def num_requests(self) -> int:
        """Requests that have neither ended nor been aborted."""
        return len(self._answers)

    def has_unfinished_requests(self) -> bool:
        """Whether to call `step` again. True also while workers have not been told yet of the last end."""
        return bool(self._answers) or self._client.has_work

    def step(self) -> list[RequestOutput]:
        """Run the engine once; which outputs come is each request's `output_kind`. None may come while work goes on.

        A request that fails has an output with its `error`. When the engine dies, that is all of them, and the next
        `add_request` raises EngineDeadError.
        """
        try:
            outputs = self._client.get_output()
        except EngineDeadError as error:
            self._model.output_processor.fail(list(self._by_handle), error)
            news = list(self._answers.values())
        else:
            self._model.output_processor.process_now(outputs)
            handles = (output.handle for output in outputs)
            news = list(dict.fromkeys(self._by_handle[handle] for handle in handles if handle in self._by_handle))
        return [output for answer in news if (output := self._read(answer)) is not None]

    def close(self) -> None:
        """Give back the model's memory. Requests in flight end without an answer. May be repeated."""
        self.abort(list(self._answers))
        self._client.close()
        self._model.close()

    def _read(self, answer: RequestAnswer) -> RequestOutput | None:
        output = answer.read()
        if answer.is_finished:
            # After an error some of its choices may still run.
            self._forget(answer)
        return output

    def _forget(self, answer: RequestAnswer) -> None:
        del self._answers[answer.request_id]
        for handle in answer.handles:
            del self._by_handle[handle]
        self._client.abort(self._model.output_processor.close(answer.collector), AbortKind.REQUESTED)


def _load_frontend(client: InprocClient) -> ServingModel:
    """From the files that the engine ships, as a frontend of its own would get them."""
    archive = client.tokenizer_archive
    if not archive:
        raise StartupError("the model has no tokenizer files")
    with TemporaryDirectory() as directory:
        files = tokenizer_archive.unpack(archive, Path(directory))
        tokenizer, chat = Tokenizer.from_directory(files), ChatModel.from_directory(files, ChatOptions())
    # Failures of output processing reach the caller as errors of their requests; nobody counts them here.
    return ServingModel(
        client.facts,
        tokenizer,
        client.abort,
        on_failure=lambda _: None,
        tokenizer_threads=1,
        chat=chat,
        tokenizer_archive=archive,
    )
