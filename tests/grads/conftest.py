"""Where the tests of the engines run: on a CUDA device where there is one; and a quick garbage collector."""

import gc
from collections.abc import Iterator

import pytest
import torch
from reference import DEVICE

from dpgrad.grads.precision import exact_products


@pytest.fixture
def on_device() -> Iterator[None]:
    """Tensors and models are made on the device, whose products do not round to TF32 unless a test says so."""
    with exact_products(), torch.device(DEVICE):
        yield


@pytest.fixture(scope="module")
def nothing_older() -> None:
    """The garbage collector looks only at what is made from here on, which is little."""
    gc.collect()
    gc.freeze()
