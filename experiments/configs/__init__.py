"""One file per table of a paper: its rows as models of ours, what they are trained with, what the paper found."""

from experiments.configs import attn_res_dynamics, attn_res_table4, kda_table1
from experiments.configs.table import SOURCES, Table

__all__ = ["SOURCES", "TABLES", "Table"]

TABLES: dict[str, Table] = {
    table.name: table for table in (kda_table1.TABLE, attn_res_table4.TABLE, attn_res_dynamics.TABLE)
}
