"""Axes that are padded, cut, listed or grouped by equality: each answer as if alone."""

from __future__ import annotations

import grpc
import models
import numpy as np
import pytest

from .client import Client, assert_refused, result

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def tokens(rows: int, length: int, seed: int) -> np.ndarray:
    """Ids for `seq`."""
    return np.random.default_rng(seed).integers(0, 100, (rows, length))


def mean(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """What `seq` computes, by numpy."""
    rows = models.seq_table()[ids] * mask[..., None]
    return rows.sum(1) / np.maximum(mask.sum(1, keepdims=True), 1)


def mask_of(ids: np.ndarray) -> np.ndarray:
    """A mask that leaves some tokens out."""
    mask = np.ones_like(ids)
    mask[:, ::3] = 0
    return mask


def test_lengths_share_a_padded_run(client: Client) -> None:
    """Two lengths of one bucket run together, padded, and give what they give alone."""
    ids = [tokens(1, 3, 1), tokens(1, 7, 2)]
    calls = [client.start("seq_pair", ids=i, mask=mask_of(i)) for i in ids]
    answers = [result(call) for call in calls]
    alone = [client.infer("seq", ids=i, mask=mask_of(i)) for i in ids]

    assert [a["n"].tolist() for a in answers] == [[[2]], [[2]]]
    assert [a["len"].tolist() for a in answers] == [[[8]], [[8]]]  # both were padded
    assert [a["len"].tolist() for a in alone] == [[[3]], [[7]]]
    for padded, plain, i in zip(answers, alone, ids, strict=True):
        np.testing.assert_allclose(padded["y"], plain["y"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(plain["y"], mean(i, mask_of(i)), rtol=0, atol=1e-5)


def test_padding_holds_the_pad_value(client: Client) -> None:
    """Padded places hold the configured value: sum(ids + 1) grows by one for each."""
    ids = tokens(2, 5, 3)
    answer = client.infer("seq_padded", ids=ids, mask=np.ones_like(ids))

    assert answer["rawsum"].tolist() == (ids.sum(1, keepdims=True) + 5 + 3).tolist()


@pytest.mark.parametrize("length", [1, 8, 9, 16, 17, 32])
def test_the_smallest_bucket_that_holds(client: Client, length: int) -> None:
    """A length runs at the smallest bucket that holds it."""
    ids = tokens(1, length, length)
    answer = client.infer("seq_padded", ids=ids, mask=np.ones_like(ids))

    assert answer["len"].tolist() == [[min(b for b in (8, 16, 32) if b >= length)]]
    np.testing.assert_allclose(
        answer["y"], mean(ids, np.ones_like(ids)), rtol=0, atol=1e-5
    )


def test_buckets_do_not_mix(client: Client) -> None:
    """Lengths of different buckets do not share a run; each has its own pair."""
    ids = [tokens(1, length, length) for length in (3, 12, 7, 16)]
    calls = [client.start("seq_pair", ids=i, mask=np.ones_like(i)) for i in ids]
    answers = [result(call) for call in calls]

    assert [a["len"][0, 0] for a in answers] == [8, 16, 8, 16]
    assert [a["n"][0, 0] for a in answers] == [2] * 4


def test_too_long_is_refused(client: Client) -> None:
    """A length above the largest bucket is refused, and the text names both."""
    ids = tokens(1, 33, 0)

    assert_refused(
        lambda: client.infer("seq_padded", ids=ids, mask=np.ones_like(ids)),
        INVALID,
        "'S' has 33",
        "at most 32",
    )


def test_too_long_is_cut_where_configured(client: Client) -> None:
    """With too_long = "truncate" the largest bucket's worth is used."""
    ids = tokens(2, 40, 4)
    answer = client.infer("seq_cut", ids=ids, mask=np.ones_like(ids))

    assert answer["len"].tolist() == [[32], [32]]
    first = ids[:, :32]
    np.testing.assert_allclose(
        answer["y"], mean(first, np.ones_like(first)), rtol=0, atol=1e-5
    )


def test_listed_sizes(client: Client) -> None:
    """Where sizes are listed these run as they are, others are refused by the list."""
    for length in (4, 8):
        ids = tokens(1, length, length)
        answer = client.infer("seq_sizes", ids=ids, mask=np.ones_like(ids))
        assert answer["len"].tolist() == [[length]]

    ids = tokens(1, 5, 0)
    assert_refused(
        lambda: client.infer("seq_sizes", ids=ids, mask=np.ones_like(ids)),
        INVALID,
        "'S' has 5",
        "one of [4, 8]",
    )


def test_other_lengths_are_grouped_by_equality(client: Client) -> None:
    """Without a table only equal lengths share a run, and nothing is padded."""
    ids = [tokens(1, length, i) for i, length in enumerate((3, 5, 3, 5))]
    calls = [client.start("seq2", ids=i, mask=np.ones_like(i)) for i in ids]
    answers = [result(call) for call in calls]

    assert [a["n"][0, 0] for a in answers] == [2] * 4
    assert [a["len"][0, 0] for a in answers] == [3, 5, 3, 5]
    assert [a["rawsum"][0, 0] for a in answers] == [i.sum() + i.size for i in ids]


def test_outputs_are_cut_back(client: Client) -> None:
    """An output that follows a padded axis comes back at its caller's size."""
    sent = [np.full((1, size), size / 3, np.float32) for size in (2, 3)]
    calls = [client.start("id_pair", x=x) for x in sent]
    answers = [result(call)["y"] for call in calls]

    assert [a.tobytes() for a in answers] == [x.tobytes() for x in sent]
    assert [a.shape for a in answers] == [(1, 2), (1, 3)]


@pytest.mark.parametrize("size", range(9))
def test_every_size_of_a_cut_axis(client: Client, size: int) -> None:
    """Sizes from 0 to the largest bucket, several rows and split requests included."""
    for rows in (1, 3, 70):
        x = np.random.default_rng(size).normal(size=(rows, size)).astype(np.float32)
        answer = client.infer("id_cut", x=x)["y"]

        assert answer.shape == x.shape
        assert answer.tobytes() == x.tobytes()
