"""The colour of each category of memory, the same in every picture and in the order in which pictures stack them.

Resident memory has cool colours, and what a step adds has warm ones. The palette is Okabe and Ito's, which is safe for
colour-blind readers; each colour is lighter on a dark background.
"""

from __future__ import annotations

CATEGORY_COLOURS = {  # on a light background, on a dark one
    "parameters": ("#0072b2", "#2f8fd0"),
    "buffers": ("#003d66", "#6d8fb0"),
    "gradients": ("#009e73", "#26b58c"),
    "optimizer": ("#56b4e9", "#7cc7f0"),
    "activations": ("#e69f00", "#eab040"),
    "temporary": ("#d55e00", "#e27a35"),
    "communication": ("#cc79a7", "#d795ba"),
    "workspace": ("#999999", "#8d949c"),
}
