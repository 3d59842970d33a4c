"""Benchmarks of the daemon beside its peers; see README.md in this folder."""
