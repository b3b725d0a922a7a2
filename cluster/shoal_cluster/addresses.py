"""Where a gateway listens unless told otherwise."""

DEFAULT_GRPC_ADDRESS = "127.0.0.1:9000"
DEFAULT_HTTP_ADDRESS = "127.0.0.1:8000"
