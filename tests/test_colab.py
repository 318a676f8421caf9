"""Every notebook under colab/ runs from top to bottom at toy size, and is kept without outputs."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
PICTURES = {
    "quickstart": 3,  # the loss curve, the forgetting, the mixing along the depth
    "kda_from_zero": 3,  # three memories asked, the same by token, the accuracy
    "attnres_from_zero": 4,  # sums that grow, weights by query, the recorded models, the trained ones
    "reproduce_a_table": 1,  # the report's
}


def test_every_notebook_is_known():
    assert {path.stem for path in NOTEBOOKS} == PICTURES.keys()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_without_outputs(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None, cell.source


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("KIMI_JAX_TOY", "1")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # most of the time would go into the compiler
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # one device, as a reader's machine has
    monkeypatch.delenv("MPLBACKEND", raising=False)
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()

    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == PICTURES[path.stem]
