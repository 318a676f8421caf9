"""attn_res's Hopper kernels as plain Python on numpy (gpu_machine.py), against float64.

What they compute and when they read what was fetched: a row of the ring is no number from the moment when it is fetched
anew until somebody has waited for it. How registers hold a row (rows.py) is left out; for that the kernels must run on
a GPU (test_attn_res_gpu_device.py).
"""

import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attn_res.kernels import Static
from pallas_kernels.attn_res.mosaic_gpu import backward, forward, plan, ring, rows
from tests.pallas_kernels import gpu_machine
from tests.pallas_kernels.attn_res_support import make_problem, value_and_grads
from tests.pallas_kernels.gpu_machine import Ref
from tests.support import BF16_FORWARD, BF16_GRADIENT, F32_FORWARD, F32_GRADIENT, assert_close

MODULES = forward, backward, ring, rows


class Barrier:
    """Turns at every num_arrivals copies; what they bring is there for who has waited for the turn."""

    patience = 60  # seconds

    def __init__(self, num_barriers, num_arrivals=1):
        self.at = [self] if num_barriers == 1 else [Barrier(1, num_arrivals) for _ in range(num_barriers)]
        self.num_arrivals, self.copies, self.own, self.changed = (
            num_arrivals,
            [],
            threading.local(),
            threading.Condition(),
        )

    def fetch(self, source, target):
        target[...] = np.full(target.shape, np.nan, target.dtype)
        with self.changed:
            self.copies.append((source, target))
            self.changed.notify_all()

    def wait(self):
        turn = self.own.turn = getattr(self.own, "turn", 0) + 1
        first, end = (turn - 1) * self.num_arrivals, turn * self.num_arrivals
        with self.changed:
            here = self.changed.wait_for(lambda: len(self.copies) >= end, timeout=self.patience)
            assert here, "waits for what nobody fetches"
            for i in range(first, end):
                if self.copies[i] is not None:
                    source, target = self.copies[i]
                    target[...] = source[...]
                    self.copies[i] = None


@pytest.fixture
def machine(monkeypatch):
    machine = gpu_machine.Machine()
    machine.jax.typeof, machine.jax.lax.cond = jax.typeof, lambda true, yes, no, x: yes(x) if true else no(x)
    machine.jax.new_ref, machine.jax.freeze = lambda x: Ref(np.array(x)), lambda ref: ref.array
    machine.plgpu.Barrier = lambda num_barriers=1, num_arrivals=1: _Barriers(num_barriers, num_arrivals)
    machine.plgpu.copy_gmem_to_smem = lambda source, target, barrier, oob_mode: barrier.fetch(source, target)
    machine.replace(monkeypatch, *MODULES)
    meet = lambda: machine.meeting.wait()  # noqa: E731
    for module in MODULES:
        replaced = {
            "sync": meet,
            "sync_group": lambda: None,
            "apart": lambda: None,
            "table": lambda ref: jnp.sum(ref[...], axis=1),
            "total_of": lambda ref: jnp.sum(ref[...]),
        }
        for name, function in replaced.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, function)
    monkeypatch.setattr(rows.Rows, "layout", None)
    monkeypatch.setattr(rows.Rows, "load", lambda self, ref: jnp.asarray(ref[...], jnp.float32))
    monkeypatch.setattr(rows.Rows, "load_vector", lambda self, ref: jnp.asarray(ref[...]))
    part = lambda self, ref, first, size: jnp.pad(ref[...], (0, self.channels))[int(first) :][: self.channels]  # noqa: E731
    monkeypatch.setattr(rows.Rows, "load_part", part)
    monkeypatch.setattr(rows.Rows, "wide", lambda self, x: x.astype(jnp.float32))
    monkeypatch.setattr(rows.Rows, "zeros", lambda self: jnp.zeros(self.channels))
    monkeypatch.setattr(rows.Rows, "now", lambda self, x: x)
    monkeypatch.setattr(
        rows.Rows, "sum_of_products", lambda self, *pairs: [(x * y).reshape(4, -1).sum(1) for x, y in pairs]
    )

    def store(self, ref, x, first, size):
        kept = min(self.channels, size - int(first))
        ref[slice_of(first, kept)] = np.asarray(x[:kept].astype(ref.dtype))

    monkeypatch.setattr(rows.Rows, "store", store)
    return machine


@pytest.fixture
def warps(machine, monkeypatch):
    """The machine for rows of four tokens: a thread is now a warp, and has its token's quarter of a row."""
    number = lambda: machine.own.index["group"]  # noqa: E731

    def quarter(self, ref):
        size = self.channels // rows.WARPS
        return ref.at[slice_of(number() * size, size)]

    def put(ref, x):
        ref[...] = np.asarray(x[number()], ref.dtype)[None]

    def store(self, ref, x, first, size):
        assert first == 0 and size == self.channels
        own = quarter(self, ref)
        own[...] = np.asarray(x.astype(own.dtype))

    def fetch(source, target, barrier, oob_mode):
        if number() == 0:
            barrier.fetch(source, target)

    def by_warps(kernel, name, operands, outs, scratch, plan):
        assert plan.tokens == rows.WARPS and plan.groups == 1
        return call(kernel, name, operands, outs, scratch, plan._replace(groups=rows.WARPS))

    call = ring.call
    for module in (forward, backward):
        monkeypatch.setattr(module, "call", by_warps)
    index = machine.jax.lax.axis_index
    machine.jax.lax.axis_index = lambda name: 0 if name == "group" else index(name)
    machine.plgpu.copy_gmem_to_smem = fetch
    monkeypatch.setattr(ring, "warp_number", number)
    monkeypatch.setattr(ring, "store_own", put)
    sums = lambda self, *pairs: [np.full(rows.WARPS, (x * y).sum()) for x, y in pairs]  # noqa: E731
    monkeypatch.setattr(rows.Rows, "sum_of_products", sums)
    monkeypatch.setattr(rows.Rows, "load", lambda self, ref: jnp.asarray(quarter(self, ref)[...], jnp.float32))
    monkeypatch.setattr(rows.Rows, "load_part", lambda self, ref, first, size: jnp.asarray(quarter(self, ref)[...]))
    monkeypatch.setattr(rows.Rows, "zeros", lambda self: jnp.zeros(self.channels // rows.WARPS))
    monkeypatch.setattr(rows.Rows, "store", store)


class _Barriers(gpu_machine.Barrier):
    """What a kernel asks for; every program gets barriers of its own."""

    def __init__(self, num_barriers, num_arrivals):
        self.sizes = num_barriers, num_arrivals


@pytest.fixture(autouse=True)
def barriers_with_turns(monkeypatch):
    empty = gpu_machine._empty

    def new(like, once=False):
        return Barrier(*like.sizes) if isinstance(like, _Barriers) else empty(like, once)

    monkeypatch.setattr(gpu_machine, "_empty", new)


def slice_of(first, size):
    return gpu_machine.pl.ds(int(first), size)


class Case(NamedTuple):
    name: str
    N: int
    D: int
    M: int = 11
    dtype: str = "float32"
    form: str = "sequence"
    norm: bool = False
    live: int | None = None
    wide: int = 3072  # channels from which on a token has two warpgroups
    shared: int = 227 << 10
    others: bool = False  # the sources have cotangents from elsewhere

    @property
    def by_warps(self) -> bool:
        """Whether four tokens make a row."""
        return self.M % 4 == 0 and self.D % 128 == 0


CASES = [
    Case("one_piece", 5, 512),
    Case("norm", 5, 512, norm=True),
    Case("two_warpgroups", 3, 1024, norm=True, wide=512),
    Case("padded_channels", 4, 300, norm=True),
    Case("padded_channels_of_two_warpgroups", 4, 600, wide=512, norm=True),
    Case("bfloat16", 5, 512, dtype="bfloat16", norm=True),
    Case("in_pieces", 11, 512, norm=True, shared=40 << 10),
    Case("items_of_several_rows", 27, 256),
    Case("buffer", 5, 256, form="buffer"),
    Case("live_prefix", 6, 256, form="buffer", norm=True, live=4),
    Case("live_prefix_longer_than_the_ring", 5, 128, M=41, live=4, others=True),
    Case("live_prefix_of_a_tuple", 6, 256, live=2),
    Case("live_prefix_in_pieces", 11, 512, norm=True, live=5, shared=40 << 10),
    Case("live_prefix_of_many", 20, 256, form="buffer", live=17, M=5),
    Case("one_live", 3, 256, norm=True, live=1),
    Case("one_source", 1, 256, norm=True),
    Case("one_token", 3, 256, M=1),
    Case("onto_others", 5, 300, others=True),
    Case("onto_others_of_two_warpgroups", 4, 600, wide=512, norm=True, dtype="bfloat16", others=True),
    Case("onto_others_in_pieces", 11, 512, norm=True, live=5, shared=40 << 10, others=True),
    Case("onto_others_of_many", 20, 256, form="buffer", live=17, M=5, others=True),
    Case("warps", 5, 256, M=12),
    Case("warps_norm_bfloat16", 5, 512, M=20, dtype="bfloat16", norm=True),
    Case("warps_in_pieces", 11, 256, M=8, norm=True, live=5, shared=56 << 10, others=True),
    Case("warps_of_many", 20, 128, form="buffer", live=17, M=8, others=True),
    Case("warps_live_prefix_longer_than_the_ring", 5, 128, M=100, live=4),
    Case("warps_one_source", 1, 256, M=8, norm=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_against_float64(case, machine, monkeypatch, request):
    if case.by_warps:
        request.getfixturevalue("warps")
    monkeypatch.setattr(plan, "MULTIPROCESSORS", 1)  # several tokens a program
    monkeypatch.setattr(plan, "WIDE", case.wide)
    monkeypatch.setattr(plan, "SHARED", case.shared)
    p = make_problem(case.N, (case.M,), case.D, spread=0.5)
    exact = lambda x: np.asarray(jnp.asarray(x, case.dtype), np.float64)  # noqa: E731
    p = p._replace(query=p.query * 3 * case.D**-0.5, sources=exact(p.sources), cotangent=exact(p.cotangent))
    with jax.enable_x64(True):
        live = p._replace(sources=p.sources[: case.live])
        want = value_and_grads(live, jnp.float64, "sequence", "reference", case.norm, vectors=jnp.float64)

    sources = p.sources.copy()
    sources[case.live or case.N :] = np.nan
    sources = jnp.asarray(sources, case.dtype)
    sources = sources if case.form == "buffer" else tuple(sources)
    f32 = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    gain, scale = f32(p.query * p.key_scale), f32(p.output_scale) if case.norm else None
    count = None if case.live is None else jnp.int32(case.live)
    inputs = Static(1e-6), sources, gain, scale, count
    mixture, lse, saved = (jnp.asarray(x) for x in forward.forward(*inputs))
    bars = jnp.asarray(p.cotangent, case.dtype), f32(p.lse_cotangent)
    others = jax.tree.map(lambda x: (jnp.arange(x.size) % 7 - 3).reshape(x.shape).astype(x.dtype), sources)
    given = jax.tree.map(np.asarray, others) if case.others else None
    sources_bar, gain_bar, scale_bar = backward.backward(*inputs, saved, *bars, given)

    low = case.dtype == "bfloat16"
    within = BF16_GRADIENT if low else F32_GRADIENT
    assert_close(mixture, want[0], BF16_FORWARD if low else F32_FORWARD, "mixture")
    assert_close(lse, want[1], F32_FORWARD, "lse")
    found = np.stack([np.asarray(x, np.float32) for x in sources_bar])
    if case.others:
        found = found - np.stack([np.asarray(x, np.float32) for x in others]).reshape(found.shape)
    if case.form == "buffer":
        found = found.reshape(case.N, case.M, case.D)
    assert not found[case.live or case.N :].any()
    assert_close(found[: case.live], want[2]["sources"], within, "sources")
    assert_close(gain_bar * p.key_scale, want[2]["query"], within, "query")
    assert_close(gain_bar * p.query, want[2]["key_scale"], within, "key_scale")
    if case.norm:
        assert_close(scale_bar, want[2]["output_scale"], within, "output_scale")


@pytest.mark.parametrize("M", [8, 11])
def test_a_count_of_zero_is_not_a_number(M, machine, monkeypatch, request):
    if M == 8:
        request.getfixturevalue("warps")
    monkeypatch.setattr(plan, "MULTIPROCESSORS", 1)
    sources = (jnp.ones((M, 128), jnp.float32),) * 3
    mixture, lse, _ = forward.forward(Static(1e-6), sources, jnp.ones(128), None, jnp.int32(0))
    assert np.isnan(mixture).all() and np.isnan(lse).all()


def test_a_row_that_nobody_has_waited_for_is_no_number():
    """The machine itself: without the wait the kernel reads what it must not."""
    barrier, target = Barrier(1), Ref(np.ones(4, np.float32))
    barrier.fetch(Ref(np.full(4, 2.0, np.float32)), target)
    assert np.isnan(target[...]).all()
    barrier.wait()
    assert (target[...] == 2).all()
    barrier.patience = 0.1
    with pytest.raises(AssertionError, match="waits for what nobody fetches"):
        barrier.wait()


SHAPES = [(9, 7168), (8, 2304), (27, 2304), (64, 8192), (64, 8), (1, 8192), (13, 4104), (55, 2304), (3, 24)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("N, D", SHAPES, ids=str)
def test_every_shape_has_a_plan(N, D, dtype):
    for online, beside in ((True, 0), (False, 2)):
        found = plan.make_plan(
            1000,
            D,
            N,
            dtype,
            registers_per_channel=8,
            registers_per_source=11,
            rows_beside=beside,
            bytes_beside=16384,
            online=online,
        )
        row = found.padded * jnp.dtype(dtype).itemsize
        per_sm = max(1, found.programs // plan.MULTIPROCESSORS)
        assert D <= found.padded and found.programs <= 1000 and found.slots <= plan.MOST_SLOTS
        assert found.slots > -(-found.piece // found.together)  # something is on its way while a piece is worked on
        used = row * (found.slots * found.together + beside) + 16384
        assert used <= plan.SHARED and per_sm * (used + 1024) <= plan.SHARED_SM
        if online and found.piece < N:
            assert found.piece % 4 == 0
