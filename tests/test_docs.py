"""The reference site builds without a warning and has an entry for every public name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import kimi_jax
import kimi_jax.layers
import pallas_kernels

ROOT = Path(__file__).parents[1]


def test_site_builds_and_is_complete(tmp_path):
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stdout + build.stderr

    pages = {page.parent.name: page.read_text() for page in (tmp_path / "site" / "api").glob("*/index.html")}
    entries = {name: set(re.findall(r'<h\d id="[^"]*?(\w+)"', page)) for name, page in pages.items()}
    for page, package in (
        ("pallas_kernels", pallas_kernels),
        ("kimi_jax", kimi_jax),
        ("layers", kimi_jax.layers),
    ):
        missing = set(package.__all__) - entries[page]
        assert not missing, f"docs/api/{page}.md has no entry for {sorted(missing)}; have they docstrings?"

    # Pages read without a network: nothing that runs or styles them comes from elsewhere.
    for page in (tmp_path / "site").rglob("*.html"):
        assert not re.findall(r'<(?:script[^>]*src|link[^>]*stylesheet[^>]*href)="https?:', page.read_text()), page
