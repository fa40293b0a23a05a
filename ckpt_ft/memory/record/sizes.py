"""The sizes that a kernel's time depends on beside its flops and bytes, as the fewest whole numbers.

matmuls: (batch, rows, columns, terms of each sum, UNEVEN where rows in memory are no multiple of 16 bytes or 0)
convolutions: the same of the matmul that they are, groups as batch; WINOGRAD where a window of 3 x 3 moves by 1,
    CHANNELS_FIRST where operands lie so that tensor cores cannot read them; or both added
depthwise convolutions: (values under all windows, WINDOW), more than once where a kernel takes longer for each
attention: (batch x heads, queries, keys, head size)
norms and softmax: (rows, bytes of a row)
transforms and sorts: (half passes over the data,)
elementwise: (elements, CAST) or (elements, STRIDED) where a thread takes its elements one by one, () where it loads
    16 bytes at once along memory; (elements, INDEXED) of what is fetched, or added to, by index
nll loss: (rows,)

shapes.py reads them off a call. They stand apart so that a record can be read without torch.
"""

from __future__ import annotations

Shape = tuple[int, ...]
UNEVEN, WINOGRAD, CHANNELS_FIRST = 1, 2, 4
CAST, STRIDED, INDEXED, WINDOW = 1, 2, 3, 4
TF32 = "tf32"  # what the dtype of fp32 operands is called that may be rounded so
