"""The holders of the peak: repeated layers are one row, and the rows add up."""

from __future__ import annotations

from ckpt_ft.export.holders import Holder, group_holders, holder_line, holders_table
from ckpt_ft.memory.record.events import Storage
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.tables import markdown_table
from ckpt_ft.units import MIB


def trace() -> StepTrace:
    mlps = [Storage(3 * MIB, "activations", "aten.mm.default", f"layers.{i}.mlp", "forward") for i in range(4)]
    rest = [Storage(8 * MIB, "parameters", "", "", ""), Storage(MIB, "temporary", "aten.add.Tensor", "", "forward")]
    return StepTrace("cpu", [*mlps, *rest], [4, 0, 1, 2, 3, 5], marks=[(1, "step"), (1, "forward")])


def test_repeated_layers_are_one_row() -> None:
    assert trace().holders(2) == [
        Holder("", "", "parameters", 8 * MIB, 1),
        Holder("layers.0.mlp", "aten.mm.default", "activations", 3 * MIB, 1),
    ]
    grouped = [
        Holder("layers.*.mlp", "aten.mm.default", "activations", 12 * MIB, 4),
        Holder("", "", "parameters", 8 * MIB, 1),
    ]
    assert trace().grouped_holders(2) == grouped
    assert sum(holder.nbytes for holder in trace().grouped_holders()) == trace().peak_allocated
    assert group_holders(grouped) == grouped


def test_rows_of_the_table_add_up_to_the_peak() -> None:
    assert markdown_table(holders_table(trace().grouped_holders(2), trace().peak_allocated)) == "\n".join(
        [
            "| module | op | category | count | bytes |",
            "| --- | --- | --- | ---: | ---: |",
            "| layers.*.mlp | mm | activations | 4 | 12.0 MiB |",
            "| weights | - | parameters | 1 | 8.0 MiB |",
            "| all else | - | - | - | 1.0 MiB |",
        ]
    )
    whole = holders_table(trace().grouped_holders(), trace().peak_allocated)
    assert [row[0] for row in whole.rows] == ["layers.*.mlp", "weights", "outside of modules"]


def test_holder_as_one_line() -> None:
    assert holder_line(trace().grouped_holders(1)[0]) == "  12.0 MiB  activations layers.*.mlp mm"
