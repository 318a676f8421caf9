"""Attention Residuals, Table 4: ways to weigh what earlier layers have put out.

The paper trains a model of 16 layers with 436M active parameters; ours has as many layers, of 256 channels. Blocks are
of 4 sub-layers, as its S = 4. "mHC" has 4 streams and "depth heads" are 16, as there.
"""

from experiments.configs.table import Table

FULL = {"residual": "full_attn_res"}
BLOCK = {"residual": "block_attn_res", "block_size": 4}

TABLE = Table(
    name="attn_res_table4",
    source="Attention Residuals, arXiv 2603.15031, Table 4",
    measure="validation loss",
    rows={
        "PreNorm": {"residual": "standard"},
        "DenseFormer (static scalars)": {**FULL, "depth_weights": "dense_former"},
        "mHC": {"residual": "mhc"},
        "Full": FULL,
        "Full, query from the hidden state": {**FULL, "depth_query": "hidden"},
        "Full, static": {**FULL, "depth_weights": "static"},
        "Full, sigmoid": {**FULL, "depth_weights": "sigmoid"},
        "Full, no key norm": {**FULL, "depth_key_norm": False},
        "Full, embedding and last 8": {**FULL, "depth_window": 8},
        "Block": BLOCK,
        "Block, 16 depth heads": {**BLOCK, "depth_heads": 16},
        "Block, no key norm": {**BLOCK, "depth_key_norm": False},
    },
    baseline="PreNorm",
    paper={
        "PreNorm": 1.766,
        "DenseFormer (static scalars)": 1.767,
        "mHC": 1.747,
        "Full": 1.737,
        "Full, query from the hidden state": 1.731,
        "Full, static": 1.749,
        "Full, sigmoid": 1.741,
        "Full, no key norm": 1.743,
        "Full, embedding and last 8": 1.764,
        "Block": 1.746,
        "Block, 16 depth heads": 1.752,
        "Block, no key norm": 1.750,
    },
    training={
        "config": "tiny",
        "overrides": {
            "hidden_size": 256, "num_layers": 16, "kda_num_heads": 4, "kda_head_dim": 64, "mla_num_heads": 4,
            "kv_lora_rank": 128, "qk_nope_dim": 48, "qk_rope_dim": 16, "v_dim": 64, "ffn_width": 704,
        },
        "sequence_length": 1024, "batch_size": 32, "steps": 2000, "warmup": 100, "eval_every": 0, "sample_tokens": 0,
        "eval_tokens": 3 << 18,
    },
)  # fmt: skip
