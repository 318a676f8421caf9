"""From a stream of tokens to batches of packed rows, with a position that can be saved and restored."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from experiments.tokenization import END_OF_DOCUMENT

if TYPE_CHECKING:
    import grain


class Batch(NamedTuple):
    """Both int32 [B, T]. Each token is predicted from those before it in its document and row."""

    tokens: np.ndarray
    segment_ids: np.ndarray  # non-decreasing from 0 in each row, one id per document; -1 is padding


class PackedRows:
    """Rows of T tokens cut from a stream, T-1 apart: neighbours share a token, so that each is predicted exactly once.

    A document may be cut by the edge of a row; its second part then starts without context.
    """

    def __init__(self, stream: np.ndarray, sequence_length: int, *, pad_last: bool = False):
        """stream [N]; with pad_last the remainder makes a last, padded row, otherwise it is dropped."""
        self._stream, self._length, self._apart = stream, sequence_length, sequence_length - 1
        targets = len(stream) - 1
        self._rows = -(-targets // self._apart) if pad_last else targets // self._apart

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = index * self._apart
        tokens = np.asarray(self._stream[start : start + self._length], np.int32)
        segment_ids = np.zeros(len(tokens), np.int32)
        segment_ids[1:] = np.cumsum(tokens[:-1] == END_OF_DOCUMENT)
        padding = (0, self._length - len(tokens))
        return {"tokens": np.pad(tokens, padding), "segment_ids": np.pad(segment_ids, padding, constant_values=-1)}


def training_batches(
    stream: np.ndarray, *, sequence_length: int, batch_size: int, seed: int
) -> "grain.DatasetIterator":
    """Endless shuffled batches; every epoch has its own order. get_state() and set_state() save and restore the place.

    Elements are {"tokens", "segment_ids"}, see Batch. Raises ValueError if the stream holds fewer rows than a batch.
    """
    import grain  # not with the file: a benchmark's batches need no pipeline

    rows = PackedRows(stream, sequence_length)
    if len(rows) < batch_size:
        raise ValueError(
            f"the training data holds {len(stream)} tokens, {len(rows)} rows of sequence_length={sequence_length}; "
            f"batch_size={batch_size} needs as many rows: give more data, shorter rows or a smaller batch"
        )
    dataset = grain.MapDataset.source(rows).shuffle(seed=seed).repeat().batch(batch_size, drop_remainder=True)
    # Rows are slices of an array in memory: more threads would only take cores from the model.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def validation_batches(stream: np.ndarray, *, sequence_length: int, batch_size: int) -> Iterator[Batch]:
    """One pass over the stream in order; the last batch is filled up with rows of padding."""
    rows = PackedRows(stream, sequence_length, pad_last=True)
    for start in range(0, len(rows), batch_size):
        taken = [rows[i] for i in range(start, min(start + batch_size, len(rows)))]
        missing = ((0, batch_size - len(taken)), (0, 0))
        tokens = np.pad(np.stack([row["tokens"] for row in taken]), missing)
        segment_ids = np.pad(np.stack([row["segment_ids"] for row in taken]), missing, constant_values=-1)
        yield Batch(tokens, segment_ids)
