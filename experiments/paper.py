"""Numbers of the papers that `experiments.report` sets beside ours. What is typed by hand is typed here, once.

SYNTHETIC: Kimi Linear (arXiv 2510.26692), Figure 4. DECODE and PREFILL: its Figures 1b and 7. The paper prints few
numbers for them; these are read from the vector paths of its PDF, a way that finds the numbers which the paper does
print (in Figure 1b) to 0.1%. ATTN_RES: Attention Residuals (arXiv 2603.15031).

DYNAMICS: Attention Residuals, Figure 5, read off its charts; it does not say which norm it draws.

SCALING: the scaling laws of both papers, fitted to five sizes each, those of their Table 2.
"""

SYNTHETIC_SOURCE = "Kimi Linear, arXiv 2510.26692, Figure 4, digitised"

# Highest accuracy in percent at each length, by task and model.
SYNTHETIC_PEAK = {
    "palindrome": {
        "kda": {256: 100.0, 512: 100.0, 1024: 100.0, 2048: 42.2},
        "gated_delta_net": {256: 100.0, 512: 100.0, 1024: 97.0, 2048: 37.1},
        "mamba2": {256: 100.0, 512: 0.0, 1024: 0.0, 2048: 0.0},
    },
    "mqar": {
        "kda": {256: 100.0, 512: 100.0, 1024: 100.0, 2048: 47.6},
        "gated_delta_net": {256: 100.0, 512: 100.0, 1024: 78.7, 2048: 29.1},
        "mamba2": {256: 97.6, 512: 0.0, 1024: 0.0, 2048: 0.0},
    },
    "stack": {
        "kda": {256: 100.0, 512: 100.0, 1024: 100.0, 2048: 100.0},
        "gated_delta_net": {256: 100.0, 512: 100.0, 1024: 100.0, 2048: 100.0},
        "mamba2": {256: 100.0, 512: 100.0, 1024: 0.0, 2048: 0.0},
    },
}

# Accuracy in percent at this length after 2000, 4000, ... steps.
SYNTHETIC_CURVE_LENGTH = 1024
SYNTHETIC_EVERY = 2000
SYNTHETIC_CURVE = {
    "palindrome": {
        "kda": (18.2, 94.2, 98.9, 98.8, 99.6, 100.0),
        "gated_delta_net": (0.0, 0.0, 0.0, 30.0, 61.9, 76.9, 82.8, 98.7, 99.4, 97.0),
        "mamba2": (0.0,) * 10,
    },
    "mqar": {
        "kda": (93.4, 97.6, 99.1, 99.7, 100.0),
        "gated_delta_net": (0.0, 0.0, 0.0, 0.0, 0.0, 3.5, 12.9, 22.6, 41.7, 78.7),
        "mamba2": (0.0,) * 10,
    },
    "stack": {
        "kda": (58.9, 98.2, 99.4, 99.4, 99.6, 100.0),
        "gated_delta_net": (0.0, 63.3, 94.4, 99.2, 100.0),
        "mamba2": (0.0,) * 10,
    },
}

DECODE_SOURCE = "Kimi Linear, arXiv 2510.26692, Figures 1b and 7, digitised but for the ratios that it prints"
_CONTEXTS = tuple(4096 << i for i in range(9))  # 4K to 1M


def _by_context(*values: float) -> dict[int, float]:
    return dict(zip(_CONTEXTS, values, strict=True))


# Milliseconds per output token of one row.
DECODE_STEP = {
    "hybrid": _by_context(5.09, 5.12, 5.37, 5.41, 5.53, 5.74, 6.00, 6.66, 7.99),
    "mla": _by_context(5.32, 5.37, 6.20, 6.52, 6.88, 7.67, 9.10, 11.96, 17.76),
}
# The same of as many rows as the saved memory has room for, per row.
DECODE_LARGEST = {
    "hybrid": _by_context(0.100, 0.090, 0.090, 0.100, 0.150, 0.460, 0.650, 1.05, 1.84),
    "mla": _by_context(0.092, 0.134, 0.213, 0.400, 0.781, 1.83, 3.10, 5.88, 11.48),
}
# Seconds of a whole prompt.
PREFILL = {
    "hybrid": _by_context(0.097, 0.124, 0.186, 0.327, 0.642, 1.40, 3.21, 8.07, 22.7),
    "mla": _by_context(0.065, 0.099, 0.181, 0.359, 0.795, 2.00, 5.76, 18.6, 65.4),
}
# MLA's time over the hybrid's, where the figures print it.
DECODE_PRINTED = {
    "step": {512 << 10: 1.8, 1024 << 10: 2.2},
    "largest": {256 << 10: 4.8, 512 << 10: 5.7, 1024 << 10: 6.3},
    "prefill": {512 << 10: 2.3, 1024 << 10: 2.9},
}
CACHE_SAVING = "up to 75%"
ATTN_RES_INFERENCE = "less than 2%"  # more time, on "typical" workloads

# Of the baseline, by layer, from 0 to 26; gradients in 1e-5.
DYNAMICS_LAYERS = 27
DYNAMICS = {
    "output_rms": {5: 0.6, 10: 0.8, 15: 1.5, 20: 3.1, 24: 7.1, 26: 12.1},
    "gradient_rms": {0: 2.46, 2: 1.4, 10: 0.37, 26: 0.08},
}
DYNAMICS_ATTN_RES = {
    "output_rms": "saw-tooth of 0.1 to 1.9, highest at the last layer of each block",
    "gradient_rms": "0.71 at the first layer, then 0.1 to 0.4",
}

# (A, alpha) of L = A C^-alpha, C in PFLOP/s-days, by paper and model.
SCALING_LAWS = {
    "Kimi Linear, arXiv 2510.26692": {"mla": (2.3092, 0.0536), "hybrid": (2.2879, 0.0527)},
    "Attention Residuals, arXiv 2603.15031": {
        "hybrid": (1.891, 0.057),
        "block": (1.870, 0.058),
        "full": (1.865, 0.057),
    },
}
# How many times the compute the second model needs for the loss of the first.
SCALING_ADVANTAGE = {("hybrid", "mla"): 1.16, ("block", "hybrid"): 1.25}
SCALING_AT = 5.6  # PFLOP/s-days, where Attention Residuals states it; Kimi Linear does not say where
