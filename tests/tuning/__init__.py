"""The load generator: its wire, its load, and whole runs against real servers."""
