"""Rules that the source tree keeps."""
