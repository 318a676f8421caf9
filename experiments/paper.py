"""Numbers of the papers that `experiments.report` sets beside ours. What is typed by hand is typed here, once.

SYNTHETIC: Kimi Linear (arXiv 2510.26692), Figure 4. The paper prints no numbers for it; these are read from the vector
paths of its PDF, a way that finds the numbers which the paper does print (in Figure 1b) to 0.1%.
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

# Accuracy in percent at length 1024 after 2000, 4000, ... steps.
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
