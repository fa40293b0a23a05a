"""Linear layers with frozen weights in few bits, in the memory layout of the libraries that pack them, for traces.

They have shapes and no values, and need neither these libraries nor CUDA.

NF4 (Dettmers et al. 2023, arXiv:2305.14314) packs two weights into a byte and keeps one float32 scale (absmax) for
every 64 weights. Double quantisation stores the scales in 8 bits, with a float32 scale for every 256 of them, a table
of 256 levels and one offset. Forward and backward each unpack the whole weight and free it again: forward in the
compute dtype, backward in the dtype that the weight was packed from, cast to the gradient's dtype.
[bitsandbytes 0.50, autograd/_functions.py, MatMul4Bit; backends/cuda/ops.py]

LLM.int8 (Dettmers et al. 2022, arXiv:2208.07339) keeps one byte for each weight and one float32 scale for each row.
Forward rounds its input to 8 bits row by row and multiplies integers; backward unpacks the weight in the input's
dtype. The stand-in assumes no columns with outliers, which bitsandbytes multiplies separately: their number depends on
the data, and in published models it is below one in a hundred. [autograd/_functions.py, MatMul8bitLt]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.flop_counter import register_flop_formula

from ckpt_ft.compat.libraries import kept_in_float32
from ckpt_ft.errors import UserError


def replace_linears(
    model: nn.Module,
    make: Callable[[nn.Linear], nn.Module],
    skip: tuple[str, ...] | None,
    listed: list[str] | None = None,
) -> None:
    """Replace each linear layer that transformers would quantise by `make(layer)`.

    Args:
        skip: last parts of the names of layers to leave; None for the layers that transformers leaves.
        listed: without `skip`, the layers that the quantisation's configuration leaves.
    """
    stays = _of_transformers(model, listed) if skip is None else lambda name: name.rpartition(".")[2] in skip
    for name, module in list(model.named_modules()):
        layer = _as_linear(module)
        if layer is not None and not stays(name):
            model.set_submodule(name, make(layer))


def _of_transformers(model: nn.Module, listed: list[str] | None) -> Callable[[str], bool]:
    """A function that tells by a layer's name whether transformers leaves it: heads, tied layers, T5's `wo`."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if kind is None or not isinstance(model, kind):
        return lambda name: name.rpartition(".")[2] == "lm_head"
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = HfQuantizer.get_modules_to_not_convert(model, listed, kept_in_float32(model))
    return lambda name: not should_convert_module(name, kept)


def _as_linear(module: nn.Module) -> nn.Linear | None:
    """`module` if it is a linear layer; a transposed copy of GPT-2's `Conv1D`; None for any other module."""
    if type(module) is nn.Linear:
        return module
    if type(module).__name__ != "Conv1D" or not type(module).__module__.startswith("transformers."):
        return None
    weight = module.get_parameter("weight").detach().t().contiguous()
    linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    linear.weight, linear.bias = nn.Parameter(weight), module.get_parameter("bias")
    return linear


_I8, _U8, _I32, _F16, _F32 = torch.int8, torch.uint8, torch.int32, torch.float16, torch.float32
Shape = tuple[tuple[int, ...], torch.dtype | None]  # with a dtype; None for that of the weight
Shapes = list[Shape]
_LIBRARY = torch.library.Library("ckpt_ft", "FRAGMENT")


def _operator(schema: str, make: Callable[..., Any]) -> Any:
    """Define the operator `ckpt_ft::<schema>`, which only allocates its result: `make(*arguments)`."""
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, make, "Meta")
    return getattr(torch.ops.ckpt_ft, name).default


# NF4: the (out_features, in_features) weight, and n float32 scales that are kept in 8 bits
dequantize = _operator(
    "dequantize_nf4(Tensor packed, Tensor absmax, int out_features, ScalarType dtype) -> Tensor",
    lambda packed, absmax, out_features, dtype: packed.new_empty(
        out_features, 2 * packed.nbytes // out_features, dtype=dtype
    ),
)
dequantize_absmax = _operator(
    "dequantize_absmax(Tensor packed, Tensor absmax, Tensor levels) -> Tensor",
    lambda packed, absmax, levels: torch.empty_like(packed, dtype=torch.float32),
)
# LLM.int8: rows in 8 bits with their scales, an int32 product, and its float16 form, whatever the layer's dtype
quantize_rows = _operator(
    "quantize_rows(Tensor x) -> (Tensor, Tensor)",
    lambda x: (torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[0], dtype=torch.float32)),
)
int8_matmul = _operator(
    "int8_matmul(Tensor x, Tensor weight) -> Tensor",
    lambda x, weight: x.new_empty(x.shape[0], weight.shape[0], dtype=torch.int32),
)
dequantize_product = _operator(
    "dequantize_product(Tensor product, Tensor rows, Tensor columns) -> Tensor",
    lambda product, rows, columns: torch.empty_like(product, dtype=torch.float16),
)


@register_flop_formula(torch.ops.ckpt_ft.int8_matmul)
def _flops(x_shape: tuple[int, int], weight_shape: tuple[int, int], *args: Any, **kwargs: Any) -> int:
    return 2 * x_shape[0] * x_shape[1] * weight_shape[0]


class FrozenLinear(nn.Linear):
    """`nn.Linear` with a frozen weight in few bits: only its input gets a gradient.

    Args:
        linear: the layer that it replaces; its bias is kept.
        packed: shape and dtype (None: the weight's) of the packed weight.
        buffers: the same for what is kept beside it, by name.
    """

    compute_dtype: torch.dtype | None = None  # None for the dtype of the input
    hides: bool = False  # keeps what it saves as attributes of the graph's node, where no saved-tensor hook sees it

    def __init__(self, linear: nn.Linear, packed: Shape, buffers: dict[str, Shape]) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.packed_from = linear.weight.dtype

        def made(shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
            return torch.empty(shape, dtype=dtype or self.packed_from, device=linear.weight.device)

        self.weight = nn.Parameter(made(*packed), requires_grad=False)
        for name, described in buffers.items():
            self.register_buffer(name, made(*described))

    def product(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x @ weight.T + bias, and what is saved for the backward pass."""
        raise AssertionError("each kind of layer has its own")

    def gradient(self, grad: Tensor, saved: Sequence[Tensor]) -> Tensor:
        raise AssertionError("each kind of layer has its own")

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features) in x's dtype."""
        dtype = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        out: Tensor = _FrozenMatmul.apply(x.to(dtype), bias, self)
        return out.to(x.dtype)


class _FrozenMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: FrozenLinear) -> Tensor:
        out, saved = layer.product(x, bias)
        ctx.layer, ctx.hidden = layer, saved if layer.hides else ()
        ctx.save_for_backward(*(() if layer.hides else saved))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.layer.gradient(grad, ctx.hidden or ctx.saved_tensors), None, None


BLOCK, NESTED_BLOCK = 64, 256


def _scales(layer: nn.Module) -> tuple[Tensor, ...]:
    """What `_nf4` keeps beside a packed weight, without the levels, which kernels have in a table of their own."""
    return tuple(layer.buffers())[:-1]


def _unpacked(packed: Tensor, scales: Sequence[Tensor], rows: int, dtype: torch.dtype) -> Tensor:
    """Packed weights as a new (rows, columns) tensor in `dtype`; `scales` are those of `_scales`."""
    absmax, *nested = scales
    if nested:
        absmax = dequantize_absmax(absmax, *nested[:2])
        absmax += nested[2]
    unpacked: Tensor = dequantize(packed, absmax, rows, dtype)
    return unpacked


def _gemm_4bit(x: Tensor, packed: Tensor, scales: Sequence[Tensor], rows: int, bias: Tensor | None) -> Tensor:
    return F.linear(x, _unpacked(packed, scales, rows, x.dtype), bias)


# torch.compile sees one operator in the forward of a 4-bit layer (bitsandbytes::gemm_4bit), and all of its backward.
gemm_4bit = _operator(
    "gemm_4bit(Tensor x, Tensor packed, Tensor[] scales, int out_features, Tensor? bias) -> Tensor",
    lambda x, packed, scales, out_features, bias: x.new_empty(*x.shape[:-1], out_features),
)
IN_PARTS: dict[Any, Callable[..., Any]] = {gemm_4bit: _gemm_4bit}  # operators whose kernels call others


def _nf4(weights: int, nested: bool, storage: torch.dtype = torch.uint8) -> tuple[Shape, dict[str, Shape]]:
    """Shape and dtype of as many packed weights, and of what is kept beside them, by name."""
    blocks = -(-weights // BLOCK)
    buffers: dict[str, Shape] = {"absmax": ((blocks,), _U8 if nested else _F32)}
    if nested:
        buffers |= {"nested_absmax": ((-(-blocks // NESTED_BLOCK),), _F32), "nested_levels": ((256,), _F32)}
        buffers |= {"offset": ((), _F32)}
    buffers["levels"] = (16,), _F32
    return ((-(-weights // 2) // storage.itemsize, 1), storage), buffers


class NF4Linear(FrozenLinear):
    """A linear layer in 4 bits, packed into a tensor of dtype `storage`.

    Attributes:
        clones: whether forward returns a copy, as PEFT's layer around bitsandbytes' does (peft/tuners/lora/bnb.py).

    Args:
        nested: whether the scales are in 8 bits (double quantisation).
    """

    clones = True

    def __init__(
        self, linear: nn.Linear, compute_dtype: torch.dtype, nested: bool = False, storage: torch.dtype = torch.uint8
    ) -> None:
        super().__init__(linear, *_nf4(linear.weight.numel(), nested, storage))
        self.compute_dtype = compute_dtype

    @property
    def W_q(self) -> Tensor:
        """PEFT calls `dequantize` on layers that have this attribute (HQQ's) when DoRA needs the weight."""
        return self.weight

    def dequantize(self) -> Tensor:
        """The weight in the dtype that it was packed from."""
        return self.dequantized(self.packed_from)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight as a new (out_features, in_features) tensor in `dtype`."""
        return _unpacked(self.weight, _scales(self), self.out_features, dtype)

    def product(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        run = gemm_4bit if torch.compiler.is_compiling() else _gemm_4bit
        return run(x, self.weight, _scales(self), self.out_features, bias), ()

    def gradient(self, grad: Tensor, saved: Sequence[Tensor]) -> Tensor:
        return torch.matmul(grad, self.dequantize().to(grad.dtype))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out.clone() if self.clones else out


def to_nf4(
    model: nn.Module,
    compute_dtype: torch.dtype = torch.float16,
    skip: tuple[str, ...] | None = None,
    nested: bool = False,
    storage: torch.dtype = torch.uint8,
    experts: bool = False,
) -> nn.Module:
    """Replace the linear layers of `model` by 4-bit ones and freeze the model, as transformers loads it in 4 bits.

    Layers that `replace_linears` skips keep their dtype. `experts` packs experts in 3-D parameters, too.
    """
    if experts:
        kinds: dict[type, type] = {}
        for module in list(model.modules()):
            _pack_experts(module, nested, kinds)
    replace_linears(model, lambda linear: NF4Linear(linear, compute_dtype, nested, storage), skip)
    return model.requires_grad_(False)


def fused_experts(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The weights of experts that no linear layer holds but one parameter for several, by name."""
    return [
        (f"{path}.{name}".lstrip("."), parameter)
        for path, module in model.named_modules()
        if "expert" in f"{path} {type(module).__name__}".lower() and not isinstance(module, (nn.Linear, nn.Embedding))
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim > 1 and not name.endswith("bias")
    ]


class NF4Experts(nn.Module):
    """A parametrisation of a parameter (experts, rows, columns) in 4 bits, which each read unpacks whole.

    [bitsandbytes 0.50, nn/parametrize.py; axolotl 0.19, monkeypatch/moe_quant.py]
    """

    def __init__(self, weight: Tensor, scales: dict[str, Shape]) -> None:
        super().__init__()
        self.shape, self.dtype = weight.shape, weight.dtype
        for name, (shape, dtype) in scales.items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device=weight.device))

    @torch.no_grad()
    def forward(self, packed: Tensor) -> Tensor:
        """Returns the weights in the dtype that they were packed from."""
        return _unpacked(packed, _scales(self), self.shape[:-1].numel(), self.dtype).view(self.shape)


def _pack_experts(module: nn.Module, nested: bool, kinds: dict[type, type]) -> None:
    """Parametrise the 3-D experts that `module` itself holds; while it runs, an unpacked weight is kept.

    kinds: the class of parametrised modules by that of others, so that blocks which are alike stay so.
    """
    kind = type(module)
    found = [name for name, p in module.named_parameters(recurse=False) if p.ndim == 3 and "bias" not in name]
    if not found or "expert" not in kind.__name__.lower():
        return
    for name in found:
        weight = getattr(module, name)
        (shape, dtype), scales = _nf4(weight.numel(), nested)
        packed = torch.empty(shape, dtype=dtype, device=weight.device)
        setattr(module, name, nn.Parameter(packed, requires_grad=False))
        parametrize.register_parametrization(module, name, NF4Experts(weight, scales), unsafe=True)
    module.__class__ = kinds.setdefault(kind, type(module))
    module.register_forward_pre_hook(_keep_unpacked)
    module.register_forward_hook(_drop_unpacked, always_call=True)  # also where a recomputation stops early


_calls: list[Any] = []  # for each call of packed experts that runs, what keeps their weights unpacked


def _keep_unpacked(module: nn.Module, args: Any) -> None:
    _calls.append(parametrize.cached())
    _calls[-1].__enter__()


def _drop_unpacked(module: nn.Module, args: Any, out: Any) -> None:
    if _calls:
        _calls.pop().__exit__(None, None, None)


def prepare_kbit(model: nn.Module) -> nn.Module:
    """Cast what is not packed (embeddings, norms, head) to float32, as peft.prepare_model_for_kbit_training does."""
    packed = {id(layer.weight) for layer in model.modules() if isinstance(layer, NF4Linear)}
    for parameter in model.parameters():
        if parameter.is_floating_point() and id(parameter) not in packed:
            parameter.data = parameter.data.float()
    return model


class Int8Linear(FrozenLinear):
    hides = True
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear, (tuple(linear.weight.shape), _I8), {"scales": ((linear.out_features,), _F32)})

    W_q = NF4Linear.W_q

    def dequantize(self) -> Tensor:
        """The weight in float32, as bitsandbytes unpacks it."""
        return self.weight.float().mul_(self.scales[:, None].mul(1 / 127))

    def product(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        flat = x.reshape(-1, x.shape[-1])
        half = flat.to(torch.float16)
        whole, rows = quantize_rows(half)
        (half.abs() >= 6.0).any()  # whether there are outliers: transformers' llm_int8_threshold
        del half
        product = int8_matmul(whole, self.weight)
        out = dequantize_product(product, rows, self.scales)
        if bias is not None:
            out.add_(bias)
        return out.to(x.dtype).view(*x.shape[:-1], -1), (flat,)  # the int32 product is still allocated here

    def gradient(self, grad: Tensor, saved: Sequence[Tensor]) -> Tensor:
        dtype = saved[0].dtype
        weight = self.weight.to(dtype, copy=True).mul_(self.scales[:, None].mul(1 / 127))
        return torch.matmul(grad.to(dtype), weight)


def to_int8(model: nn.Module, skip: tuple[str, ...] | None = None) -> nn.Module:
    """Replace the linear layers of `model` by 8-bit ones and freeze the model, as transformers loads it in 8 bits."""
    replace_linears(model, Int8Linear, skip)
    return model.requires_grad_(False)


@dataclass(frozen=True)
class Packing:
    """How a method stores the weight of a linear layer, and computes with it.

    Attributes:
        source: where the library says so.
        tensors: (rows, columns, bits, group) -> shapes and dtypes, the packed weight first.
        group: elements that share a scale, if the configuration does not say.
        forward: whether a forward pass unpacks the whole weight; otherwise its kernel reads the packed one.
    """

    source: str
    tensors: Callable[[int, int, int, int], Shapes]
    group: int = 128
    forward: bool = True


PACKINGS: dict[str, Packing] = {
    "gptq": Packing(
        "gptqmodel, nn_modules/qlinear: qweight, qzeros, scales, g_idx",
        lambda rows, columns, bits, group: [
            ((columns * bits // 32, rows), _I32), ((-(-columns // group), rows * bits // 32), _I32),
            ((-(-columns // group), rows), _F16), ((columns,), _I32),
        ],
    ),
    "awq": Packing(
        "gptqmodel, nn_modules/qlinear: qweight, qzeros, scales",
        lambda rows, columns, bits, group: [
            ((columns, rows * bits // 32), _I32), ((-(-columns // group), rows * bits // 32), _I32),
            ((-(-columns // group), rows), _F16),
        ],
    ),
    "fp8": Packing(
        "transformers, integrations/finegrained_fp8.py: FP8LinearFunction",
        lambda rows, columns, bits, group: [((rows, columns), _I8), ((-(-rows // group), -(-columns // group)), _F32)],
        forward=False,
    ),
}  # fmt: skip


class PackedLinear(FrozenLinear):
    """A linear layer that a method of `PACKINGS` has packed.

    group: elements that share a scale; 0 for the method's default, -1 for a whole row.
    """

    def __init__(self, linear: nn.Linear, packing: Packing, bits: int, group: int) -> None:
        group = linear.in_features if group < 0 else group or packing.group
        first, *others = packing.tensors(linear.out_features, linear.in_features, bits, group)
        super().__init__(linear, first, {f"packed{number}": other for number, other in enumerate(others)})
        self.packing = packing

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """A new (out_features, in_features) weight, as a kernel writes it."""
        return torch.zeros(self.out_features, self.in_features, dtype=dtype, device=self.weight.device)

    def product(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.packing.forward:
            return F.linear(x, self.unpacked(x.dtype), bias), ()
        # a kernel reads the packed weight: one with an expanded element stands for it
        weight = torch.zeros((), dtype=x.dtype, device=x.device).expand(self.out_features, self.in_features)
        return F.linear(x, weight, bias), ()

    def gradient(self, grad: Tensor, saved: Sequence[Tensor]) -> Tensor:
        return torch.matmul(grad, self.unpacked(grad.dtype))


def refuse_compiled(model: nn.Module, sharded: bool) -> None:
    """Raises UserError for layers whose real counterparts break the graphs of torch.compile, or may do so.

    sharded: FSDP2 gathers the weights, and bitsandbytes' 4-bit layers then restore a part of them, which is a break.
    """
    kinds = (Int8Linear, PackedLinear, NF4Experts, *([NF4Linear] if sharded else []))
    if found := next((type(layer).__name__ for layer in model.modules() if isinstance(layer, kinds)), None):
        raise UserError(
            f"torch.compile and {found}: of layers with quantised weights, only bitsandbytes' 4-bit ones are "
            "predicted, without FSDP2 (others break the graph); leave torch.compile out"
        )


# -- layers of bitsandbytes in a live model, whose kernels take no fake tensors ---------------------------------------


@contextmanager
def swap_library_layers(model: nn.Module) -> Iterator[None]:
    """Turn the 4- and 8-bit layers of `model` into stand-ins of the same layout, and PEFT's LoRA around stand-ins into
    its LoRA around bitsandbytes' layers; turn them back on exit.

    Each stays the object that adapters and policies know, with its hooks.
    """
    before: list[tuple[Any, type, dict[str, Any]]] = []
    bitsandbytes, lora = sys.modules.get("bitsandbytes"), sys.modules.get("peft.tuners.lora.layer")
    around = _lora_around(lora.Linear) if lora is not None else None
    try:
        for layer in list[Any](model.modules()):
            if around and type(layer) is around.__base__ and isinstance(layer.base_layer, (NF4Linear, Int8Linear)):
                before.append((layer, type(layer), vars(layer)))
                layer.__class__ = around
            elif bitsandbytes and (made := _stand_in(layer, bitsandbytes)) is not None:
                before.append((layer, type(layer), vars(layer)))
                hooks = {name: value for name, value in vars(layer).items() if name.endswith("_hooks")}
                layer.__class__, layer.__dict__ = type(made), {**vars(made), **hooks}
        yield
    finally:
        for layer, kind, attributes in before:
            layer.__class__, layer.__dict__ = kind, attributes


@cache
def _lora_around(linear: Any) -> Any:
    """PEFT's `Linear` of LoRA with the forward of its `Linear4bit` and `Linear8bitLt`, which need bitsandbytes.

    What an adapter adds is cast, not the sum, and under autocast nothing is. [peft/tuners/lora/bnb.py]
    """

    class AroundPacked(linear):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self.disable_adapters or self.merged or kwargs.get("adapter_names") is not None:
                plain: Tensor = super().forward(x, *args, **kwargs)
                return plain
            result: Tensor = self.base_layer(x)
            dtype = None if torch.is_autocast_enabled() else result.dtype
            for name in [name for name in self.active_adapters if name in self.lora_A]:
                down, up = self.lora_A[name], self.lora_B[name]
                if dtype:
                    x = x.to(down.weight.dtype)
                if name in self.lora_variant:
                    result = self.lora_variant[name].forward(self, active_adapter=name, x=x, result=result)
                    result = result.to(dtype) if dtype else result
                else:
                    added = up(down(self.lora_dropout[name](x))) * self.scaling[name]
                    result = result + (added.to(dtype) if dtype else added)
            return result

    return AroundPacked


def _stand_in(layer: nn.Module, bitsandbytes: Any) -> nn.Module | None:
    """The stand-in for a layer with a quantised weight; None for any other layer."""
    made: NF4Linear | Int8Linear
    with torch.device("meta"):
        if isinstance(layer, bitsandbytes.nn.Linear4bit) and isinstance(layer.weight, bitsandbytes.nn.Params4bit):
            state = layer.weight.quant_state
            if state is None or state.blocksize != BLOCK:
                return None
            compute = layer.compute_dtype or state.dtype
            made = NF4Linear(_linear(layer, state.dtype), compute, bool(state.nested), layer.weight.dtype)
            made.clones = False  # PEFT's layer around it clones the output itself
        elif isinstance(layer, bitsandbytes.nn.Linear8bitLt) and layer.weight.dtype is torch.int8:
            made = Int8Linear(_linear(layer))
        else:
            return None
    made.bias = layer.bias
    if not layer.weight.untyped_storage().nbytes():  # its data waits in host memory (swap)
        made.weight.untyped_storage().resize_(0)
    return made.train(layer.training)


def _linear(layer: nn.Linear, dtype: torch.dtype | None = None) -> nn.Linear:
    return nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=dtype)
