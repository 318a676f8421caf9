"""The baseline is a proper distribution, and a strong one."""

import numpy as np

from experiments.trigram import Trigram

TEXT = np.frombuffer(b"the cat sat on the mat; the rat ate the hat\0" * 40 + b"one other document\0", np.uint8)


def test_probabilities_sum_to_one_in_every_context():
    trigram = Trigram.fit(TEXT)
    following = np.arange(256)
    for a, b in [(b"t", b"h"), (b"\0", b"t"), (b"z", b"e"), (b"z", b"z"), (b"\xff", b"\0")]:
        p = trigram.probabilities(np.full(256, a[0]), np.full(256, b[0]), following)
        assert p.min() > 0
        np.testing.assert_allclose(p.sum(), 1, rtol=1e-12)


def test_counts_every_triple_across_chunks(monkeypatch):
    whole = Trigram.fit(TEXT).counts
    assert whole.sum() == len(TEXT) - 2
    assert whole[ord("t"), ord("h"), ord("e")] == 4 * 40 + 1
    monkeypatch.setattr("experiments.trigram._CHUNK", 100)
    np.testing.assert_array_equal(Trigram.fit(TEXT).counts, whole)


def test_beats_plain_discounting_on_real_text():
    from experiments.text import load_corpus
    from experiments.tokenization import ByteTokenizer

    corpus = load_corpus("stdlib", ByteTokenizer())
    validation = corpus.validation[:100_000]
    smoothed = Trigram.fit(corpus.train).bits_per_byte(validation)
    assert smoothed < plain_absolute_discounting(corpus.train, validation)
    assert 1.8 < smoothed < 3.2


def plain_absolute_discounting(train, validation, discount=0.7):
    """Interpolation with one discount and ordinary counts below, written densely and naively."""
    counts = Trigram.fit(train).counts
    pairs = counts.sum(0)
    p1 = (pairs.sum(0) + 0.5) / (pairs.sum() + 128)

    def interpolate(n, lower):
        total = np.maximum(n.sum(-1, keepdims=True), 1)
        taken = np.where(n.sum(-1, keepdims=True) > 0, discount * (n > 0).sum(-1, keepdims=True) / total, 1.0)
        return np.maximum(n - discount, 0) / total + taken * lower

    p2 = interpolate(pairs, p1)
    a, b, c = (np.asarray(x, int) for x in (validation[:-2], validation[1:-1], validation[2:]))
    contexts, index = np.unique(a * 256 + b, return_inverse=True)
    p3 = interpolate(counts[contexts >> 8, contexts & 255], p2[contexts & 255])
    return -np.log2(p3[index, c][b != 0]).mean()
