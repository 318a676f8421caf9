"""Programs: train, generate, benchmark. Each is `python -m experiments.<name>` and explains its flags with --help."""

from experiments.quiet_tpu import quiet_missing_tpu

quiet_missing_tpu()  # here, because it must run before any of the programs imports jax
