"""`python -m batcher` is the same command as `batcher`."""

from batcher.cli import main

main()
