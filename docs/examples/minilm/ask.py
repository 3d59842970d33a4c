"""Sends sentences of many lengths at once, and compares with the model alone.

Its argument is the model's file; the daemon serves it as `minilm` on 127.0.0.1:8001.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
import onnxruntime
import tritonclient.grpc.aio as grpcclient


def sentence(random: np.random.Generator, tokens: int) -> dict[str, Any]:
    """Token ids between [CLS] and [SEP], as a tokenizer makes them, and a mask."""
    words = random.integers(1000, 29000, tokens - 2)
    ids = np.concatenate([[101], words, [102]])[np.newaxis]
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


async def ask(client: Any, arrays: dict[str, Any]) -> Any:
    """One request of one sentence; it knows nothing of buckets or padding."""
    inputs = []
    for name, array in arrays.items():
        tensor = grpcclient.InferInput(name, array.shape, "INT64")
        inputs.append(tensor.set_data_from_numpy(array))
    return await client.infer("minilm", inputs)


async def main(path: str) -> None:
    """64 sentences at once, then each alone."""
    random = np.random.default_rng(0)
    sentences = [sentence(random, int(n)) for n in random.integers(3, 129, 64)]
    lengths = [s["input_ids"].shape[1] for s in sentences]
    print(f"{len(lengths)} sentences of {min(lengths)} to {max(lengths)} tokens")

    async with grpcclient.InferenceServerClient("127.0.0.1:8001") as client:
        answers = await asyncio.gather(*(ask(client, s) for s in sentences))
        statistics = await client.get_inference_statistics("minilm")
    sizes = {
        int(size.batch_size): int(size.compute_infer.count)
        for size in statistics.model_stats[0].batch_stats
    }
    print(f"batches (rows: how many): {sizes}")

    alone = onnxruntime.InferenceSession(path)
    names = [output.name for output in alone.get_outputs()]
    largest = dict.fromkeys(names, 0.0)
    for arrays, answer in zip(sentences, answers, strict=True):
        for name, expected in zip(names, alone.run(None, arrays), strict=True):
            got = answer.as_numpy(name)
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
            largest[name] = max(largest[name], float(np.abs(got - expected).max()))
    print("largest difference from the same sentence alone and unpadded:")
    for name, difference in largest.items():
        print(f"  {name:16} {difference:.1e}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
