"""A fake tensor that is made quickly is the one that torch's constructor makes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ckpt_ft.memory.fake.faked_model import CPU, Fakes, are_fakes


def described(tensor: Tensor) -> tuple[object, ...]:
    assert type(tensor) is FakeTensor
    layout = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device
    return *layout, tensor.requires_grad, tensor.is_leaf, torch._C._dispatch_keys(tensor).raw_repr(), vars(tensor)


def test_fakes_are_as_torch_makes_them() -> None:
    mode = FakeTensorMode()
    fakes = Fakes(mode)
    meta = torch.empty_strided((2, 3), (1, 2), dtype=torch.float16, device="meta")
    reals = [nn.Parameter(meta, trains) for trains in (True, False)]
    made = fakes.new((2, 3), (1, 2), torch.float16)
    assert described(made) == described(FakeTensor(mode, meta, CPU))
    assert described(fakes.like(meta)) == described(made)
    with mode:
        row, slow = fakes.view(made, (2,), (1,), 2, torch.float16), made.as_strided((2,), (1,), 2)
        assert described(row) == described(slow)
        assert row.untyped_storage()._cdata == made.untyped_storage()._cdata
        for real in reals:
            trains = real.requires_grad
            parameter, slow = fakes.parameter(real), nn.Parameter(fakes.like(real), trains)
            assert isinstance(parameter, nn.Parameter)
            assert described(parameter) == described(slow)


def test_what_is_a_fake() -> None:
    real, fake = torch.ones(2), Fakes(FakeTensorMode()).new((2,), (1,), torch.float32)
    assert are_fakes((fake, 1, None, [fake, (fake,)]))
    assert not are_fakes((fake, [fake, (real,)]))
