"""Frames are counted where they are bytes, and their times are those of the thread that made them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.stream_meter import UNKNOWN_KIND, StreamMeter, StreamRows

ROWS = StreamRows("engine_core", ("engine_id",))


class Scrape:
    """What a scrape finds."""

    def __init__(self, meter: StreamMeter) -> None:
        self._meter = meter
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self):
        return self._meter.collect(ROWS, ("e",))

    def value(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"stepwire_engine_core_{name}", {"engine_id": "e", **labels})


def test_frames_and_bytes_by_direction_and_kind() -> None:
    meter = StreamMeter(("pong",), ("ping",))
    serialize = meter.serializer(pb.ConnectResponse.SerializeToString)
    deserialize = meter.deserializer(pb.ConnectRequest.FromString)
    data = serialize(pb.ConnectResponse(pong=pb.Pong(nonce=7)))
    request = pb.ConnectRequest(ping=pb.Ping(nonce=300))
    assert deserialize(request.SerializeToString()) == request
    deserialize(b"")
    scrape = Scrape(meter)
    assert scrape.value("stream_frames_total", direction="out", kind="pong") == 1
    assert scrape.value("stream_bytes_total", direction="out", kind="pong") == len(data)
    assert scrape.value("stream_bytes_total", direction="in", kind="ping") == request.ByteSize()
    assert scrape.value("stream_frames_total", direction="in", kind=UNKNOWN_KIND) == 1


def test_the_time_of_a_frame_is_that_of_all_its_parts() -> None:
    meter = StreamMeter(("pong",), ("ping",))
    meter.made(100.0)
    serialize = meter.serializer(pb.ConnectResponse.SerializeToString)
    serialize(pb.ConnectResponse(pong=pb.Pong()))
    serialize(pb.ConnectResponse(pong=pb.Pong()))
    meter.deserializer(pb.ConnectRequest.FromString)(b"")
    meter.read("ping", 200.0)
    scrape = Scrape(meter)
    encoded = scrape.value("frame_encode_seconds_sum", kind="pong")
    assert encoded is not None
    # The first frame took what was said, the second one only its own serialization.
    assert 100 < encoded < 101
    decoded = scrape.value("frame_decode_seconds_sum", kind="ping")
    assert decoded is not None
    assert 200 < decoded < 201
    assert scrape.value("frame_encode_seconds_count", kind="pong") == 2
