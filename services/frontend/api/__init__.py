"""The public gRPC services, one file each: protobuf in, protobuf out, a few lines for each RPC."""
