"""What can go wrong with an engine."""

from __future__ import annotations


class EngineError(Exception):
    """Base of all engine errors."""


class EngineLoadError(EngineError):
    """The model cannot be loaded; the text says what is wrong with which file."""


class EngineRunError(EngineError):
    """One run failed; the engine goes on."""


class EngineDeadError(EngineError):
    """The engine cannot run anything any more (a lost device, a dead process)."""


class EngineLostError(EngineDeadError):
    """The engine's process has ended; the text says how."""
