"""Attention Residuals, Figure 6: how many sub-layers share a block, and with it a source.

At S = 1 every sub-layer is a block (Full); at S = 32 the 16 layers are one, whose sum is weighed against the embedding.
"""

from experiments.configs import attn_res_table4
from experiments.configs.table import Table

TABLE = Table(
    name="attn_res_block_size",
    source="Attention Residuals, arXiv 2603.15031, Figure 6",
    measure="validation loss",
    rows={
        "PreNorm": {"residual": "standard"},
        "S = 1 (Full)": {"residual": "full_attn_res"},
        "S = 2": {"residual": "block_attn_res", "block_size": 2},
        "S = 4": {"residual": "block_attn_res", "block_size": 4},
        "S = 8": {"residual": "block_attn_res", "block_size": 8},
        "S = 16": {"residual": "block_attn_res", "block_size": 16},
        "S = 32": {"residual": "block_attn_res", "block_size": 32},
    },
    baseline="PreNorm",
    paper={
        "PreNorm": 1.766,
        "S = 1 (Full)": 1.737,
        "S = 2": 1.746,
        "S = 4": 1.746,
        "S = 8": 1.748,
        "S = 16": 1.753,
        "S = 32": 1.757,
    },
    training=attn_res_table4.TABLE.training,
)
