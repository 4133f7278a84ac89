"""Hold a capture's numerics against runs that it must not differ from."""
