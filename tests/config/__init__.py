"""Configuration: its documentation, its checks and their texts, its order."""
