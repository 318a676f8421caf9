"""Programs: train, generate, synthetic, ablate, report, benchmark; `python -m experiments.NAME --help` tells of one."""

from experiments.quiet_tpu import quiet_missing_tpu

quiet_missing_tpu()  # here, because it must run before any of the programs imports jax
