"""A stream of tensors in portions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor


def in_buckets(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
    """(name, tensor) pairs as dicts of at most `bucket_bytes`; a larger tensor has a bucket of its own.

    Tensors are copied, so that a bucket stays what it was when the model's next step writes into its parameters.
    """
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            full, bucket, size = [bucket], {}, 0
            yield full.pop()  # Nothing here holds it while the next one is made.
        bucket[name] = tensor.detach().clone()
        size += tensor.nbytes
    if bucket:
        yield bucket
