"""Protobuf messages and gRPC services of the control plane; `generate.py` writes the Python from the `.proto`."""
