"""The commands beside `serve` and `bench`."""
