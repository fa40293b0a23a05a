"""Verification of saved tensors: fingerprints depend on every bit and take no memory."""

from __future__ import annotations

import sys

import pytest
import torch

from ckpt_ft.checkpointing.fingerprint import fingerprint
from ckpt_ft.checkpointing.verify import Schedule, Verification, VerificationError
from ckpt_ft.errors import UserError

DTYPES = (
    torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16,
)  # fmt: skip
VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "rows": lambda x: x[1:],
    "odd columns": lambda x: x[:, 1::2],
    "part of the columns": lambda x: x[:, 8:16],
    "expanded": lambda x: x[:, None].expand(-1, 4, -1),
}


def hash_of(x: torch.Tensor) -> int:
    hashed = fingerprint(x)[1]
    assert hashed is not None
    return int(hashed)


def with_one_bit_flipped(x: torch.Tensor, at: tuple[int, ...]) -> torch.Tensor:
    other = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
    other.copy_(x)
    if x.dtype is torch.bool:
        other[at] = ~other[at]
    else:
        storage = torch.empty(0, dtype=torch.uint8).set_(other.untyped_storage())
        place = sum(index * stride for index, stride in zip(at, x.stride(), strict=True)) * x.element_size()
        storage[place] ^= 1
    return other


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", [(3, 24), (301, 64)])
def test_every_bit_changes_the_hash(dtype: torch.dtype, view: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = VIEWS[view]((50 * torch.randn(shape)).to(dtype))
    assert hash_of(x) == hash_of(x)
    if 0 in x.stride():
        return
    for at in ((0, 0), (x.shape[0] // 2, x.shape[1] // 2), (x.shape[0] - 1, x.shape[1] - 1)):
        assert hash_of(with_one_bit_flipped(x, at)) != hash_of(x), at


def test_hash_depends_on_the_bits_and_not_on_the_address() -> None:
    storage = torch.arange(100_003, dtype=torch.float32).bfloat16()
    for offset in (1, 2, 3, 5):
        x = storage[offset : offset + 90_001]
        assert hash_of(x) == hash_of(x.clone())
        assert hash_of(x) != hash_of(storage[offset + 1 : offset + 90_002])


def test_hash_depends_on_order_constants_and_scales() -> None:
    x = torch.randn(64, 1024)
    assert hash_of(x) != hash_of(x.flip(0))
    assert hash_of(x) != hash_of(x.flip(1))
    assert hash_of(torch.ones(64, 1024)) != hash_of(torch.full((64, 1024), 2.0))  # an XOR of each would be 0
    assert hash_of(torch.ones(64, 1024, dtype=torch.float64)) != hash_of(torch.full((64, 1024), 2.0).double())
    mask = torch.rand(64, 1024) > 0.1
    assert hash_of(mask) != hash_of(mask.roll(1, 1))
    strided = torch.ones(64, 1000)[:, :900]
    assert hash_of(strided) != hash_of(2 * torch.ones(64, 1000)[:, :900])


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:torch.quantize_per_tensor:UserWarning")
def test_hash_of_special_layouts() -> None:
    assert fingerprint(torch.empty(0, 3))[0] != fingerprint(torch.empty(3, 0))[0]
    assert hash_of(torch.tensor(1.0)) != hash_of(torch.tensor(2.0))
    assert fingerprint(torch.empty(3, device="meta"))[1] is None
    dense = torch.eye(4)
    for change in (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr):
        assert hash_of(change(dense)) != hash_of(change(2 * dense))
    quantised = [torch.quantize_per_tensor(torch.full((9,), value), 0.1, 0, torch.qint8) for value in (1.0, 2.0)]
    assert hash_of(quantised[0]) != hash_of(quantised[1])
    jagged = [
        torch.nested.nested_tensor([torch.full((n, 2), v) for n in (2, 3)], layout=torch.jagged) for v in (1.0, 2.0)
    ]
    assert hash_of(jagged[0]) != hash_of(jagged[1])
    z = torch.randn(5, dtype=torch.complex64)
    assert fingerprint(z)[0] == fingerprint(z.conj())[0]


def test_steps_of_a_schedule() -> None:
    def steps(value: str | int) -> list[int]:
        return [step for step in range(1, 2001) if Schedule.parse(value).due(step)]

    assert steps("first") == [1, 2, 1000, 2000]
    assert steps("always") == list(range(1, 2001))
    assert steps("never") == []
    assert steps("900") == steps(900) == [1, 900, 1800]
    assert not any(Schedule.parse(value).due(0) for value in ("first", "always", "never", 100))
    for wrong in ("sometimes", 0, -1, True, 1.5):
        with pytest.raises(UserError, match="'first', 'always', 'never' or a number of steps"):
            Schedule.parse(wrong)  # type: ignore[arg-type]


def saved_and_restored(x: torch.Tensor, put_back: torch.Tensor) -> None:
    verification = Verification(Schedule.parse("always"), "full")
    verification.begin_step()
    comparison = verification.region("layers.3", torch.nn.Linear(1, 1))
    verification.end_forward()
    assert comparison is not None
    comparison.saved(torch.zeros(2), what="its input")
    slot = comparison.saved(x)
    comparison.restored(0, torch.zeros(2))
    comparison.restored(slot, put_back)


def test_error_names_region_and_operator() -> None:
    x = torch.randn(3, 4, requires_grad=True) * 2
    saved_and_restored(x, x.detach().clone())
    with pytest.raises(VerificationError) as error:
        saved_and_restored(x, x + 1)
    assert (error.value.region, error.value.operator, error.value.differs) == ("layers.3", "MulBackward0", "values")
    text = str(error.value)
    assert "layers.3 (Linear), saved tensor 2 of 2, made by MulBackward0: (3, 4) torch.float32" in text
    with pytest.raises(VerificationError, match=r"shape: \(3, 4\) in forward, \(4, 3\) in backward"):
        saved_and_restored(x, x.detach().reshape(4, 3))
    with pytest.raises(VerificationError, match=r"dtype: torch.float32 in forward, torch.float64 in backward"):
        saved_and_restored(x, x.detach().double())
    with pytest.raises(VerificationError, match=r"strides: \(4, 1\) in forward, \(1, 3\) in backward"):
        saved_and_restored(x, x.detach().t().contiguous().t())


def test_unscheduled_step_compares_nothing() -> None:
    verification = Verification(Schedule.parse("first"), "full")
    module = torch.nn.Linear(1, 1)
    verified = []
    for step in range(1, 5):
        verification.begin_step()
        verified.append(verification.region("", module, calls=step) is not None)
        verification.end_forward()
    assert verified == [True, True, False, False]
    verification.begin_step()
    assert verification.region("", module, calls=9, changed=True) is not None
    verification.end_forward()
    assert verification.region("", module, calls=2) is not None  # a block that is called outside its model
    assert verification.region("", module, calls=3) is None
    verification.begin_step()
    with torch._subclasses.FakeTensorMode():
        assert verification.region("", module, changed=True) is None


@pytest.mark.parametrize("verify", ["first", "always", "never"])
def test_region_without_a_call_count_is_not_verified_outside_the_model(verify: str) -> None:
    assert Verification(Schedule.parse(verify), "full").region("", torch.nn.Linear(1, 1)) is None


def test_verify_flag_is_checked_when_parsed() -> None:
    from ckpt_ft.training.arguments import ACArguments
    from ckpt_ft.training.callback import ACCallback

    assert ACArguments().ac_verify == "first"
    assert ACArguments(ac_policy="full", ac_verify=100).ac_verify == "100"  # type: ignore[arg-type]  # a YAML's
    with pytest.raises(UserError, match="verify='often': give 'first', 'always', 'never'"):
        ACArguments(ac_policy="full", ac_verify="often")
    assert ACCallback("full", verify=50).session.settings.ac_verify == "50"
    assert ACCallback("full").session.settings.ac_verify == "first"


def test_ranks_do_not_synchronise_on_a_submodule_of_a_deepspeed_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ZeRO-1 and ZeRO-2 another rank may skip a submodule."""
    from ckpt_ft.checkpointing.verify import _groups

    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", sys.modules[__name__])
    part = torch.nn.Linear(1, 1)
    whole = torch.nn.Sequential(part)
    engine = DeepSpeedEngine(whole)
    assert _groups(part) == []
    assert _groups(whole) == [engine.seq_data_parallel_group]


class DeepSpeedEngine:
    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.seq_data_parallel_group = module, object()
