"""A model's configuration in force, as Triton's clients read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2

from batcher.serving.describe import ladder
from batcher.serving.model import Model
from engines import FakeEngine, FakeOptions, TensorSpec

from .desk import made_model

MakeModel = Callable[..., Model]


@pytest.fixture
def make() -> Iterator[MakeModel]:
    """Makes models, and closes them."""
    made: list[Model] = []

    def make_model(*engine: Any, **options: Any) -> Model:
        made.append(made_model(*engine, **options))
        return made[-1]

    yield make_model
    for model in made:
        model.close()


def config_of(model: Model) -> Any:
    """What a client gets."""
    encoded = model.config_message().SerializeToString()
    return model_config_pb2.ModelConfig.FromString(encoded)


def test_dims_leave_the_batch_axis_out(make: MakeModel) -> None:
    """Names, types and inner sizes are the model's; -1 stands for any size."""
    x = TensorSpec("x", "INT64", ("N", "S", 3))
    y = TensorSpec("y", "INT64", ("N", 2))
    engine = FakeEngine(FakeOptions(inputs=(x,), outputs=(y,)))

    config = config_of(make(engine))

    assert (config.name, config.max_batch_size) == ("m", 8)
    (given,), (output,) = config.input, config.output
    assert (given.name, list(given.dims)) == ("x", [-1, 3])
    assert given.data_type == model_config_pb2.TYPE_INT64
    assert (output.name, list(output.dims)) == ("y", [2])


def test_the_queue_is_described(make: MakeModel) -> None:
    """Delay, preferred sizes, queue and timeout are those in force."""
    model = make(
        policy="window",
        max_delay_us=500,
        preferred=(4, 8),
        max_queue=77,
        timeout_ms=2.5,
        allow_timeout_override=False,
        slots=3,
    )

    config = config_of(model)

    batching = config.dynamic_batching
    queue = batching.default_queue_policy
    assert batching.max_queue_delay_microseconds == 500
    assert list(batching.preferred_batch_size) == [4, 8]
    assert (queue.max_queue_size, queue.default_timeout_microseconds) == (77, 2500)
    assert queue.allow_timeout_override is False
    assert config.instance_group[0].count == 3
    assert config.parameters["policy"].string_value == "window"
    assert config.parameters["rungs"].string_value == "1,2,4,8"


def test_the_largest_values_can_be_told(make: MakeModel) -> None:
    """Every value that the configuration allows fits into the message."""
    model = make(
        policy="window",
        max_delay_us=3_600_000_000,
        max_queue=2**31 - 1,
        timeout_ms=86_400_000,
    )

    config = config_of(model)

    queue = config.dynamic_batching.default_queue_policy
    assert config.dynamic_batching.max_queue_delay_microseconds == 3_600_000_000
    assert queue.max_queue_size == 2**31 - 1
    assert queue.default_timeout_microseconds == 86_400_000_000


@pytest.mark.parametrize(
    ("rungs", "expected"),
    [
        ((1,), "1"),
        ((1, 2), "1,2"),
        ((1, 2, 3), "1-3"),
        (tuple(range(1, 65)), "1-64"),
        ((1, 2, 4), "1,2,4"),
        ((4, 8), "4,8"),
    ],
)
def test_rungs_are_shown_shortly(rungs: tuple[int, ...], expected: str) -> None:
    """A ladder with every step is a range, any other a list."""
    assert ladder(rungs) == expected
