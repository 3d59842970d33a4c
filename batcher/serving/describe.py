"""A model's configuration in force, as Triton's ModelConfig message."""

from __future__ import annotations

from collections.abc import Sequence

from batcher.config import ModelConfig
from batcher.rpc import messages
from batcher.rpc.signature import ModelSignature, TensorSignature


def config_message(
    signature: ModelSignature, config: ModelConfig, rungs: Sequence[int]
) -> messages.ModelConfig:
    """What is in force, completed values included.

    `max_batch_size` is 0 for a model that does not batch (Triton's meaning: the dims
    are complete); otherwise dims leave the batch axis out.
    """
    result = messages.ModelConfig(
        name=signature.name,
        platform=signature.platform,
        backend=signature.platform.split("_")[0],
        max_batch_size=signature.max_batch if signature.batched else 0,
    )
    for tensor in signature.inputs:
        result.input.add(
            name=tensor.name,
            data_type=tensor.type.number,
            dims=_dims(tensor, signature.batched),
        )
    for tensor in signature.outputs:
        result.output.add(
            name=tensor.name,
            data_type=tensor.type.number,
            dims=_dims(tensor, signature.batched),
        )
    result.instance_group.add(
        name=f"{signature.name}_0",
        count=config.slots.count,
        kind=messages.ModelInstanceGroup.KIND_CPU,
    )
    batching = config.batching
    if signature.batched:
        dynamic = result.dynamic_batching
        dynamic.max_queue_delay_microseconds = batching.max_delay_us
        dynamic.preferred_batch_size.extend(batching.preferred)
        queue = dynamic.default_queue_policy
        queue.max_queue_size = batching.max_queue
        queue.default_timeout_microseconds = int(batching.timeout_ms * 1000)
        queue.allow_timeout_override = batching.allow_timeout_override
    result.parameters["policy"].string_value = batching.policy
    result.parameters["rungs"].string_value = ladder(rungs)
    return result


def ladder(rungs: Sequence[int]) -> str:
    """Rungs for people: "1-64" when every size is one, else a list."""
    if len(rungs) > 2 and len(rungs) == rungs[-1]:
        return f"1-{rungs[-1]}"
    return ",".join(map(str, rungs))


def _dims(tensor: TensorSignature, batched: bool) -> list[int]:
    return tensor.wire_shape[1:] if batched else tensor.wire_shape
