"""What many clients get of one cluster."""
