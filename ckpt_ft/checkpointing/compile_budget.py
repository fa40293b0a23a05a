"""torch.compile's activation memory budget: one process-wide setting, which several models' policies may set."""

from __future__ import annotations


class CompileBudget:
    """One value of the setting. The value set last is active; values can be removed in any order."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.before = value

    def put_on(self) -> None:
        """Set the budget."""
        import torch._functorch.config as config

        self.before = config.activation_memory_budget
        config.activation_memory_budget = self.value
        _on.append(self)

    def take_off(self) -> None:
        """Restore the previous budget; do nothing if this value is not set (for example in a copied model)."""
        import torch._functorch.config as config

        if self not in _on:
            return
        at = _on.index(self)
        if self is _on[-1]:
            config.activation_memory_budget = self.before
        else:
            _on[at + 1].before = self.before
        del _on[at]


_on: list[CompileBudget] = []  # in the order in which they were set
