"""What crosses between processes: protobuf messages, and the payloads of commands."""
