"""Runs a scheduler scenario: a text of commands, and after each, indented, exactly what the scheduler did.

Commands (one a line; `#` starts a comment; everything indented is output and is replaced):

    config num_blocks=9 block_size=4 ...  limits of make_scheduler; first, and once
    add a prompt=10 max=3                 queue a request; further options below
    abort a b | abort all                 end requests from outside
    step | step abort=a                   plan, run and take in one step; `a` is aborted while the step runs
    run                                   step until there is no work
    clock 5                               set the time
    state                                 queues and blocks

Options of add: prefix=sys:8 (the prompt starts with 8 tokens of the family "sys"), salt=x, min=2, eos=3 (output token
number 3, from 0, is end of sequence), stop=3 (is a stop id), resume=2 (tokens of a resumed generation), deadline=5,
queue_deadline=5 (times), bypass=true, priority=1, class=gold,
arrival=5 (when it came to the frontend). Output token i of any request is 100 + i.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from engine_core.scheduler.output import CachedRequestData, EngineCoreOutput, NewRequestData, SchedulerOutput
from engine_core.scheduler.request import Request, RequestKey, RequestStatus, StopConditions
from engine_core.scheduler.scheduler import Scheduler
from fakes.request_factory import EOS, make_request, make_scheduler
from fakes.shadow_worker import ShadowWorker

STOP_ID = 3


def run_scenario(text: str) -> str:
    """The scenario with its output as it is now; comments and commands stay."""
    scenario = Scenario()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(" "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines.extend(f"  {output}" for output in scenario.execute(line))
    return "\n".join(lines) + "\n"


def _parse(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Plain words, and key=value pairs whose values are JSON where they can be."""
    pairs = [word.split("=", 1) for word in words if "=" in word]
    return [word for word in words if "=" not in word], {key: _value(value) for key, value in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


class Scenario:
    """State between the commands of one file."""

    scheduler: Scheduler
    worker: ShadowWorker

    def __init__(self) -> None:
        self._now = 0.0
        self._requests: dict[str, Request] = {}
        self._names: dict[RequestKey, str] = {}
        # Output tokens that are not 100 + i: (request, output index) -> token id.
        self._special_tokens: dict[tuple[RequestKey, int], int] = {}

    def execute(self, line: str) -> Iterator[str]:
        verb, *words = line.split()
        names, options = _parse(words)
        commands: dict[str, Callable[..., Iterator[str]]] = {
            "config": self._config,
            "add": self._add,
            "abort": self._abort,
            "step": self._step,
            "run": self._run,
            "clock": self._clock,
            "state": self._state,
        }
        yield from commands[verb](*names, **options)
        assert self.scheduler.check_integrity() == []

    # -- commands ----------------------------------------------------------------------------------------------------

    def _config(self, **limits: Any) -> Iterator[str]:
        self.scheduler = make_scheduler(**limits)
        self.worker = ShadowWorker(
            self.scheduler.kv_cache_manager.layout, self._next_token, lambda key: self._request(key).cache_salt
        )
        yield from ()

    def _add(self, name: str, prompt: int, max: int, prefix: str = "", **options: Any) -> Iterator[str]:  # noqa: A002
        handle = len(self._names) + 1
        request = make_request(
            handle,
            [*self._shared(prefix), *range(1000 * handle, 1000 * handle + prompt)][:prompt],
            stop=StopConditions(
                max_tokens=max,
                min_tokens=options.pop("min", 0),
                eos_token_ids=frozenset({EOS}),
                stop_token_ids=frozenset({STOP_ID}),
            ),
            output_token_ids=[100 + index for index in range(options.pop("resume", 0))],
            cache_salt=options.pop("salt", ""),
            bypass_prefix_cache=options.pop("bypass", False),
            deadline=options.pop("deadline", None),
            queue_deadline=options.pop("queue_deadline", None),
            arrival_time=options.pop("arrival", self._now),
            priority=options.pop("priority", 0),
            client_class=options.pop("class", ""),
        )
        for option, token_id in (("eos", EOS), ("stop", STOP_ID)):
            if option in options:
                self._special_tokens[request.key, options.pop(option)] = token_id
        assert not options, f"add knows no {options}"
        self._requests[name], self._names[request.key] = request, name
        yield self._news(self.scheduler.add_request(request, self._now))

    def _abort(self, *names: str) -> Iterator[str]:
        keys = None if names == ("all",) else [self._requests[name].key for name in names]
        for output in self.scheduler.finish_requests(keys, RequestStatus.FINISHED_ABORTED):
            yield self._news(output)

    def _step(self, abort: str = "") -> Iterator[str]:
        step = self.scheduler.schedule(self._now)
        yield from self._plan(step)
        runner_output = self.worker.execute(step)
        if abort:
            yield from self._abort(abort)
        outputs = self.scheduler.take_expired_outputs()
        for output in outputs + self.scheduler.update_from_output(step, runner_output, self._now):
            yield self._news(output)

    def _run(self) -> Iterator[str]:
        while self.scheduler.has_work:
            yield from self._step()

    def _clock(self, now: str) -> Iterator[str]:
        self._now = float(now)
        yield from ()

    def _state(self) -> Iterator[str]:
        running = " ".join(self._names[request.key] for request in self.scheduler.running)
        waiting = " ".join(self._names[request.key] for request in self.scheduler.waiting)
        stats = self.scheduler.stats()
        yield f"running: {running or '-'}, waiting: {waiting or '-'}"
        num_free = stats.num_total_blocks - stats.num_used_blocks - stats.num_cached_blocks
        yield f"blocks: {stats.num_used_blocks} used, {stats.num_cached_blocks} cached, {num_free} free"

    # -- tokens ------------------------------------------------------------------------------------------------------

    def _shared(self, prefix: str) -> list[int]:
        family, _, length = prefix.partition(":")
        start = 1_000_000 + sum(family.encode()) * 1000
        return list(range(start, start + int(length or 0)))

    def _next_token(self, data: NewRequestData, token_ids: list[int]) -> int:
        index = len(token_ids) - len(data.prompt_token_ids)
        return self._special_tokens.get((data.key, index), 100 + index)

    def _request(self, key: RequestKey) -> Request:
        return self._requests[self._names[key]]

    # -- text --------------------------------------------------------------------------------------------------------

    def _plan(self, step: SchedulerOutput) -> Iterator[str]:
        yield f"step {step.step}: {step.total_num_scheduled_tokens} tokens"
        new = {data.key for data in step.new_requests}
        changed = {data.key: data for data in step.cached_requests}
        for key, num_tokens in step.num_scheduled_tokens.items():
            if key not in new:
                # Without new blocks the worker knows all.
                data = changed.get(key) or CachedRequestData(key, (), self.worker.requests[key].num_computed_tokens)
                yield self._scheduled(data, num_tokens)
        for data in step.new_requests:
            yield self._scheduled(data, step.num_scheduled_tokens[data.key])
        if step.finished_keys:
            yield f"over: {' '.join(self._names[key] for key in step.finished_keys)}"

    def _scheduled(self, data: NewRequestData | CachedRequestData, num_tokens: int) -> str:
        block_ids = data.block_ids if isinstance(data, NewRequestData) else data.new_block_ids
        if isinstance(data, NewRequestData):
            kind, sign = "new", ""
        else:
            kind, sign = ("resumed", "") if data.is_resumed else ("cached", "+")
        # Groups of layers are told apart by a bar.
        groups = " | ".join(" ".join(map(str, group_ids)) for group_ids in block_ids)
        blocks = f", blocks {sign}{groups}" if groups else ""
        num_known = self._request(data.key).num_tokens
        return f"{kind} {self._names[data.key]}: {data.num_computed_tokens} + {num_tokens} of {num_known}{blocks}"

    def _news(self, output: EngineCoreOutput) -> str:
        parts = [str(token_id) for token_id in output.new_token_ids]
        if output.events:
            parts.append("[" + " ".join(event.type.name for event in output.events) + "]")
        if output.prefill is not None:
            parts.append(f"({output.prefill.num_cached_tokens} of {output.prefill.num_prompt_tokens} cached)")
        if output.finish is not None:
            parts.append(self._end(output))
        return f"-> {self._names[output.key]}: {' '.join(parts)}"

    def _end(self, output: EngineCoreOutput) -> str:
        finish = output.finish
        assert finish is not None
        details = [] if finish.stop_token_id is None else [f"id {finish.stop_token_id}"]
        if finish.num_preemptions:
            details.append(f"{finish.num_preemptions} preemptions")
        if finish.error is not None:
            retry = f", retry after {finish.error.retry_after_ms} ms" if finish.error.retry_after_ms else ""
            details.append(f"{finish.error.reason}: {finish.error.message}{retry}")
        return " ".join([finish.reason.name, *(f"({detail})" for detail in details)])
