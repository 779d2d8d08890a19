"""Several processes that serve one frontend's ports, and the supervisor that keeps them. Nothing here knows gRPC."""
