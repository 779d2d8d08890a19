"""stepwire.engine.v1.KvEventsService: the feed of prefix cache changes as a stream. Runs in gRPC's threads only.

The handler thread of a subscriber waits at the feed, encodes and writes; the busy loop knows nothing of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import grpc

from engine_core.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from engine_core.kv_event_feed import KVEventBatch, KVEventFeed, KVSnapshot
from stepwire import token_array
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.engine.v1 import engine_core_pb2_grpc
from stepwire.errors import StepwireError
from stepwire.grpc_errors import abort_sync

logger = logging.getLogger(__name__)

KV_EVENTS_SERVICE_NAME = "stepwire.engine.v1.KvEventsService"
# Half of what gRPC clients accept by default: a whole cache in one message could pass that.
MAX_SNAPSHOT_PART_BYTES = 2 * 1024 * 1024
# Of an event, at most, without its tokens: two SHA-256 hashes, and what frames them.
_EVENT_BYTES = 128
_TOKEN_BYTES = 4


class KvEventsServicer(engine_core_pb2_grpc.KvEventsServiceServicer):
    """Serves subscribers, before the model is loaded as well. Without a feed it refuses and names the flag."""

    def __init__(self, feed: KVEventFeed | None, block_size: int, data_parallel_rank: int) -> None:
        self._feed = feed
        self._data_parallel_rank = data_parallel_rank
        self._block_size = block_size

    def SubscribeKvEvents(  # noqa: N802  the name of the RPC
        self, request: pb.SubscribeKvEventsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.SubscribeKvEventsResponse]:
        if self._feed is None:
            text = "the engine does not publish cache events: start it with --enable-kv-events"
            abort_sync(context, StepwireError(text, reason="UNSUPPORTED_FEATURE"))
        # Now and not with the first batch: gateways give up on a worker whose headers do not come.
        context.send_initial_metadata(())
        try:
            for batch in _batches(self._feed, request.start_sequence, context):
                for response in encode(batch, self._block_size):
                    response.data_parallel_rank = self._data_parallel_rank
                    yield response
        except StepwireError as error:
            abort_sync(context, error)


def _batches(
    feed: KVEventFeed, start_sequence: int, context: grpc.ServicerContext
) -> Iterator[KVEventBatch | KVSnapshot]:
    subscription = feed.subscribe(start_sequence, context.cancel)
    logger.info("%s subscribed to cache events from %d", context.peer(), start_sequence)
    try:
        # A client that goes away wakes the thread out of its wait.
        if not context.add_callback(lambda: feed.end(subscription)):
            return
        while (batch := feed.take(subscription)) is not None:
            yield batch
    finally:
        feed.end(subscription)
        logger.info("%s no longer subscribes to cache events", context.peer())


def encode(batch: KVEventBatch | KVSnapshot, block_size: int) -> Iterator[pb.SubscribeKvEventsResponse]:
    """One message, or the several of a snapshot: only the last one, which completes the state, has its number."""
    if isinstance(batch, KVEventBatch):
        yield _response(batch.sequence, batch.events, block_size)
        return
    events: list[KVEvent] = [AllBlocksCleared(), *_parents_first(batch.stored)]
    part_events = snapshot_part_events(block_size)
    starts = range(0, len(events), part_events)
    for start in starts:
        sequence = batch.sequence if start == starts[-1] else 0
        yield _response(sequence, events[start : start + part_events], block_size)


def snapshot_part_events(block_size: int) -> int:
    """How many blocks of a snapshot go into one message."""
    return MAX_SNAPSHOT_PART_BYTES // (_EVENT_BYTES + _TOKEN_BYTES * block_size)


def _parents_first(stored: list[BlockStored]) -> Iterator[BlockStored]:
    """A child can outlive its parent, which is then stored again behind it; readers build trees, top down."""
    waiting = {(block.group, block.block_hash): block for block in stored}
    for block in stored:
        chain: list[BlockStored] = []
        next_hash: bytes | None = block.block_hash
        while next_hash is not None and (found := waiting.pop((block.group, next_hash), None)) is not None:
            chain.append(found)
            next_hash = found.parent_hash
        yield from reversed(chain)


def _response(sequence: int, events: Iterable[KVEvent], block_size: int) -> pb.SubscribeKvEventsResponse:
    response = pb.SubscribeKvEventsResponse(sequence=sequence)
    chain: list[BlockStored] = []
    for event in events:
        if chain and not _continues(chain[-1], event):
            response.events.add(stored=_encode_chain(chain, block_size))
            chain = []
        match event:
            case BlockStored():
                chain.append(event)
            case BlockRemoved():
                _add_removed(response, event)
            case AllBlocksCleared():
                response.events.add(cleared=pb.KvEvent.AllBlocksCleared())
    if chain:
        response.events.add(stored=_encode_chain(chain, block_size))
    return response


def _continues(last: BlockStored, event: KVEvent) -> bool:
    return isinstance(event, BlockStored) and (event.group, event.parent_hash) == (last.group, last.block_hash)


def _add_removed(response: pb.SubscribeKvEventsResponse, event: BlockRemoved) -> None:
    last = response.events[-1] if response.events else None
    if last is not None and last.HasField("removed") and last.removed.group == event.group:
        last.removed.block_hashes.append(event.block_hash)
    else:
        response.events.add(removed=pb.KvEvent.BlockRemoved(block_hashes=[event.block_hash], group=event.group))


def _encode_chain(chain: list[BlockStored], block_size: int) -> pb.KvEvent.BlockStored:
    """Of a salted chain no tokens: with them and the hash a reader could try out salts."""
    is_salted = chain[0].is_salted
    token_ids = [] if is_salted else [token_id for block in chain for token_id in block.token_ids]
    return pb.KvEvent.BlockStored(
        block_hashes=[block.block_hash for block in chain],
        parent_block_hash=chain[0].parent_hash or b"",
        token_ids=token_array.pack(token_ids),
        block_size=block_size,
        group=chain[0].group,
        salted=is_salted,
    )
