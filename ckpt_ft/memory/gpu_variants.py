"""GPUs that differ from a measured card of their generation in size only: other SMs, memory, bandwidth and clock.

Within a generation, the rates of tensor cores are the same multiple of fp32's (NVIDIA's whitepapers of Turing, GA102,
Ada, Hopper and RTX Blackwell), and so are the measured shares of these rates. The columns:

- SMs, GB/s, fp32 TFLOP/s at boost: the datasheet. For a laptop, at the highest boost clock that NVIDIA lists, which
  the laptop's power limit may not allow for long.
- GiB: as CUDA reports it, quoted in public issue trackers; ~ marks cards without such a message, which have the value
  of a card of the same size and generation.

Half of the CUDA context is assumed to grow with the SMs (the local memory of their resident threads).
"""

from __future__ import annotations

LAPTOP_NOTE = "a laptop's rates are those of its highest boost clock, which its power limit may not let it hold"

# fmt: off
GPU_VARIANTS: tuple[tuple[str, str, int, float, float, float], ...] = (
    # name                like                 SMs  GiB     GB/s    fp32
    ("rtx-2060",          "rtx-2080-ti",       30,  5.79,   336,    6.5),
    ("rtx-2060-super",    "rtx-2080-ti",       34,  7.79,   448,    7.2),
    ("rtx-2070",          "rtx-2080-ti",       36,  7.79,   448,    7.5),
    ("rtx-2070-super",    "rtx-2080-ti",       40,  7.79,   448,    9.1),
    ("rtx-2080",          "rtx-2080-ti",       46,  7.79,   448,    10.1),
    ("rtx-2080-super",    "rtx-2080-ti",       48,  7.79,   496,    11.2),
    ("quadro-rtx-5000",   "quadro-rtx-8000",   48,  15.75,  448,    11.2),  # ~
    ("quadro-rtx-6000",   "quadro-rtx-8000",   72,  23.65,  672,    16.3),
    ("titan-rtx",         "quadro-rtx-8000",   72,  23.65,  672,    16.3),
    ("rtx-3050",          "rtx-3090",          20,  7.79,   224,    9.1),
    ("rtx-3060",          "rtx-3090",          28,  11.76,  360,    12.7),
    ("rtx-3060-ti",       "rtx-3090",          38,  7.79,   448,    16.2),
    ("rtx-3070",          "rtx-3090",          46,  7.79,   448,    20.3),
    ("rtx-3070-ti",       "rtx-3090",          48,  7.79,   608,    21.7),
    ("rtx-3080",          "rtx-3090",          68,  9.78,   760,    29.8),
    ("rtx-3080-12gb",     "rtx-3090",          70,  11.77,  912,    30.6),
    ("rtx-3080-ti",       "rtx-3090",          80,  11.77,  912,    34.1),
    ("rtx-3090-ti",       "rtx-3090",          84,  23.69,  1008,   40.0),
    ("rtx-3060-laptop",   "rtx-3090",          30,  5.81,   336,    13.1),
    ("rtx-3070-laptop",   "rtx-3090",          40,  7.79,   448,    16.6),
    ("rtx-3080-laptop",   "rtx-3090",          48,  15.74,  448,    21.0),
    ("rtx-3080-ti-laptop", "rtx-3090",         58,  15.74,  512,    23.6),  # ~
    ("a2000",             "a6000",             26,  11.75,  288,    8.0),   # ~
    ("a4000",             "a6000",             48,  15.73,  448,    19.2),
    ("a4500",             "a6000",             56,  19.68,  640,    23.7),  # ~
    ("a5000",             "a6000",             64,  23.68,  768,    27.8),
    ("a5500",             "a6000",             80,  23.68,  768,    34.1),  # ~
    ("a10",               "a6000",             72,  22.06,  600,    31.2),
    ("a40",               "a6000",             84,  44.56,  696,    37.4),
    ("a2",                "a6000",             10,  14.62,  200,    4.5),   # ~
    ("rtx-4060",          "rtx-4090",          24,  7.75,   272,    15.1),
    ("rtx-4060-ti-8gb",   "rtx-4090",          34,  7.75,   288,    22.1),
    ("rtx-4060-ti-16gb",  "rtx-4090",          34,  15.60,  288,    22.1),  # ~
    ("rtx-4070",          "rtx-4090",          46,  11.72,  504,    29.1),
    ("rtx-4070-super",    "rtx-4090",          56,  11.72,  504,    35.5),
    ("rtx-4070-ti",       "rtx-4090",          60,  11.72,  504,    40.1),
    ("rtx-4070-ti-super", "rtx-4090",          66,  15.70,  672,    44.1),
    ("rtx-4080",          "rtx-4090",          76,  15.70,  716.8,  48.7),
    ("rtx-4080-super",    "rtx-4090",          80,  15.70,  736,    52.2),
    ("rtx-4090-d",        "rtx-4090",          114, 23.64,  1008,   73.5),
    ("rtx-4050-laptop",   "rtx-4090",          20,  5.77,   192,    12.1),
    ("rtx-4060-laptop",   "rtx-4090",          24,  7.75,   256,    14.6),
    ("rtx-4070-laptop",   "rtx-4090",          36,  7.75,   256,    20.0),
    ("rtx-4080-laptop",   "rtx-4090",          58,  11.72,  432,    33.9),  # ~
    ("rtx-4090-laptop",   "rtx-4090",          76,  15.70,  576,    39.7),
    ("rtx-2000-ada",      "rtx-6000-ada",      22,  15.60,  224,    12.0),  # ~
    ("rtx-4000-ada",      "rtx-6000-ada",      48,  19.55,  360,    26.7),  # ~
    ("rtx-4500-ada",      "rtx-6000-ada",      60,  23.52,  432,    39.6),  # ~
    ("rtx-5000-ada",      "rtx-6000-ada",      100, 31.49,  576,    65.3),  # ~
    ("l20",               "l40",               92,  44.39,  864,    59.8),  # ~
    ("a800-80gb",         "a100-80gb",         108, 79.25,  2039,   19.5),
    ("h800",              "h100",              132, 79.11,  3350,   67.0),
    ("gh200",             "h100",              132, 94.50,  4000,   67.0),
    ("rtx-5050",          "rtx-5090",          20,  7.65,   320,    13.2),  # ~
    ("rtx-5060",          "rtx-5090",          30,  7.65,   448,    19.2),  # ~
    ("rtx-5060-ti-8gb",   "rtx-5090",          36,  7.65,   448,    23.7),  # ~
    ("rtx-5060-ti-16gb",  "rtx-5090",          36,  15.45,  448,    23.7),
    ("rtx-5070",          "rtx-5090",          48,  11.50,  672,    30.9),  # ~
    ("rtx-5070-ti",       "rtx-5090",          70,  15.46,  896,    43.9),
    ("rtx-5080",          "rtx-5090",          84,  15.47,  960,    56.3),
    ("rtx-5060-laptop",   "rtx-5090",          26,  7.65,   384,    16.6),  # ~
    ("rtx-5070-laptop",   "rtx-5090",          36,  7.65,   384,    21.6),  # ~
    ("rtx-5070-ti-laptop", "rtx-5090",         46,  11.50,  672,    26.1),  # ~
    ("rtx-5080-laptop",   "rtx-5090",          60,  15.45,  896,    35.1),  # ~
    ("rtx-5090-laptop",   "rtx-5090",          82,  23.42,  896,    45.3),
    ("rtx-pro-4000",      "rtx-pro-6000",      70,  23.42,  672,    46.9),  # ~
    ("rtx-pro-4500",      "rtx-pro-6000",      82,  31.36,  896,    54.9),  # ~
    ("rtx-pro-5000",      "rtx-pro-6000",      110, 47.40,  1344,   73.7),  # ~
)
# fmt: on
