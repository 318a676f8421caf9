"""Kimi Linear, Table 1: how many KDA layers to one of full attention, and parts of the KDA layer left out.

The paper trains its first scaling model (16 layers, 653M active parameters); ours has as many layers, of 256 channels.
"""

from experiments.configs.table import Table

TABLE = Table(
    name="kda_table1",
    source="Kimi Linear, arXiv 2510.26692, Table 1",
    measure="validation perplexity",
    rows={
        "3:1": {"mla_every": 4},
        "0:1 (all MLA)": {"mla_every": 1},
        "1:1": {"mla_every": 2},
        "7:1": {"mla_every": 8},
        "15:1": {"mla_every": 16},
        "no output gate": {"output_gate": None},
        "swish output gate": {"output_gate": "swish"},
        "no convolution": {"conv_width": 0},
    },
    baseline="3:1",
    paper={
        "3:1": 5.65,
        "0:1 (all MLA)": 5.77,
        "1:1": 5.66,
        "7:1": 5.70,
        "15:1": 5.82,
        "no output gate": 5.67,
        "swish output gate": 5.81,
        "no convolution": 5.70,
    },
    training={
        "config": "tiny",
        "overrides": {
            "hidden_size": 256, "num_layers": 16, "kda_num_heads": 4, "kda_head_dim": 64, "mla_num_heads": 4,
            "kv_lora_rank": 128, "qk_nope_dim": 48, "qk_rope_dim": 16, "v_dim": 64, "ffn_width": 704,
            "residual": "standard", "scan_layers": True,
        },
        "sequence_length": 1024, "batch_size": 32, "steps": 2000, "warmup": 100, "eval_every": 0, "sample_tokens": 0,
        "eval_tokens": 3 << 18,
    },
)  # fmt: skip
