"""The frontend's end of the engine-core streams: connections, their pool, and protobuf to dataclasses."""
