"""int8 and int4 as far as numbers go: what a model computes when weights, or what they are multiplied with, have been
rounded to few levels.

    round_weights(model, 8)
    loss = round_activations(loss)      # with the line before: W8A8

Everything keeps its dtype: this measures what quantisation would cost. Decay, writing strength and gates act on a
state that lives for the whole sequence and are a small part of the weights, so they are left alone by default, as are
norms, routers, short convolutions and the queries of AttnRes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Literal

from .hf_tensors import MATRIX, official_tensors
from .layers.parameters import at_least_float32
from .model import KimiLM

# Official names, by their ends.
SENSITIVE = (
    ".A_log",
    ".dt_bias",
    "_conv1d.weight",
    ".self_attn.b_proj.weight",
    ".f_a_proj.weight",
    ".f_b_proj.weight",
    ".g_proj.weight",
    ".g_a_proj.weight",
    ".g_b_proj.weight",
    "_res_proj.weight",
    "norm.weight",
    ".block_sparse_moe.gate.weight",
    ".e_score_correction_bias",
)


def round_weights(model: KimiLM, bits: int = 8, *, keep: Sequence[str] = SENSITIVE) -> None:
    """Round a model's weights, in place, to integers of so many bits; those whose official names end in one of `keep`
    stay.

    Every output channel of a matrix, row of the embedding and channel of a convolution has a scale of its own, its
    largest magnitude over the largest integer (127 of 8 bits, 7 of 4); a vector has one. keep=(): every weight.

    Raises:
      ValueError: bits that are not 2 to 8.
    """
    largest = _largest(bits)
    rounded = {}  # by variable: names of one variable, its experts', end alike
    for name, tensor in official_tensors(model).items():
        if not name.endswith(tuple(keep)):
            rounded[id(tensor.variable)] = tensor
    for variable, layout, *_ in rounded.values():
        channels = -2 if layout == MATRIX else -1
        variable[...] = _round(variable[...], channels, largest)


def round_activations(function: Callable, bits: int = 8, *, keep: Sequence[str] = SENSITIVE) -> Callable:
    """function(model, *arrays) -> arrays, computed with activations rounded to integers of so many bits wherever they
    are multiplied with a matrix whose official name does not end in one of `keep`.

    What the matrix sums over has one scale, its largest magnitude over the largest integer: that is a scale per token,
    and per expert it is sent to. Nothing else is rounded: not the matrices (see `round_weights`), attention's scores
    and values, KDA's recurrence, nor the mixtures of the depth. Products are in the model's dtype; bfloat16 rounds the
    scaled integers once more, to 8 bits of their own size. The rounding has no gradient.

    Layers may be scanned. It replaces the products in the function's jaxpr, so jit goes around it.

    Raises:
      ValueError: bits that are not 2 to 8.
      NotImplementedError: when called, for a matrix that is read by anything but a product, as experts are on a mesh.
    """
    largest = _largest(bits)

    def rounded(model: KimiLM, *arrays):
        graphdef, state = nnx.split(model)
        paths, variables = zip(*nnx.to_flat_state(state), strict=True)
        chosen = {
            id(tensor.variable)
            for name, tensor in official_tensors(model).items()
            if tensor.layout == MATRIX and not name.endswith(tuple(keep))
        }
        chosen_paths = {path for path, node in nnx.iter_graph(model) if id(node) in chosen}

        def plain(values, *arrays):
            leaves = [variable.replace(value) for variable, value in zip(variables, values, strict=True)]
            return function(nnx.merge(graphdef, nnx.from_flat_state(zip(paths, leaves, strict=True))), *arrays)

        values, others = [variable[...] for variable in variables], jax.tree.leaves(arrays)
        jaxpr, shapes = jax.make_jaxpr(plain, return_shape=True)(values, *arrays)
        matrices = [path in chosen_paths for path in paths] + [False] * len(others)
        found, _ = _evaluate(jaxpr, [*values, *others], matrices, largest)
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return rounded


def _largest(bits: int) -> int:
    if bits not in range(2, 9):
        raise ValueError(f"bits={bits!r} is not allowed: 2 to 8")
    return 2 ** (bits - 1) - 1


@functools.partial(jax.jit, static_argnums=(1, 2))
def _round(x: jax.Array, axis: int | tuple[int, ...], largest: int) -> jax.Array:
    wide = x.astype(at_least_float32(x.dtype))
    scale = jnp.max(jnp.abs(wide), axis=axis, keepdims=True) / largest
    return (jnp.round(wide / jnp.where(scale == 0, 1, scale)) * scale).astype(x.dtype)


# What leaves the numbers of a matrix as they are, so that its result is one too; and what only names a part.
_SAME_NUMBERS = (
    "convert_element_type", "reshape", "transpose", "broadcast_in_dim", "squeeze", "slice",
    "sharding_constraint", "reshard",
)  # fmt: skip
_CALLS = ("jit", "remat2", "closed_call", "custom_jvp_call", "custom_vjp_call")


def _evaluate(jaxpr, operands: Sequence[Any], matrices: Sequence[bool], largest: int) -> tuple[list, list[bool]]:
    """(what a jaxpr computes from its operands with activations rounded, which of that are matrices); matrices says
    which operands are."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*jaxpr.consts, *operands], strict=True))
    known = {variable for variable, is_one in zip(jaxpr.invars, matrices, strict=True) if is_one}

    def read(atom):
        return (atom.val, False) if isinstance(atom, Literal) else (values[atom], atom in known)

    for equation in jaxpr.eqns:
        operands, matrices = map(list, zip(*map(read, equation.invars), strict=True)) if equation.invars else ([], [])
        with equation.ctx.manager:
            found, are_matrices = _equation(equation, operands, matrices, largest)
        values |= zip(equation.outvars, found, strict=True)
        known |= {variable for variable, is_one in zip(equation.outvars, are_matrices, strict=True) if is_one}
    found, are_matrices = zip(*map(read, jaxpr.outvars), strict=True)
    return list(found), list(are_matrices)


def _equation(equation, operands, matrices, largest):
    """`_evaluate` of one equation."""
    name, params = equation.primitive.name, equation.params
    are_matrices = [False] * len(equation.outvars)
    if any(matrices):
        if name in ("dot_general", "ragged_dot_general"):
            numbers = params["dimension_numbers"] if name == "dot_general" else _dense(params)
            sums = numbers[0]  # the axes of either that are summed over
            pairs = zip(operands[:2], matrices, sums, strict=False)
            rounded = [x if is_one else _round(x, tuple(axes), largest) for x, is_one, axes in pairs]
            operands = [*rounded, *operands[2:]]
        elif name == "scan":
            params = params | {"jaxpr": _scanned(params["jaxpr"], matrices, largest)}
        elif name in _CALLS:
            return _evaluate(params.get("jaxpr", params.get("call_jaxpr")), operands, matrices, largest)
        elif name in _SAME_NUMBERS:
            are_matrices = [True]
        else:
            raise NotImplementedError(f"a matrix is read by {name!r}, and only products are known")
    found = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(params))
    return (found if equation.primitive.multiple_results else [found]), are_matrices


def _dense(params):
    return params["ragged_dot_dimension_numbers"].dot_dimension_numbers


def _scanned(body, matrices, largest):
    """The body of a scan over layers, rounded; what is carried from one to the next are never matrices."""

    def step(*operands):
        found, are_matrices = _evaluate(body, operands, matrices, largest)
        if any(are_matrices):
            raise NotImplementedError("a scan hands a matrix on, and only those that it reads are known")
        return found

    return jax.make_jaxpr(step)(*(variable.aval for variable in body.invars))
