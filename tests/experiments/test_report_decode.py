"""The report of decoding, from a made-up file in which much is missing."""

import json

import pytest

from experiments import report
from experiments.benchmark_decode import merge


def measured(started: str, case: str, sizes: str, bytes_: dict, **times):
    """Of one run. times: {"PART_IMPLEMENTATION": (ms, rows, tokens)}."""
    ms = {}
    for name, (median, rows, tokens) in times.items():
        part, _, implementation = name.partition("_")
        ms[f"{case} {part}: {implementation}"] = {
            "median": median, "all": [median], "rows": rows, "ms_per_token": median / rows / tokens, "cache_bytes": 1,
        }  # fmt: skip
    about = {"date": "2026-01-02", "command": "python -m x", "card": "H200", "versions": {"jax": "0.99"}}
    return {
        "suite": "decode", "started": started, **about, "case": {case: sizes}, "ms": ms, "worst_difference": {},
        "cache_bytes_of_27_layers": bytes_,
    }  # fmt: skip


RUNS = [
    measured(
        "monday", "1M-B1", "context=1048576 batch=1", {"1M hybrid": 2 << 20, "1M mla": 8 << 20},
        step_hybrid=(4.0, 1, 1), step_block=(4.02, 1, 1), piece_hybrid=(50.0, 1, 2048), piece_mla=(150.0, 1, 2048),
    ),
    measured(
        "monday", "4K-B1", "context=4096 batch=1", {"4K hybrid": 3 << 20},
        step_hybrid=(2.0, 1, 1), step_mla=(3.0, 1, 1), step_kda=(1.5, 1, 1), piece_two_phase=(9.0, 1, 2048),
        piece_hybrid=(10.0, 1, 2048),
    ),
    measured("tuesday", "1M-Bmax", "context=1048576 batch=largest", {}, step_hybrid=(4.0, 80, 1)),
    measured("friday", "1M-Bmax", "context=1048576 batch=largest", {}, step_mla=(3.0, 2, 1)),
]  # fmt: skip


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    content = {}
    for run in RUNS:
        content = merge(content, run)
    (folder / "decode.json").write_text(json.dumps(content))
    report.report(folder)
    return folder, (folder / "README.md").read_text()


def test_ours_stand_beside_the_papers(reported):
    folder, text = reported
    tables = text.split("| context |")
    rows = [[line for line in table.splitlines() if line.startswith(("| 4K", "| 1M"))] for table in tables[1:]]
    steps, largest, pieces, caches, overheads = rows
    assert steps == [
        "| 4K | 2.00 | 3.00 | 1.50 | 1.50x | 5.09 | 5.32 | 1.05x |",
        "| 1M | 4.00 | not measured | as at 4K | not measured | 7.99 | 17.76 | 2.2x |",
    ]
    assert largest == [
        "| 4K | not measured | not measured | not measured | not measured | 100 | 92 | 0.92x |",
        "| 1M | 80 rows, 50.0 us | 2 rows, 1500 us | not measured | 30.00x ‡ | 1840 | 11480 | 6.3x |",
    ]
    assert pieces == [
        "| 4K | 2048 | 10.00 | not measured | not measured | not measured | 0.0970 | 0.0650 | 0.67x |",
        "| 1M | 2048 | 50.00 | 150.00 | not measured | 3.00x | 22.7 | 65.4 | 2.9x |",
    ]
    assert caches == [
        "| 4K | 3.0 | not measured | not measured | not measured | up to 75% |",
        "| 1M | 2.0 | 8.0 | not measured | 75.0% | up to 75% |",
    ]
    assert overheads == [
        "| 4K | not measured | not measured | not measured | -10.0% | less than 2% |",
        "| 1M | +0.5% | not measured | not measured | not measured | less than 2% |",
    ]
    assert (folder / "decode.png").stat().st_size > 10_000 and "(decode.png)" in text


def test_what_the_numbers_are_is_said(reported):
    _, text = reported
    assert "on H200, 2026-01-02, jax 0.99: `python -m experiments.benchmark --suite=decode`" in text
    for said in (
        "8 of the 27 layers",
        "random weights",
        "one dense feed-forward of the same active width",
        "‡ The two",
    ):
        assert said in text


def test_a_file_with_nothing_in_it_yet(tmp_path):
    empty = {"suite": "decode", "case": {}, "ms": {}, "ratios": {}, "cache_bytes_of_27_layers": {}}
    (tmp_path / "decode.json").write_text(json.dumps(empty))
    text = report.report(tmp_path).read_text()
    assert "not measured yet" in text and "‡" not in text


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"suite": "kda_gpu", "case": {}}', "suite='kda_gpu' is not allowed: decode"),
        ('{"suite": "decode", "case": {}, "ms": {}}', "it has no cache_bytes_of_27_layers, ratios"),
        ('{"suite": "decode"}', "KeyError.'case'"),
        ("[]", "TypeError"),
        ("{", "JSONDecodeError"),
    ],
)
def test_another_file_is_refused_by_name(tmp_path, text, message):
    (tmp_path / "decode.json").write_text(text)
    with pytest.raises(ValueError, match=rf"decode.json is no result of --suite=decode: .*{message}"):
        report.report(tmp_path)
