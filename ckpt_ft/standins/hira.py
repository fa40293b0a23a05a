"""PEFT's HiRA over 4-bit weights, whose layer reads bitsandbytes' own classes: its like over the stand-in of those."""

from __future__ import annotations

import torch
from peft.tuners.hira.layer import Linear
from torch import Tensor
from torch.nn import functional as F


class HiraOverNF4(Linear):
    """The weight is unpacked once more beside the base layer, and multiplied. [peft/tuners/hira/bnb.py, Linear4bit]"""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        result: Tensor = self.base_layer(x)
        weight = self.get_base_layer().dequantize()
        converts = not torch.is_autocast_enabled()
        for name in self.active_adapters:
            factors = self.hira_B[name] @ self.hira_A[name]
            x = self._cast_input_dtype(x, factors.dtype) if converts else x
            added = F.linear(self.hira_dropout[name](x), weight * factors)
            result = result + (added.to(result.dtype) if converts else added)
        return result
