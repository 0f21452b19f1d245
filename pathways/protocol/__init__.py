"""What processes send to each other: protobuf messages, and the payloads of commands."""
