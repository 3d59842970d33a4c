"""The documents say what is the case."""
