"""How much device memory an engine needs, as arithmetic that people can follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Device memory of one engine, all in bytes.

    Attributes:
        weights: of the plan.
        activation: of one lane.
        buffers: inputs and outputs of one lane.
        graphs: of all lanes.
        lanes: how many there are to be.
    """

    weights: int
    activation: int
    buffers: int
    graphs: int
    lanes: int

    @property
    def total(self) -> int:
        """Of everything."""
        lane = self.activation + self.buffers
        return self.weights + self.lanes * lane + self.graphs

    def text(self) -> str:
        """The sum, term by term, in MiB."""
        return (
            f"{_mib(self.total)} MiB = {_mib(self.weights)} of weights + {self.lanes} "
            f"{'lane' if self.lanes == 1 else 'lanes'} x ({_mib(self.activation)} of "
            f"activations + {_mib(self.buffers)} of buffers) + {_mib(self.graphs)} of "
            "graphs"
        )

    def refusal(self, name: str, device: int, free: int, total: int) -> str:
        """What to say when the device has not enough.

        Args:
            name: of the model.
            device: index of the GPU.
            free, total: bytes of the device, with all but the last lane in place.
        """
        lane = self.activation + self.buffers
        return (
            f"{name}: GPU {device} has not the memory for lane {self.lanes}: it takes "
            f"{_mib(lane)} MiB, and {_mib(free)} of {_mib(total)} MiB are free. In all "
            f"the model needs {self.text()}. Use fewer slots, a smaller max_batch or "
            "shorter buckets; what runs already is not affected"
        )


def _mib(size: int) -> str:
    return f"{size / _MIB:.0f}" if size >= _MIB or not size else "<1"
