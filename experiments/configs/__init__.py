"""One file per table of a paper: its rows as models of ours, what they are trained with, what the paper found."""

from experiments.configs import (
    attn_res_block_size,
    attn_res_dynamics,
    attn_res_table4,
    depth_width,
    kda_positions,
    kda_table1,
)
from experiments.configs.table import SOURCES, Table

__all__ = ["SOURCES", "TABLES", "Table"]

_MODULES = kda_table1, kda_positions, attn_res_table4, attn_res_block_size, attn_res_dynamics, depth_width

TABLES: dict[str, Table] = {module.TABLE.name: module.TABLE for module in _MODULES}
