"""Learning-rate schedules: a linear warm-up, then WSD (hold, then fall) or cosine."""

import optax

SCHEDULES = ("wsd", "cosine")


def make_schedule(
    name: str, *, peak: float, steps: int, warmup: int, decay_fraction: float = 0.4, final_fraction: float = 0.0
) -> optax.Schedule:
    """Step (from 0) -> learning rate.

    Args:
      name: "wsd" holds the peak and falls linearly over the last decay_fraction of the steps (KDA trains with it);
        "cosine" falls all the way from the end of the warm-up (K3).
      peak: highest learning rate, reached after `warmup` steps.
      steps: length of the run.
      final_fraction: share of the peak that is left at the end.

    Raises:
      ValueError: an unknown name, or a warm-up that does not fit into the run.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r} is unknown; allowed: {', '.join(SCHEDULES)}")
    if not 0 <= warmup < steps:
        raise ValueError(f"warmup={warmup} must be at least 0 and below steps={steps}")
    if not 0 <= decay_fraction <= 1:
        raise ValueError(f"decay_fraction={decay_fraction} must lie between 0 and 1")
    final = peak * final_fraction
    # Starts above zero: a first step with learning rate 0 would be a step wasted.
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    if name == "cosine":
        fall = optax.cosine_decay_schedule(peak, steps - warmup, alpha=final_fraction)
        return optax.join_schedules([rise, fall], [warmup])
    decay_steps = min(round(decay_fraction * steps), steps - warmup)
    hold = optax.constant_schedule(peak)
    fall = optax.linear_schedule(peak, final, decay_steps) if decay_steps else hold
    return optax.join_schedules([rise, hold, fall], [warmup, steps - decay_steps])
