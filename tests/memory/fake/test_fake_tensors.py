"""Fake tensors from the fast constructor equal those from torch's constructor."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ckpt_ft.memory.fake.faked_model import CPU, Fakes, are_fakes


def properties(tensor: Tensor) -> tuple[object, ...]:
    assert type(tensor) is FakeTensor
    layout = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device
    return *layout, tensor.requires_grad, tensor.is_leaf, torch._C._dispatch_keys(tensor).raw_repr(), vars(tensor)


def test_fast_fake_tensors_equal_torchs() -> None:
    mode = FakeTensorMode()
    fakes = Fakes(mode)
    meta = torch.empty_strided((2, 3), (1, 2), dtype=torch.float16, device="meta")
    reals = [nn.Parameter(meta, trains) for trains in (True, False)]
    made = fakes.new((2, 3), (1, 2), torch.float16)
    assert properties(made) == properties(FakeTensor(mode, meta, CPU))
    assert properties(fakes.like(meta)) == properties(made)
    with mode:
        row, slow = fakes.view(made, (2,), (1,), 2, torch.float16), made.as_strided((2,), (1,), 2)
        assert properties(row) == properties(slow)
        assert row.untyped_storage()._cdata == made.untyped_storage()._cdata
        for real in reals:
            trains = real.requires_grad
            parameter, slow = fakes.parameter(real), nn.Parameter(fakes.like(real), trains)
            assert isinstance(parameter, nn.Parameter)
            assert properties(parameter) == properties(slow)


def test_are_fakes_looks_into_lists_and_tuples() -> None:
    real, fake = torch.ones(2), Fakes(FakeTensorMode()).new((2,), (1,), torch.float32)
    assert are_fakes((fake, 1, None, [fake, (fake,)]))
    assert not are_fakes((fake, [fake, (real,)]))
