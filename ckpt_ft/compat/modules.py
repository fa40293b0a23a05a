"""The inside of torch's modules."""

from . import Table

__getattr__ = Table(
    __name__,
    "torch 2.11 to 2.14",
    """
children_of: torch.nn.Module()._modules
parameters_of: torch.nn.Module()._parameters
buffers_of: torch.nn.Module()._buffers
PARAMETERS: torch.nn.Module()._parameters
BUFFERS: torch.nn.Module()._buffers
    what a module holds, by name, at the speed of a dict, with what is None or there twice
APPLY: torch.nn.Module()._apply
    `to` and `half` of a block whose weights are in host memory, and of a lazy layer in a dry run
REPLICATE: torch.nn.Module()._replicate_for_data_parallel
    refuses nn.DataParallel, whose replicas would run on the parameters of the first device
caches: torch.nn.utils.parametrize()._cache_enabled
    within `parametrize.cached()`, a region's state includes the cache
compiled_call: torch.nn.Module()._compiled_call_impl
COMPILED_CALL: torch.nn.Module()._compiled_call_impl
    what `module.compile()` has compiled
foreach_types: torch.optim.optimizer._foreach_supported_types
clipped_types: torch.utils._foreach_utils._foreach_supported_types
    optimizers and clipping use foreach kernels on fake tensors
CAPTURABLE: torch.optim.optimizer()._get_capturable_supported_devices
    imported by the file of each optimizer
weight_cache: torch.nn.utils.parametrize()._cache
    nested adapters of packed experts read the weight again
""",
)
