"""What a big cluster costs its controller."""
