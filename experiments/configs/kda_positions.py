"""Kimi Linear, Table 5: full attention without positions (NoPE) or with rotary ones, and Gated DeltaNet for KDA.

The paper's numbers are averages over long-context tasks at 128k tokens, where higher is better: MLA 52.2, GDN-H (the
hybrid of Gated DeltaNet) 51.2, the hybrid of KDA with RoPE 51.8 and as released, with NoPE, 54.5. It gives no losses,
so none of its numbers stand beside ours. Ours see 1024 tokens: they tell what positions are worth in short documents,
not how a model goes on past those it was trained on. "GDN" has one decay per head and is else the KDA layer.
"""

from experiments.configs import kda_table1
from experiments.configs.table import Table

ROPE = {"mla_rope_theta": 10000.0}

TABLE = Table(
    name="kda_positions",
    source="Kimi Linear, arXiv 2510.26692, the models of Table 5",
    measure="average over long-context tasks",
    rows={
        "KDA, NoPE": {"mla_every": 4},
        "KDA, RoPE": {"mla_every": 4, **ROPE},
        "GDN, NoPE": {"mla_every": 4, "kda_gate": "head"},
        "all MLA, NoPE": {"mla_every": 1},
        "all MLA, RoPE": {"mla_every": 1, **ROPE},
    },
    baseline="KDA, NoPE",
    paper={},
    training=kda_table1.TABLE.training,
)
