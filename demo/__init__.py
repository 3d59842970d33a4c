"""`make demo`: serve a real model, drive it, show what batching does.

Not installed; run it from the repository's root with `python -m demo`.
"""
