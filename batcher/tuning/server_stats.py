"""The server's own figures over a run: two ModelStatistics answers, subtracted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batcher.tuning.unary import call

if TYPE_CHECKING:
    from batcher.rpc.messages import ModelStatistics, StatisticDuration
    from batcher.tuning.plan import Body

    Snapshot = dict[tuple[str, str], ModelStatistics]

_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    """What a server says it did for one model version during the window."""

    model: str
    """Name of the model."""

    version: str
    """Its version."""

    inferences: int
    """Rows inferred (Triton's `inference_count`)."""

    executions: int
    """Batches run."""

    batch_sizes: dict[int, int]
    """Number of batches by batch size."""

    mean_batch_size: float
    """Mean of those; rows per execution when the server gives no sizes."""

    succeeded: int
    """Requests answered."""

    failed: int
    """Requests failed."""

    queue_us: float
    """Mean microseconds that a request waited."""

    compute_input_us: float
    """Mean microseconds of preparing the inputs, per request."""

    compute_infer_us: float
    """Mean microseconds of the model's run, per request."""

    compute_output_us: float
    """Mean microseconds of preparing the outputs, per request."""


def models_of(bodies: tuple[Body, ...]) -> tuple[str, ...]:
    """The models that the bodies are for, in order of their first one."""
    from google.protobuf.message import DecodeError

    from batcher.rpc.messages import ModelInferRequest

    names = []
    for body in bodies:
        try:
            names.append(ModelInferRequest.FromString(body.message).model_name)
        except DecodeError:
            continue  # sent on purpose, to see what the server says
    return tuple(dict.fromkeys(names))


def snapshot(target: str, models: tuple[str, ...]) -> Snapshot:
    """The statistics of the models now, by name and version.

    Raises:
        BatcherError: the server cannot be reached or has no such call.
    """
    from batcher.rpc.messages import ModelStatisticsRequest, ModelStatisticsResponse

    found = {}
    for model in models:
        answer = call(
            target,
            "ModelStatistics",
            ModelStatisticsRequest(name=model),
            ModelStatisticsResponse,
            timeout_s=_TIMEOUT_S,
        )
        for stats in answer.model_stats:
            found[stats.name, stats.version] = stats
    return found


def used_between(before: Snapshot, after: Snapshot) -> tuple[ModelUse, ...]:
    """The use of each model version between two snapshots; unused ones left out."""
    uses = (_use(before.get(key), stats) for key, stats in after.items())
    return tuple(use for use in uses if use.inferences or use.executions or use.failed)


def _use(before: ModelStatistics | None, after: ModelStatistics) -> ModelUse:
    from batcher.rpc.messages import ModelStatistics

    first = ModelStatistics() if before is None else before
    inferences = after.inference_count - first.inference_count
    executions = after.execution_count - first.execution_count
    earlier = {b.batch_size: b.compute_infer.count for b in first.batch_stats}
    grown = (
        (b.batch_size, b.compute_infer.count - earlier.get(b.batch_size, 0))
        for b in after.batch_stats
    )
    sizes = {int(size): int(count) for size, count in sorted(grown) if count}
    batches = sum(sizes.values())
    if batches:
        mean = sum(size * count for size, count in sizes.items()) / batches
    else:
        mean = inferences / executions if executions else 0.0
    x, y = first.inference_stats, after.inference_stats
    return ModelUse(
        model=after.name,
        version=after.version,
        inferences=inferences,
        executions=executions,
        batch_sizes=sizes,
        mean_batch_size=mean,
        succeeded=y.success.count - x.success.count,
        failed=y.fail.count - x.fail.count,
        queue_us=_mean_us(x.queue, y.queue),
        compute_input_us=_mean_us(x.compute_input, y.compute_input),
        compute_infer_us=_mean_us(x.compute_infer, y.compute_infer),
        compute_output_us=_mean_us(x.compute_output, y.compute_output),
    )


def _mean_us(before: StatisticDuration, after: StatisticDuration) -> float:
    count = after.count - before.count
    return (after.ns - before.ns) / count / 1000 if count else 0.0
