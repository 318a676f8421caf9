"""What the report says of profiles whose growth is known."""

import numpy as np

from experiments import report, report_dynamics
from experiments.configs import SOURCES, TABLES
from experiments.report_dynamics import quarters
from experiments.run_store import RunStore

TABLE = TABLES["attn_res_dynamics"]
GROWTH = {"PreNorm": 6.0, "Full": 1.2, "Block": 0.7}  # of outputs, first sub-layer to last; gradients fall so


def profiles(row: str, factor: float) -> list[dict]:
    """Of eight sub-layers, twice; the first one before anything has grown."""
    outputs = np.geomspace(1, GROWTH[row] * factor, 8)
    weights = [None] * 9 if row == "PreNorm" else [None, *([1 / n] * n for n in range(2, 10))]
    return [
        {"step": step, "output_rms": list(rms), "gradient_rms": list(1e-4 / rms), "weights": weights}
        for step, rms in ((200, np.ones(8)), (400, outputs))
    ]


def write(path, *, factors: dict[str, tuple[float, ...]]) -> RunStore:
    store = RunStore(path, sources=SOURCES, runs=path.parent / "runs", command="python -m it")
    for row in TABLE.rows:
        for seed, factor in enumerate(factors.get(row, (1.0,))):
            config = {
                "table": TABLE.name,
                "row": row,
                "seed": seed,
                "model": {},
                "training": {},
                "corpus": {"train": "0"},
            }
            result = {
                "ended": "steps",
                "bits_per_byte": 1.5,
                "tokens_per_second": 5.0,
                "profiles": profiles(row, factor),
            }
            store.record(config, result, seconds=1.0)
    return store


def test_directions_are_computed_from_the_last_profiles(tmp_path):
    assert quarters([1, 2, 3, 4, 5, 6, 7, 8]) == (1.5, 7.5)
    path = tmp_path / f"{TABLE.name}.json"
    write(path, factors={"PreNorm": (1.0, 1.1)})
    text = report.report(tmp_path).read_text()
    assert "outputs of PreNorm grow (as in the paper); outputs of Full do not grow (as in the paper)" in text
    assert "gradients of Full fall less than those of PreNorm (as in the paper)" in text
    # 6 ** (6 / 7) from one quarter's middle to the other's, and 6.6 for the other seed; the paper's 9.6 over 0.6.
    growth = (6 ** (6 / 7) + 6.6 ** (6 / 7)) / 2
    assert f"| {growth:.3g} | 16 |" in text and "| saw-tooth of 0.1 to 1.9" in text
    assert f"| {growth:.3g} | 24 |" in text
    assert path.with_suffix(".png").stat().st_size > 20_000 and f"]({TABLE.name}.png)" in text
    write(path, factors={"PreNorm": (0.2, 1.1), "Full": (4.0,)})
    text = "\n".join(report_dynamics.section(TABLE, path))
    assert "outputs of PreNorm grow in some seeds alone (not resolved)" in text
    assert "outputs of Full grow (not as in the paper)" in text
    assert "gradients of Full do not fall less than those of PreNorm (not as in the paper)" in text
