"""The suite kda_gpu: KDA on a GPU by our kernels and our XLA path, beside fla's Triton kernels where it is installed.

Sequences forward, and forward with the gradient of every input; decode steps inside one compiled loop, so that no time
of the host is in them. All activations are fused: L2 norm, sigmoid, and the gate, bounded at -5 unless "any gate" is
said (softplus). Before any is timed, all are compared with the float32 token scan of the first 512 tokens.

Our kernels take most of the time to compile. Their programs are compiled side by side, and so may be those of several
processes, one for each of --cases: what the GPU does is done by one process after another. But a machine that is busy
compiling is slow to start kernels: times under a millisecond are best taken by one process.

fla and jax share the GPU: start with XLA_PYTHON_CLIENT_PREALLOCATE=false (experiments.benchmark does). fla tries many
variants of its kernels at every new number of heads, for minutes.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import gpu_timing
from experiments.benchmark_suites import check_difference, with_gradient, worst_difference
from experiments.gpu_timing import Run, fla_is_here, in_turns, numbers, repeated
from experiments.turns import alone
from pallas_kernels import kda, kda_reference, kda_step, which_backend

__all__ = ["CASES", "IMPLEMENTATIONS", "Case", "kda_gpu", "merge"]

IMPLEMENTATIONS = ("mosaic_gpu", "xla", "fla")
GATES = {"": {"gate": "bounded", "lower_bound": -5.0}, ", any gate": {"gate": "softplus"}}
FUSED = {"qk_l2norm": True, "beta_sigmoid": True}
FORWARD, BOTH, STEP = "forward", "forward and gradient", "step"
STEPS = 100  # of a loop of decode steps
CHECKED = 512  # tokens
TOLERANCE = {FORWARD: 1e-2, BOTH: 2e-2}  # relL2 of bfloat16, of a result and of a gradient
XLA_TO_FLA = 4.0  # at most, forward and gradient
NAMES = ("output", "state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state", "dA_log", "ddt_bias")


@dataclass(frozen=True)
class Case:
    """q, k `[B,T,H,K]`; T = 1 is one decode step for every row. Milliseconds are of an H200."""

    B: int
    T: int
    H: int
    gradient: bool = True
    at_most: Mapping[str, float] = field(default_factory=dict)  # of mosaic_gpu, by part
    recorded: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # of others, by part and name
    K: int = 128
    V: int = 128
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"decode-B{self.B}-H{self.H}" if self.T == 1 else f"B{self.B}-H{self.H}-T{self.T}"


def _sequence(B, T, H, at_most=(), fla=(), flash=None, gradient=True) -> Case:
    recorded = {part: {"fla 0.6.0": ms} for part, ms in zip((FORWARD, BOTH), fla, strict=False)}
    if flash:
        recorded.setdefault(FORWARD, {})["FlashKDA"] = flash
    return Case(B, T, H, gradient, dict(zip((FORWARD, BOTH), at_most, strict=False)), recorded)


def _decode(B, fla, at_most=None) -> Case:
    return Case(B, 1, 32, False, {STEP: at_most} if at_most else {}, {STEP: {"fla 0.6.0": fla}})


CASES: tuple[Case, ...] = (
    _sequence(1, 8192, 96, (1.0, 6.0), (2.616, 12.54), 1.408),
    _sequence(1, 8192, 32, (0.5, 2.2), (0.976, 4.574), 1.010),
    _sequence(1, 65536, 32, (3.0, 16.0), (7.417, 33.18), 7.648),
    _sequence(8, 2048, 32, (), (1.875, 8.290), 0.781),
    _sequence(1, 65536, 4, (1.5,), (), 6.112, gradient=False),
    _decode(1, 0.0477, 0.02),
    _decode(32, 0.0556),
    _decode(128, 0.1726, 0.15),
)


def kda_gpu(
    repeats: int = 20, cases: Sequence[Case] = CASES, implementations: Sequence[str] | None = None
) -> dict[str, Any]:
    """Milliseconds of each case, part and implementation ("CASE PART: IMPLEMENTATION"), and ratios between them.

    implementations: of IMPLEMENTATIONS; None is all that this machine has. ArithmeticError if a result is wrong.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    ms, differences = {}, {}
    for case in cases:
        present = {name: _Fla() if name == "fla" else _Jax(name) for name in _present(case, implementations)}
        runs, found = (_step_runs if case.T == 1 else _sequence_runs)(case, present)
        differences |= {f"{case.name} {name}": value for name, value in found.items()}
        with alone():
            all_times = in_turns(runs, repeats)
        for name, times in all_times.items():
            part, _, implementation = name.partition(": ")
            aim = {"at_most": case.at_most[part]} if implementation == "mosaic_gpu" and part in case.at_most else {}
            ms[f"{case.name} {name}"] = {**times, **aim}
    facts = {"gate": "bounded at -5 unless it is any gate", "activations": "fused"}
    sizes = {"K": cases[0].K, "V": cases[0].V, "dtype": cases[0].dtype}
    ratios = _ratios({name: {**entry, "started": started} for name, entry in ms.items()}, cases)
    return {"started": started, "case": sizes | facts, "ms": ms, "worst_difference": differences, "ratios": ratios}


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`gpu_timing.merge` of two results of this suite."""
    return gpu_timing.merge(old, new, [case.name for case in CASES], lambda ms: _ratios(ms, CASES))


def inputs(case: Case) -> tuple[jax.Array, ...]:
    """q, k, v, and logits of g and beta, in the case's dtype; initial_state, A_log and dt_bias in float32."""
    keys = jax.random.split(jax.random.key(1), 8)
    B, T, H, K, V = case.B, case.T, case.H, case.K, case.V
    shapes = ((B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H, K), (B, T, H))
    raw = [jax.random.normal(key, shape, case.dtype) for key, shape in zip(keys, shapes, strict=False)]
    state = 0.1 * jax.random.normal(keys[5], (B, H, K, V))
    rest = (state, jax.random.uniform(keys[6], (H,), maxval=1.0), 0.1 * jax.random.normal(keys[7], (H * K,)))
    return *(x[:, 0] if T == 1 else x for x in raw), *rest


def _present(case: Case, asked: Sequence[str] | None) -> list[str]:
    B, T, H, K, V = case.B, case.T, case.H, case.K, case.V
    shape = lambda *s: jax.ShapeDtypeStruct(s, case.dtype)  # noqa: E731
    sizes = ((B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H, K), (B, T, H))
    present = ["xla"]
    if which_backend("kda", *(shape(*s) for s in sizes)) == "mosaic_gpu":
        present.insert(0, "mosaic_gpu")
    if fla_is_here():
        present.append("fla")
    if missing := [name for name in asked or () if name not in present]:
        raise ValueError(f"implementations: got {missing}; {case.name} can be run here by {present}")
    return [name for name in present if asked is None or name in asked]


class _Jax:
    """Our kernels or our XLA path; arrays are jax's."""

    def __init__(self, backend: str):
        self.backend = backend

    def arrays(self, arguments: Sequence[jax.Array]) -> tuple[Any, ...]:
        return tuple(arguments)

    def parts(self, gate: Mapping[str, Any]) -> dict[str, Callable]:
        """By part, a function of arrays that returns (output, state) or that and all gradients."""
        call = _fused(partial(kda, backend=self.backend), gate)
        return {FORWARD: jax.jit(call), BOTH: jax.jit(with_gradient(call))}

    def steps(self, arguments: Sequence[jax.Array]) -> Run:
        """Decode steps in a loop, each from the state that the one before left."""
        step = _fused(partial(kda_step, backend=self.backend), GATES[""])

        @partial(jax.jit, donate_argnums=0)
        def loop(carry, *tokens):
            return jax.lax.fori_loop(0, STEPS, lambda _, c: tuple(step(*tokens[:5], c[1], *tokens[5:])), carry)

        *tokens, state, A_log, dt_bias = arguments
        carry = [(jnp.zeros_like(tokens[2]), state + 0.0)]  # copied, since the loop takes it

        def call(calls: int) -> None:
            for _ in range(calls):
                carry[0] = loop(carry[0], *tokens, A_log, dt_bias)
            jax.block_until_ready(carry[0])

        return Run(call, STEPS)

    def step(self, arguments: Sequence[jax.Array]) -> Any:
        return jax.jit(_fused(partial(kda_step, backend=self.backend), GATES[""]))(*arguments)

    def wait(self, results: Any) -> None:
        jax.block_until_ready(results)


class _Fla:
    """fla's Triton kernels; arrays are torch's. Bounded gates alone."""

    def __init__(self):
        import torch
        from fla.ops.kda import chunk_kda, fused_recurrent_kda

        self.torch, self.chunk, self.recurrent = torch, chunk_kda, fused_recurrent_kda
        self.options = dict(
            output_final_state=True, lower_bound=-5.0, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip

    def arrays(self, arguments: Sequence[jax.Array]) -> tuple[Any, ...]:
        def tensor(x):
            t = self.torch.from_numpy(np.array(x, np.float32)).cuda()
            return (t.bfloat16() if x.dtype == jnp.bfloat16 else t).requires_grad_()

        return tuple(map(tensor, arguments))

    def parts(self, gate: Mapping[str, Any]) -> dict[str, Callable]:
        def call(*arrays):
            *tokens, state, A_log, dt_bias = arrays
            options = self.options | {"safe_gate": True, "A_log": A_log, "dt_bias": dt_bias}
            return self.chunk(*tokens, initial_state=state, **options)

        def forward(*arrays):
            with self.torch.no_grad():
                return call(*arrays)

        def both(*arrays):
            outputs = call(*arrays)
            return outputs, self.torch.autograd.grad(outputs, arrays, [x.detach() for x in outputs])

        return {FORWARD: forward, BOTH: both}

    def steps(self, arguments: Sequence[jax.Array]) -> Run:
        """As `_Jax.steps`, captured into one CUDA graph."""
        torch = self.torch
        *tokens, state, A_log, dt_bias = (x.detach() for x in self.arrays(arguments))
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # Triton compiles here, which a capture could not hold
            self._step(*tokens, state, A_log, dt_bias)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # jax has threads of its own
            for _ in range(STEPS):
                _, state = self._step(*tokens, state, A_log, dt_bias)

        def call(calls: int) -> None:
            for _ in range(calls):
                graph.replay()
            torch.cuda.synchronize()

        return Run(call, STEPS)

    def step(self, arguments: Sequence[jax.Array]) -> Any:
        return self._step(*(x.detach() for x in self.arrays(arguments)))

    def wait(self, results: Any) -> None:
        self.torch.cuda.synchronize()

    def _step(self, *arrays):
        *tokens, state, A_log, dt_bias = arrays
        tokens = (x[:, None] for x in tokens)
        out, state = self.recurrent(*tokens, A_log=A_log, dt_bias=dt_bias, initial_state=state, **self.options)
        return out[:, 0], state


def _fused(function: Callable, gate: Mapping[str, Any]) -> Callable:
    """A kda or kda_step of raw inputs, all positional."""
    state_name = "state" if function.func is kda_step else "initial_state"

    def call(q, k, v, g, beta, state, A_log, dt_bias):
        return function(q, k, v, g, beta, **{state_name: state}, A_log=A_log, dt_bias=dt_bias, **gate, **FUSED)

    return call


def _sequence_runs(case: Case, implementations: Mapping[str, Any]) -> tuple[dict[str, Run], dict[str, float]]:
    arguments = inputs(case)
    short = (*(x[:, :CHECKED] for x in arguments[:5]), *arguments[5:])
    # The other two are there for comparison: fla's kernels for any gate are others, ours in XLA the same.
    served = {
        (said, name): (implementation, implementation.parts(gate))
        for said, gate in GATES.items()
        for name, implementation in implementations.items()
        if not said or name == "mosaic_gpu"
    }
    scans = {said: _scan(GATES[said], case.gradient) for said, _ in served}
    wide = tuple(x.astype(jnp.float32) for x in short)
    jobs = [(scan, wide) for scan in scans.values()]
    for implementation, parts in served.values():
        if isinstance(implementation, _Jax):
            jobs += [(parts[FORWARD], arguments)] + [(parts[BOTH], x) for x in (short, arguments)] * case.gradient
    with ThreadPoolExecutor(len(jobs) or 1) as pool:  # a jitted function then finds what was compiled for it
        list(pool.map(lambda job: job[0].lower(*job[1]).compile(), jobs))

    runs, differences = {}, {}
    with alone():
        expected = {said: numbers(scan(*wide)) for said, scan in scans.items()}
        for (said, name), (implementation, parts) in served.items():
            arrays = implementation.arrays(arguments)
            # Of the real length: later tokens may not change what the first ones give.
            first = numbers(parts[FORWARD](*arrays)[0][:, :CHECKED])
            checks = {FORWARD: _differences((first,), expected[said][0], f"{case.name}{said} {name}")}
            if case.gradient:
                outputs, gradients = numbers(parts[BOTH](*implementation.arrays(short)))
                checks[BOTH] = _differences(
                    (*outputs, *gradients), (*expected[said][0], *expected[said][1]), f"{case.name}{said} {name}"
                )
            for part, found in checks.items():
                differences[f"{part}{said}: {name}"] = found
                runs[f"{part}{said}: {name}"] = repeated(implementation, parts[part], arrays)
    return runs, differences


def _scan(gate: Mapping[str, Any], gradient: bool) -> Callable:
    """The token scan in float32: (output, state) and gradients, or none."""
    scan = _fused(partial(kda_reference), gate)
    return jax.jit(with_gradient(scan) if gradient else lambda *x: (scan(*x), ()))


def _step_runs(case: Case, implementations: Mapping[str, Any]) -> tuple[dict[str, Run], dict[str, float]]:
    arguments = inputs(case)
    runs, differences = {}, {}
    with alone():
        expected = numbers(_Jax("xla").step([x.astype(jnp.float32) for x in arguments]))
        for name, implementation in implementations.items():
            got = numbers(implementation.step(arguments))
            differences[f"{STEP}: {name}"] = _differences(got, expected, f"{case.name} {name}")
            runs[f"{STEP}: {name}"] = implementation.steps(arguments)
    return runs, differences


def _differences(results: Sequence[np.ndarray], expected: Sequence[np.ndarray], what: str) -> float:
    """The worst of the results, which come in the order of NAMES."""
    found = {n: worst_difference(x, ref) for n, x, ref in zip(NAMES, results, expected, strict=False)}
    for name, difference in found.items():
        check_difference(difference, TOLERANCE[BOTH if name.startswith("d") else FORWARD], f"{what} {name}")
    return max(found.values())


def _ratios(ms: Mapping[str, Mapping[str, Any]], cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """Our time over another's: measured here, in the same run or not, and recorded on an H200."""
    found = {}
    by_name = {case.name: case for case in cases}
    for name, entry in ms.items():
        what, _, implementation = name.rpartition(": ")
        if implementation == "fla":
            continue
        if other := ms.get(f"{what}: fla"):
            value, aim = round(entry["median"] / other["median"], 3), _aim(implementation, what)
            found[f"{name} to fla"] = {"value": value, **aim, "same_run": entry["started"] == other["started"]}
        case, _, part = what.partition(" ")
        for peer, peer_ms in by_name[case].recorded.get(part, {}).items() if case in by_name else ():
            value = round(entry["median"] / peer_ms, 3)
            found[f"{name} to the {peer_ms:g} ms of {peer} on an H200"] = {"value": value, **_aim(implementation, what)}
    return found


def _aim(implementation: str, what: str) -> dict[str, float]:
    if implementation == "mosaic_gpu":
        return {"at_most": 1.0}
    return {"at_most": XLA_TO_FLA} if what.endswith(BOTH) else {}
