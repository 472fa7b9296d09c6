"""Tensors of any dtype and layout are compared, or an error names their kind."""

import warnings

import pytest
import torch
from torch import nn

from prove.comparable import NotComparableError, comparable, widened
from prove.rank_record import Mode, Settings
from prove.watch.batches import are_same, checksum
from prove.watch.model_tensors import project
from prove.watch.outputs import OutputWatcher
from prove.watch.rank_run import RankRun

warnings.filterwarnings("ignore", message="(ComplexHalf|Sparse|torch.quantize)")
ROWS = torch.tensor([[0.0, 2.0, 0.0], [-1.0, 0.0, 3.0]])
IMAGINARY = torch.complex(ROWS, ROWS.flip(0))
NESTED = [ROWS, ROWS[:1]]
KINDS = {  # a tensor, another one that differs in one number, and how many real numbers it has
    "float32": (ROWS, ROWS.index_add(0, torch.tensor([1]), ROWS[:1]), 6),
    "bfloat16": (ROWS.bfloat16(), (2 * ROWS).bfloat16(), 6),
    "float8": (ROWS.to(torch.float8_e4m3fn), (2 * ROWS).to(torch.float8_e4m3fn), 6),
    "integers": (ROWS.int(), ROWS.int() + 1, 6),
    "bool": (ROWS > 0, ROWS < 0, 6),
    "complex64": (IMAGINARY, torch.complex(ROWS, ROWS), 12),
    "conjugate": (IMAGINARY.conj(), IMAGINARY, 12),
    "complex32": (IMAGINARY.to(torch.complex32), torch.complex(ROWS, ROWS).to(torch.complex32), 12),
    "sparse COO": (ROWS.to_sparse(), (2 * ROWS).to_sparse(), 6),
    "sparse COO, other places": (ROWS.to_sparse(), ROWS.roll(1, 1).to_sparse(), 6),
    "sparse CSR": (ROWS.to_sparse_csr(), (2 * ROWS).to_sparse_csr(), 6),
    "sparse and complex": (IMAGINARY.to_sparse(), torch.complex(ROWS, ROWS).to_sparse(), 12),
    "quantized": (
        torch.quantize_per_tensor(ROWS, 0.1, 0, torch.qint8),
        torch.quantize_per_tensor(2 * ROWS, 0.1, 0, torch.qint8),
        6,
    ),
    "jagged": (
        torch.nested.nested_tensor(NESTED, layout=torch.jagged),
        torch.nested.nested_tensor([2 * ROWS, ROWS[:1]], layout=torch.jagged),
        9,
    ),
    "one number": (torch.tensor(2.0), torch.tensor(3.0), 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_equals_its_copy_and_not_another_one(kind):
    tensor, other, numbers = KINDS[kind]
    flat = comparable(tensor)
    assert (flat.dtype, flat.shape) == (torch.float64, (numbers,))
    assert torch.equal(flat, comparable(tensor.clone()))
    assert project(tensor) == project(tensor.clone())
    assert checksum(tensor) == checksum(tensor.clone())
    assert are_same([tensor], [tensor.clone()])
    assert project(tensor)[0] != project(other)[0]
    assert checksum(tensor) != checksum(other)
    assert not are_same([tensor], [other])


@pytest.mark.parametrize("empty", [torch.zeros(0), torch.zeros(3, 0), torch.zeros(0).cfloat()])
def test_an_empty_tensor_has_no_numbers(empty):
    assert comparable(empty).shape == (0,)
    assert project(empty) == (0.0, 0.0)


@pytest.mark.parametrize("tensor", [ROWS.to("meta"), nn.UninitializedParameter()])
def test_what_has_no_values_is_named_by_its_kind(tensor):
    with pytest.raises(NotComparableError, match=r"meta|Uninitialized"):
        comparable(tensor)


def test_only_usual_numbers_become_wider():
    wide = {torch.float32: torch.float64, torch.bfloat16: torch.float64}
    wide |= {torch.complex64: torch.complex128, torch.int64: torch.int64}
    wide |= {torch.float8_e4m3fn: torch.float8_e4m3fn}
    for dtype, expected in wide.items():
        assert widened(ROWS.to(dtype)).dtype == expected


@pytest.mark.parametrize(
    ("output", "rows"),
    [(ROWS, 2), (IMAGINARY, 2), (ROWS[:, :0], 0), (ROWS[:0], 0), (KINDS["jagged"][0], 0)],
    ids=["rows", "complex rows", "rows without numbers", "no rows", "jagged"],
)
def test_of_what_a_layer_gives_only_rows_with_numbers_are_written_down(output, rows):
    run, layer = RankRun(Settings("", Mode.REPLAY, True, True, 3, 1, 2)), nn.Identity()
    outputs = OutputWatcher(run)
    outputs.enter(layer)
    outputs.leave(layer, output)
    assert [len(each.rows) for each in run.record.outputs] == [rows] * bool(rows)
