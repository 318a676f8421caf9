"""Attention Residuals, Figure 5: outputs and gradients over the depth while a model is trained.

The paper draws its run of 48B parameters; ours are three rows of its Table 4, profiled ten times.
"""

from experiments.configs import attn_res_table4
from experiments.configs.table import Table

ROWS = ("PreNorm", "Full", "Block")

TABLE = Table(
    name="attn_res_dynamics",
    source="Attention Residuals, arXiv 2603.15031, Figure 5",
    measure="validation loss (Table 4)",
    rows={row: attn_res_table4.TABLE.rows[row] for row in ROWS},
    baseline="PreNorm",
    paper={row: attn_res_table4.TABLE.paper[row] for row in ROWS},
    training={**attn_res_table4.TABLE.training, "profile_every": 200},
)
