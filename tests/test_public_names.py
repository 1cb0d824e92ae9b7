"""The public names are those that were reviewed: tests/public_names.txt."""

import difflib
import subprocess
import sys

import public_names


def test_public_names_are_those_of_the_list() -> None:
    """In a process of its own: other tests have put their own functions in place of some."""
    done = subprocess.run([sys.executable, public_names.__file__], capture_output=True, encoding="utf-8", timeout=600)
    known, found = public_names.LIST.read_text("utf-8").splitlines(), done.stdout.splitlines()
    changes = [line for line in difflib.unified_diff(known, found, lineterm="", n=0) if line[:1] in "+-"][2:]
    assert not changes, "public names changed; review them, then run `make api-names`:\n" + "\n".join(changes)


def test_a_change_of_arguments_is_seen() -> None:
    before, after = public_names.arguments(lambda a, *, b: a), public_names.arguments(lambda a, *, c: a)
    assert (before, after) == ("(a, *, b)", "(a, *, c)")


def test_every_name_of_the_facade_is_listed() -> None:
    listed = public_names.LIST.read_text("utf-8").splitlines()
    assert {"dpgrad.fit", "dpgrad.PrivateGradient", "dpgrad.Mechanism"} <= set(listed)
