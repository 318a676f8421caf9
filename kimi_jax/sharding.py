"""Where arrays live: mesh axes, logical-axis rules, and the few operations that must know about them.

Parameters carry logical names (`nnx.Param(value, axes=("embed", "heads"))`), activations are named where they are
constrained, and `ShardingRules` says which mesh axes each name is laid out over. Nothing else decides placement.

Two kinds of parallelism come out of the rules: FSDP (parameters cut along "embed" over the mesh axis "fsdp" and
gathered where they are used, see `gathered`) and tensor parallelism (heads, feed-forward width and vocabulary cut over
"tensor"; activations between sub-layers are whole). The batch is cut over "data" and "fsdp".

All of it works under a mesh set by `jax.set_mesh`, with Auto axes (constraints guide the compiler) or Explicit ones
(shardings are part of the type), and is a no-op without a mesh.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import sharded

MESH_AXES = ("data", "fsdp", "tensor")


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """For each logical axis the mesh axes that it is cut over; axes that the mesh lacks are ignored."""

    batch: tuple[str, ...] = ("data", "fsdp")
    embed: tuple[str, ...] = ("fsdp",)  # the hidden width D of parameters (activations keep it whole)
    heads: tuple[str, ...] = ("tensor",)  # head counts and flattened heads * dim, always head-major
    ffn: tuple[str, ...] = ("tensor",)
    vocab: tuple[str, ...] = ("tensor",)
    experts: tuple[str, ...] = ()  # whole: each device holds a slice of every expert's width, so routing stays local

    def __post_init__(self):
        for field in dataclasses.fields(self):
            axes = getattr(self, field.name)
            if unknown := set(axes) - set(MESH_AXES):
                raise ValueError(f"rule {field.name}={axes} names {sorted(unknown)}; mesh axes are {MESH_AXES}")

    def mesh_axes(self, name: str | None) -> tuple[str, ...]:
        """The mesh axes of one logical name; ValueError for a name without a rule."""
        if name is None:
            return ()
        if name not in (names := [field.name for field in dataclasses.fields(self)]):
            raise ValueError(f"logical axis {name!r} has no rule; known: {names}")
        return getattr(self, name)


RULES = ShardingRules()


def make_mesh(
    sizes: dict[str, int], *, axis_type: AxisType = AxisType.Auto, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh from sizes such as {"data": 2, "tensor": 4}; takes the first prod(sizes) devices.

    Raises ValueError for an unknown axis name, a size below 1, or more devices than there are.
    """
    if unknown := set(sizes) - set(MESH_AXES):
        raise ValueError(f"mesh axes {sorted(unknown)} are unknown; allowed: {MESH_AXES}")
    if bad := {axis: size for axis, size in sizes.items() if size < 1}:
        raise ValueError(f"mesh sizes must be at least 1, got {bad}")
    devices = list(jax.devices() if devices is None else devices)
    if (needed := math.prod(sizes.values())) > len(devices):
        raise ValueError(f"mesh {sizes} needs {needed} devices, there are {len(devices)}")
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(axis_type,) * len(sizes), devices=devices[:needed]
    )


def partition_spec(
    names: Sequence[str | None], mesh: Mesh | jax.sharding.AbstractMesh, rules: ShardingRules = RULES
) -> P:
    """Logical names, one per dimension, as a PartitionSpec of `mesh`. A mesh axis taken by an earlier dimension is
    skipped, as are the axes that a surrounding shard_map has made Manual."""
    used = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual}
    entries = []
    for name in names:
        axes = tuple(axis for axis in rules.mesh_axes(name) if axis in mesh.axis_names and axis not in used)
        used.update(axes)
        entries.append(axes if len(axes) > 1 else axes[0] if axes else None)
    return P(*entries)


def current_spec(names: Sequence[str | None]) -> P | None:
    """`partition_spec` on the mesh set by jax.set_mesh, or None without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else partition_spec(names, mesh)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Lay an activation out by logical names, one per dimension: constrain(x, "batch", None, "heads").

    A batch that the mesh does not divide is left whole; any other dimension that does not divide is a ValueError.
    """
    spec = current_spec(names)
    return x if spec is None else _place(x, _fit(spec, x.shape, names))


def spread(x: jax.Array, shape: Sequence[int], *names: str | None) -> jax.Array:
    """jnp.broadcast_to(x, shape), laid out by logical names from the start.

    Constraining a whole broadcast instead would, on Explicit axes, gather its cotangent before summing it.
    """
    spec = current_spec(names)
    if spec is None:
        return jnp.broadcast_to(x, shape)
    spec = _fit(spec, shape, names)
    return _place(jnp.broadcast_to(x, shape, out_sharding=_out_sharding(spec)), spec)


def per_shard(function: Callable, rows: int) -> Callable:
    """kda or kda_step such that every device computes its own rows and heads, on a mesh with Auto axes too.

    On Explicit axes the functions see how their arguments lie; on Auto ones they have to be told, since the compiler
    cannot split a kernel. A number of rows that the mesh does not divide is left whole.
    """
    if not any(jax.sharding.get_abstract_mesh().shape[axis] > 1 for axis in _axes_of_kind(AxisType.Auto)):
        return function
    batch, heads = current_spec(("batch", "heads"))
    return sharded(function, batch=_fit(P(batch), (rows,), ("batch",))[0], heads=heads)


def on_shards(function: Callable, arrays: Sequence[jax.Array], names: Sequence[Sequence[str | None]]) -> jax.Array:
    """function(*arrays), each device on its own parts of arrays that are laid out by logical names; the result is laid
    out as the first array. For a kernel, which the compiler cannot split.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not _axes_of_kind(AxisType.Explicit) and all(mesh.shape[axis] == 1 for axis in _axes_of_kind(AxisType.Auto)):
        return function(*arrays)
    specs = tuple(_fit(current_spec(n), x.shape, n) for x, n in zip(arrays, names, strict=True))
    placed = [_place(x, spec) for x, spec in zip(arrays, specs, strict=True)]
    return jax.shard_map(function, in_specs=specs, out_specs=specs[0])(*placed)


def gathered(w: jax.Array, axes: Sequence[str | None] | None) -> jax.Array:
    """A parameter's value, with its logical axes, as the computation uses it: whole along "fsdp", still cut along
    "tensor". The gradient goes the other way, back to the cut layout. Cast first, so that the small type travels.
    """
    axes = (None,) * w.ndim if axes is None else axes
    spec = current_spec(axes)
    if spec is None:
        return w
    cut = _fit(spec, w.shape, axes)
    return _place(_place(w, cut), _without(cut, "fsdp"))  # the first placement is there for its transpose


def project(x: jax.Array, w: nnx.Variable, out_names: Sequence[str | None]) -> jax.Array:
    """x [..., D] @ w [D, F] in the dtype of x, laid out by out_names (one logical name per dimension of the result).

    w is gathered over fsdp at use. Float32 inputs get float32-grade products on every device; bf16 ones accumulate in
    float32. Under tensor parallelism x is laid out along D as w is: whole for column-parallel (F cut), cut for
    row-parallel projections (F whole; the shards are summed).
    """
    w_DF = gathered(w[...].astype(x.dtype), logical_axes(w))
    precision = None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    dimensions = (((x.ndim - 1,), (0,)), ((), ()))
    spec = current_spec(out_names)
    if spec is None:
        return jax.lax.dot_general(x, w_DF, dimensions, precision=precision)
    spec = _fit(spec, (*x.shape[:-1], w_DF.shape[-1]), out_names)
    y = jax.lax.dot_general(x, w_DF, dimensions, precision=precision, out_sharding=_out_sharding(spec))
    return _place(y, spec)


def lookup(table: nnx.Variable, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of table [vocab, D] for int ids [B, T] -> [B, T, D] in dtype, whole along D.

    Under tensor parallelism every shard looks up the ids of its own slice of the vocabulary and the shards are summed,
    so the table never travels. Ids outside [0, vocab) give zeros on a mesh and are the caller's error anywhere.
    The gradient of a row, a sum over all places of its id, is added up in float32 at least.
    """
    table_spec = current_spec(logical_axes(table))
    if table_spec is None:
        return _rows(table[...], ids, dtype)
    table_VD = gathered(table[...].astype(dtype), logical_axes(table))
    ids_spec = _fit(current_spec(("batch", None)), ids.shape, ("batch", None))
    vocab_axes = table_spec[0]

    def shard_lookup(table_shard, ids_shard):
        if vocab_axes is None:
            return _rows(table_shard, ids_shard, dtype)
        local = ids_shard - jax.lax.axis_index(vocab_axes) * table_shard.shape[0]
        mine = (local >= 0) & (local < table_shard.shape[0])
        rows = _rows(table_shard, jnp.where(mine, local, 0), dtype)
        return jax.lax.psum(jnp.where(mine[..., None], rows, 0), vocab_axes)

    in_specs, out_spec = (P(vocab_axes, None), ids_spec), P(*ids_spec, None)
    return jax.shard_map(shard_lookup, in_specs=in_specs, out_specs=out_spec)(table_VD, _place(ids, ids_spec))


def _rows(table: jax.Array, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows in dtype, whose gradients are added up in float32: in bfloat16 the sum over a frequent id stops growing."""
    return jnp.take(table.astype(jnp.promote_types(table.dtype, jnp.float32)), ids, axis=0).astype(dtype)


def check_divisible(config, mesh: Mesh | jax.sharding.AbstractMesh, rules: ShardingRules = RULES) -> None:
    """ValueError, naming the field and the size, if a width of a ModelConfig is not divisible by its mesh axes."""
    for name, fields in config.sharded_sizes().items():
        axes = [axis for axis in rules.mesh_axes(name) if axis in mesh.axis_names]
        shards = math.prod(mesh.shape[axis] for axis in axes)
        for field, size in fields.items():
            if size % shards:
                raise ValueError(
                    f"{field}={size} is not divisible by {'*'.join(axes)}={shards}: choose a {' or '.join(axes)} size "
                    f"that divides it (q/k heads are not replicated)"
                )


def logical_axes(variable: nnx.Variable) -> tuple[str | None, ...] | None:
    """The logical names of a parameter, None if it has none (then it is replicated)."""
    return variable.get_metadata("axes", None)


def param_shardings(state, mesh: Mesh, rules: ShardingRules = RULES):
    """A tree of NamedSharding for a tree of nnx Variables (an nnx.State, abstract or not; also an optimiser's).

    Variables without `axes` are replicated. Leading dimensions beyond the names (layers stacked for a scan) are whole.
    """

    def sharding(variable):
        axes = logical_axes(variable) or ()
        ndim = len(variable.shape)
        if len(axes) > ndim:  # a reduced statistic of the parameter, such as an optimiser's scalar
            axes = ()
        return NamedSharding(mesh, partition_spec((None,) * (ndim - len(axes)) + tuple(axes), mesh, rules))

    return jax.tree.map(sharding, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def shard_model(model: nnx.Module, mesh: Mesh, rules: ShardingRules = RULES) -> None:
    """Move a model's (or optimiser's) arrays to their places on the mesh, in place."""
    state = nnx.state(model)
    nnx.update(model, jax.device_put(state, param_shardings(state, mesh, rules)))


def create_sharded(build: Callable[[], nnx.Module], mesh: Mesh, rules: ShardingRules = RULES) -> nnx.Module:
    """Build a model whose parameters are born on their shards: create_sharded(lambda: KimiLM(config, rngs=...), mesh).

    No device ever holds a whole parameter that the rules cut. Values equal those of build() on one device.
    """
    abstract = nnx.eval_shape(build)
    if hasattr(abstract, "config"):
        check_divisible(abstract.config, mesh, rules)
    graphdef, abstract_state = nnx.split(abstract)
    shardings = param_shardings(abstract_state, mesh, rules)
    # Initialisers know nothing of shardings, so they run under the Auto view of the same devices.
    auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    born = param_shardings(abstract_state, auto, rules)
    with jax.set_mesh(auto):
        state = jax.jit(lambda: nnx.split(build())[1], out_shardings=born)()
    return nnx.merge(graphdef, jax.device_put(state, shardings))


def _without(spec: P, axis: str) -> P:
    """spec with one mesh axis removed from every dimension."""
    kept = [tuple(a for a in _as_tuple(entry) if a != axis) for entry in spec]
    return P(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in kept))


def _as_tuple(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _fit(spec: P, shape: Sequence[int], names: Sequence[str | None]) -> P:
    """spec, with a batch that does not divide left whole; ValueError for other dimensions that do not divide."""
    if len(names) != len(shape):
        raise ValueError(f"{len(names)} logical names {tuple(names)} for an array of shape {tuple(shape)}")
    mesh = jax.sharding.get_abstract_mesh()
    entries = []
    for entry, size, name in zip(spec, shape, names, strict=True):
        shards = math.prod(mesh.shape[axis] for axis in _as_tuple(entry))
        if size % shards and name != "batch":
            raise ValueError(f"a dimension {name!r} of size {size} is not divisible by mesh axes {entry} ({shards})")
        entries.append(None if size % shards else entry)
    return P(*entries)


def _axes_of_kind(kind: AxisType) -> set[str]:
    mesh = jax.sharding.get_abstract_mesh()
    return {axis for axis, axis_kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if axis_kind == kind}


def _split_by_kind(spec: P) -> tuple[P, P]:
    """spec as its part over Explicit axes and its part over Auto axes."""
    explicit, auto = spec, spec
    for axis in _axes_of_kind(AxisType.Auto):
        explicit = _without(explicit, axis)
    for axis in _axes_of_kind(AxisType.Explicit):
        auto = _without(auto, axis)
    return explicit, auto


def _out_sharding(spec: P) -> P | None:
    """spec as operations take it for their result: over Explicit axes only, None without any."""
    return _split_by_kind(spec)[0] if _axes_of_kind(AxisType.Explicit) else None


def _place(x: jax.Array, spec: P) -> jax.Array:
    """Lay x out by spec on the mesh in force: a change of type for Explicit axes, a constraint for Auto ones."""
    explicit, auto = _split_by_kind(spec)
    if _axes_of_kind(AxisType.Explicit):
        x = jax.sharding.reshard(x, explicit)
    if _axes_of_kind(AxisType.Auto):
        if isinstance(x, jax.core.Tracer):
            x = jax.lax.with_sharding_constraint(x, auto)
        else:  # outside jit a constraint cannot move an array that lives on one device
            x = jax.device_put(x, NamedSharding(jax.sharding.get_mesh(), auto))
    return x
