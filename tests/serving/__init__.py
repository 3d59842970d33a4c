"""The daemon's parts: shapes, gather and answer, loading, repository, books, logs."""
