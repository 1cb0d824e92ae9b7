"""RCV1 on files of the same form: which stories are taken, and which are in the topic."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from scipy import sparse

from dpgrad import data
from dpgrad.data import rcv1

STORIES, TAKEN = 30, 10


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story number 100 + i has the value i + 1 in column i; the even ones are in the topic; 35 in four files."""
    lines = [f"{100 + i}  {i + 1}:{i + 1}" for i in range(35)]
    topics = [line for i in range(35) for line in (f"ECAT {100 + i} 1", f"CCAT {100 + i} 1")[: 2 - i % 2]]
    texts = [lines[:3], lines[3:14], lines[14:25], lines[25:], topics]
    (tmp_path / "rcv1").mkdir()
    for source, text in zip(rcv1.SOURCES, texts, strict=True):
        (tmp_path / source.place).write_bytes(gzip.compress("\n".join(text).encode()))
    monkeypatch.setattr(rcv1, "SOURCES", tuple(replace(source, sha256=None) for source in rcv1.SOURCES))
    monkeypatch.setattr(rcv1, "STORIES", STORIES)
    monkeypatch.setattr(rcv1, "TAKEN", TAKEN)


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("recipe", rcv1.PREPROCESSINGS)
def test_the_first_of_the_shuffled_stories_are_taken(tmp_path: Path, recipe: str) -> None:
    found = data.load("rcv1", tmp_path, recipe)
    assert (found.x_train.shape, found.x_test.shape) == ((8, rcv1.WORDS), (2, rcv1.WORDS))
    index = np.arange(STORIES)
    np.random.RandomState(10000019).shuffle(index)
    rows = sparse.vstack([found.x_train, found.x_test]).tocsr()
    assert_array_equal(rows.indices, index[:TAKEN])
    assert_array_equal(rows.data, index[:TAKEN] + 1)
    assert_array_equal(np.concatenate([found.y_train, found.y_test]), index[:TAKEN] % 2 == 0)
    assert found.outside_guarantee == ()


@pytest.mark.parametrize(
    ("text", "pattern"),
    [(b"CCAT 7\n", "line 1 is not"), (b"CCAT 7 1\nCCAT s3cret 1\n", "line 2 is not"), (b"x\n", "line 1 is not")],
)
def test_bad_topics_are_refused(text: bytes, pattern: str, refused) -> None:
    with refused(pattern):
        rcv1.members(text, "f")


def test_bad_stories_are_refused(refused) -> None:
    with refused("story 2 does not begin with its number"):
        rcv1.parse([b"1 1:1\ns3cret 1:1\n"], set(), np.array([1]), "f")
    with refused("2 stories, more than 2 expected"):
        rcv1.parse([b"1 1:1\n", b"2 1:1\n"], set(), np.array([0, 2]), "f")
    with refused("line 1, entry 1: its index must increase"):
        rcv1.parse([b"1 99999:1\n"], set(), np.array([0]), "f")
