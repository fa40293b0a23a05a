"""torch.compile's activation memory budget, one setting of the process that several models' policies may want."""

from __future__ import annotations


class CompileBudget:
    """A value of the setting; the one put on last is in force, whichever order they are taken off in."""

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
        """Set the budget to what it was below this one; one that is not on (of a copied model) does nothing."""
        import torch._functorch.config as config

        if self not in _on:
            return
        at = _on.index(self)
        if self is _on[-1]:
            config.activation_memory_budget = self.before
        else:
            _on[at + 1].before = self.before
        del _on[at]


_on: list[CompileBudget] = []  # in the order in which they were put on
