"""Configuration: the knobs, and how they are read."""

from batcher.config.backends import FakeConfig, TensorRTConfig
from batcher.config.load import check_overrides, from_mapping, load_model_config
from batcher.config.schema import (
    AxisConfig,
    BatchingConfig,
    ModelConfig,
    ServerConfig,
    SlotsConfig,
)

__all__ = [
    "AxisConfig",
    "BatchingConfig",
    "FakeConfig",
    "ModelConfig",
    "ServerConfig",
    "SlotsConfig",
    "TensorRTConfig",
    "check_overrides",
    "from_mapping",
    "load_model_config",
]
