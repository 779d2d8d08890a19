"""The dashboard of frontends, the streams between the two services, and both runtimes. Data only."""

from __future__ import annotations

from stepwire_client.monitor.faults import USERS_RPCS
from stepwire_client.monitor.panel import Board, Kind, Panel, Query, Row, Unit
from stepwire_client.monitor.promql import largest, nonzero, quantile, rate, select, total

_F, _E = "stepwire_frontend_", "stepwire_engine_core_"
_OURS = 'job=~".*stepwire.*"'

_TRANSPORT = Row(
    "Transport",
    (
        Panel(
            "Stream bytes",
            "Protobuf bytes of the streams between frontends and engines, by kind of frame, seen from the engine.",
            Unit.BYTES_PER_SECOND,
            (Query(rate(f"{_E}stream_bytes_total", "direction, kind"), "{{direction}} {{kind}}"),),
            Kind.STACKED,
        ),
        Panel(
            "Stream frames",
            "Frames a second, by kind.",
            Unit.PER_SECOND,
            (Query(rate(f"{_E}stream_frames_total", "direction, kind"), "{{direction}} {{kind}}"),),
            Kind.STACKED,
        ),
        Panel(
            "Encoding and decoding p99",
            "Time to make bytes of a frame and back, in each service.",
            Unit.SECONDS,
            (
                Query(quantile(0.99, f"{_E}frame_encode_seconds"), "engine encodes"),
                Query(quantile(0.99, f"{_E}frame_decode_seconds"), "engine decodes"),
                Query(quantile(0.99, f"{_F}frame_encode_seconds"), "frontend encodes"),
                Query(quantile(0.99, f"{_F}frame_decode_seconds"), "frontend decodes"),
            ),
        ),
        Panel(
            "Round trip p99",
            "Pings: io is answered by the stream's own thread, step_loop by the busy loop between two steps.",
            Unit.SECONDS,
            (Query(quantile(0.99, f"{_F}engine_ping_seconds", "through"), "{{through}}"),),
        ),
        Panel(
            "Unsent output",
            "Bytes that an engine holds for a frontend that has not read them yet.",
            Unit.BYTES,
            (Query(total(f"{_E}outbox_bytes", "client_id"), "{{client_id}}"),),
        ),
        Panel(
            "Coalesced batches",
            "Steps whose output was merged because a frontend was behind.",
            Unit.PER_SECOND,
            (Query(rate(f"{_E}batches_coalesced_total", "engine_id"), "{{engine_id}}"),),
        ),
        Panel(
            "Queues",
            "Messages that wait: for the step loop, for the streams, in the frontends.",
            Unit.COUNT,
            (
                Query(total(f"{_E}queue_depth", "queue"), "engine {{queue}}"),
                Query(total(f"{_F}transport_queue_depth", "direction"), "frontend {{direction}}"),
            ),
        ),
        Panel(
            "Sessions",
            "Streams of frontends that the engines hold.",
            Unit.COUNT,
            (Query(total(f"{_E}sessions", "state"), "{{state}}"),),
        ),
        Panel(
            "Session events",
            "How streams came and went: opened, replaced, cut because the frontend did not read, closed.",
            Unit.PER_SECOND,
            (Query(rate(f"{_E}session_events_total", "event"), "{{event}}"),),
        ),
        Panel(
            "Reconnects",
            "Streams that frontends opened again, by what they found.",
            Unit.PER_SECOND,
            (Query(rate(f"{_F}engine_reconnects_total", "result"), "{{result}}"),),
            event="an engine that goes away and comes back",
        ),
    ),
)
_WORK = Row(
    "Work of the frontends",
    (
        Panel(
            "Texts and tokens p99",
            "Time to encode a prompt, and to turn one batch of tokens into text.",
            Unit.SECONDS,
            (
                Query(quantile(0.99, f"{_F}tokenize_seconds"), "tokenize"),
                Query(quantile(0.99, f"{_F}detokenize_seconds"), "detokenize"),
                Query(quantile(0.99, f"{_F}output_processing_seconds"), "whole batch"),
            ),
        ),
        Panel(
            "Tokenizer queue",
            "Texts that wait for a tokenizer thread.",
            Unit.COUNT,
            (Query(total(f"{_F}tokenize_queue_depth"), "waiting"),),
        ),
        Panel(
            "Slow readers",
            "Deltas merged because a caller read slowly, and streams cut because it did not read at all.",
            Unit.PER_SECOND,
            (
                Query(rate(f"{_F}deltas_merged_total"), "merged"),
                Query(rate(f"{_F}slow_client_cuts_total"), "cut"),
            ),
        ),
        Panel(
            "Choice of engines",
            "Requests by why their engine was chosen.",
            Unit.PER_SECOND,
            (Query(rate(f"{_F}picker_decisions_total", "reason"), "{{reason}}"),),
            Kind.STACKED,
        ),
        Panel(
            "Output errors",
            "Requests whose output could not be processed; each fails alone.",
            Unit.PER_SECOND,
            (Query(rate(f"{_F}output_processing_errors_total", "stage"), "{{stage}}"),),
        ),
        Panel(
            "RPC duration p99",
            "By method; of a stream until its last message.",
            Unit.SECONDS,
            (Query(quantile(0.99, f"{_F}rpc_duration_seconds", "grpc_method", USERS_RPCS), "{{grpc_method}}"),),
        ),
        Panel(
            "Refused callers",
            "Calls without a token that is known, by reason.",
            Unit.PER_SECOND,
            (Query(rate(f"{_F}auth_failures_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "RPC bytes",
            "Bytes of requests and answers of the public API.",
            Unit.BYTES_PER_SECOND,
            (Query(rate(f"{_F}rpc_bytes_total", "direction"), "{{direction}}"),),
            Kind.STACKED,
        ),
    ),
)
_RUNTIME = Row(
    "Runtime",
    (
        Panel(
            "Garbage collections p99",
            "How long a collection held the interpreter.",
            Unit.SECONDS,
            (
                Query(quantile(0.99, f"{_F}gc_pause_seconds", "generation"), "frontend {{generation}}"),
                Query(quantile(0.99, f"{_E}gc_pause_seconds", "generation"), "engine {{generation}}"),
            ),
        ),
        Panel(
            "Event-loop lag p99",
            "How late timers of the frontends' event loops are.",
            Unit.SECONDS,
            (Query(quantile(0.99, f"{_F}event_loop_lag_seconds", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Interpreter lag p99",
            "How long threads of an engine wait for the interpreter lock.",
            Unit.SECONDS,
            (Query(quantile(0.99, f"{_E}interpreter_lag_seconds", "thread"), "{{thread}}"),),
        ),
        Panel(
            "Resident memory",
            "Of each process.",
            Unit.BYTES,
            (Query(select("process_resident_memory_bytes", _OURS), "{{job}} {{instance}}"),),
        ),
        Panel(
            "CPU",
            "Cores that each process uses.",
            Unit.COUNT,
            (Query(rate("process_cpu_seconds_total", "job, instance", _OURS), "{{job}} {{instance}}"),),
        ),
        Panel(
            "Open files",
            "File descriptors of each process, sockets included.",
            Unit.COUNT,
            (Query(select("process_open_fds", _OURS), "{{job}} {{instance}}"),),
        ),
        Panel(
            "Log records",
            "Warnings and errors that were logged.",
            Unit.PER_SECOND,
            (
                Query(rate(f"{_F}log_records_total", "level", 'level=~"(?i)warning|error"'), "frontend {{level}}"),
                Query(rate(f"{_E}log_records_total", "level", 'level=~"(?i)warning|error"'), "engine {{level}}"),
            ),
        ),
    ),
)
_HEALTH = Row(
    "Health",
    (
        Panel(
            "Engines up",
            "1 while a frontend is attached to an engine that serves.",
            Unit.COUNT,
            (Query(select(f"{_F}engine_up"), "{{engine_id}} at {{instance}}"),),
        ),
        Panel(
            "Deaths of engines",
            "By how the frontends learned of them, and by what the engine gave as the cause, if anything.",
            Unit.PER_SECOND,
            (
                Query(
                    nonzero(rate(f"{_F}engine_deaths_total", "engine_id, kind, cause")),
                    "{{engine_id}} {{kind}} {{cause}}",
                ),
            ),
            event="an engine that dies",
        ),
        Panel(
            "Certificate expiry",
            "Time until the frontends' TLS certificate ends.",
            Unit.SECONDS,
            (
                Query(
                    f"{largest(f'{_F}tls_certificate_expiry_timestamp_seconds', 'instance')} - time()", "{{instance}}"
                ),
            ),
            event="a frontend that serves TLS",
        ),
    ),
)

BOARD = Board(
    uid="stepwire-frontend",
    title="stepwire: frontends and transport",
    description="Streams between frontends and engines, work of the frontends, and the runtimes of both.",
    rows=(_TRANSPORT, _WORK, _RUNTIME, _HEALTH),
)
