"""Attention Residuals, Figure 7: deep and narrow or shallow and wide, with and without AttnRes.

At equal compute and active parameters the paper varies d_model / L_b (channels to layers) from 15 to 75 and H / L_b
(heads to layers) from 0.3 to 0.7. Best of all is H / L_b = 0.3, there at d_model / L_b = 60 without AttnRes (1.847) and
at 45 with it (1.802): AttnRes favours deeper models. It wins in all 25 cells. No row of ours is one of those models.

Ours have equal parameters without embedding and head, to 1.6%, and H / L_b = 0.25 with heads of 64. d_ff / d_model is
2.5 to 2.8: no closer, so that widths are multiples of 8. From 8 to 32 layers d_model / L_b falls from 52 to 4.
"""

from experiments.configs import attn_res_table4
from experiments.configs.table import Table

WIDTHS = {8: (416, 1152), 12: (320, 864), 16: (256, 704), 24: (176, 464), 32: (120, 304)}  # layers: channels, FFN's
KINDS = {"PreNorm": "standard", "Full": "full_attn_res"}


def _sizes(layers: int) -> dict[str, int]:
    hidden, ffn = WIDTHS[layers]
    heads = layers // 4
    return dict(num_layers=layers, hidden_size=hidden, ffn_width=ffn, kda_num_heads=heads, mla_num_heads=heads)


TABLE = Table(
    name="depth_width",
    source="Attention Residuals, arXiv 2603.15031, Figure 7",
    measure="validation loss",
    rows={
        f"{name}, {layers} layers": {"residual": residual, **_sizes(layers)}
        for layers in WIDTHS
        for name, residual in KINDS.items()
    },
    baseline="PreNorm, 16 layers",
    paper={},
    training=attn_res_table4.TABLE.training,
)
