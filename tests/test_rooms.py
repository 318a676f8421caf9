"""The design's arrows: experiments -> kimi_jax -> pallas_kernels, and kernels that need jax alone."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {  # what a room may import besides the standard library
    "pallas_kernels": {"pallas_kernels", "jax", "jaxlib", "numpy"},
    "kimi_jax": {"pallas_kernels", "kimi_jax", "jax", "numpy", "flax", "orbax", "etils", "safetensors"},
}


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_of_a_room(room):
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                assert top in ALLOWED[room] or top in sys.stdlib_module_names, f"{path} imports {name}"


def test_kernels_work_with_jax_alone():
    """A call in a process where nothing but jax and what jax itself needs can be imported."""
    program = """
import sys
import tomllib
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {'flax', 'absl', 'chex', 'optax', 'orbax', 'kimi_jax', 'experiments', 'grain'}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
import jax.numpy as jnp
import pallas_kernels
x = jnp.ones((1, 3, 1, 4))
print(pallas_kernels.kda(x, x, x, -x, x[..., 0]).output.shape, pallas_kernels.attn_res([x, x], jnp.zeros(4)).shape)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["(1,", "3,", "1,", "4)", "(1,", "3,", "1,", "4)"]


def test_the_kernels_own_package_lists_every_folder():
    """setuptools takes the packages that its file names: a forgotten one would be missing after an install."""
    folder = ROOT / "pallas_kernels"
    listed = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    present = [".".join(p.parent.relative_to(ROOT).parts) for p in folder.rglob("__init__.py")]
    assert sorted(listed) == sorted(present)
