"""The data of a run: how one example is read does not depend on the others."""

import traceback
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

from dpgrad.errors import DataError
from dpgrad.training import source

CPU = torch.device("cpu")


class Listed(Dataset[Any]):
    def __init__(self, examples: list[Any]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        return self.examples[index]


@pytest.mark.parametrize(
    ("plain", "other"),
    [
        (1, 0.5),
        (0.1, 1),
        (torch.tensor([0.1]), torch.tensor([0.1], dtype=torch.float64)),
        (torch.tensor([1]), torch.tensor([0.5])),
        (np.array([0.1]), np.array([0.1], np.float32)),
        (np.float32(0.1), 0.1),
        ((torch.zeros(2), 1), (torch.zeros(2), 1.5)),
        ({"x": 1, "y": 2}, {"x": 1.5, "y": 2}),
        (True, 0.5),
    ],
)
def test_an_example_of_another_type_is_refused(plain: Any, other: Any) -> None:
    """Collated with it, all examples would take on a type that suits it, and be rounded differently."""
    for examples in ([plain, plain, other], [other, plain, plain]):
        with pytest.raises(ValueError, match=r"^the examples of data must hold values of one type, got \w+ and \w+: "):
            source.gathered(Listed(examples), torch.arange(3), CPU)
    assert torch.is_tensor(
        torch.utils._pytree.tree_leaves(source.gathered(Listed([plain] * 3), torch.arange(3), CPU))[0]
    )


def test_types_that_are_read_alike_may_be_mixed() -> None:
    found = source.gathered(Listed([1.5, np.float64(2.5)]), torch.arange(2), CPU)
    assert found.tolist() == [1.5, 2.5]


def test_a_collate_of_ones_own_decides() -> None:
    found = source.gathered(
        Listed([1, 0.5]), torch.arange(2), CPU, lambda examples: torch.tensor(examples, dtype=torch.float64)
    )
    assert found.dtype == torch.float64


def test_no_examples_at_all() -> None:
    with pytest.raises((ValueError, IndexError)):
        source.gathered(Listed([1]), torch.arange(0), CPU, default_collate)


@pytest.mark.parametrize("dtype", [object, "U3", "datetime64[D]", np.longdouble, [("a", float)]])
def test_arrays_that_torch_cannot_hold_are_refused_in_words(dtype: Any) -> None:
    values = np.zeros(3, dtype)
    with pytest.raises(ValueError, match=r"^data\[1\] must hold numbers of a type that torch has, got .*: convert"):
        source.rows((np.zeros((3, 2)), values))


@pytest.mark.parametrize("dtype", [">f8", "<f4", "u1", "u8", "?", "f2", "c8"])
def test_arrays_that_torch_can_hold_in_either_order(dtype: str) -> None:
    assert source.rows(np.zeros(3, dtype)) == 3


@pytest.mark.parametrize("kind", [ValueError, KeyError, RuntimeError, TypeError, OSError])
def test_what_a_collate_says_of_a_row_is_not_passed_on(kind: type[Exception]) -> None:
    def collate(examples: list[Any]) -> Any:
        raise kind(f"cannot read {examples[0]}")

    with pytest.raises(DataError, match=rf"test_source\.py, line \d+, raised {kind.__name__};") as caught:
        source.together(["a secret"], collate)
    shown = "".join(traceback.format_exception(caught.value))
    assert "a secret" not in shown.replace('source.together(["a secret"], collate)', "")


def test_what_default_collate_says_of_a_row_is_not_passed_on() -> None:
    with pytest.raises(DataError, match="cannot be put into one batch") as caught:
        source.together([{"a": 1}, {"secret": 1}])
    assert "KeyError" not in "".join(traceback.format_exception(caught.value))
