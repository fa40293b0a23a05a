"""The colour of each category, the same in every picture.

Resident memory in cool colours, what a step adds in warm ones: Okabe and Ito's palette, safe for the colour-blind;
lighter on a dark ground.
"""

from __future__ import annotations

COLOURS = {  # on a light ground, on a dark one
    "parameters": ("#0072b2", "#2f8fd0"),
    "buffers": ("#003d66", "#6d8fb0"),
    "optimizer": ("#56b4e9", "#7cc7f0"),
    "gradients": ("#009e73", "#26b58c"),
    "activations": ("#e69f00", "#eab040"),
    "temporary": ("#d55e00", "#e27a35"),
    "communication": ("#cc79a7", "#d795ba"),
    "workspace": ("#999999", "#8d949c"),
}
