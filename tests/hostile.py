"""How a command is run on hostile input: a good line of each, and what every answer must look like."""

import contextlib
import io
import json
import re

import pytest

from dpgrad import cli

Words = list[str]

# For each command a line that is answered; its options and others are then spoilt.
GOOD = {
    "epsilon": "--sampling-rate 0.01 --noise-multiplier 4 --steps 30 --delta 1e-5 --accountant rdp --json",
    "calibrate": "--sampling-rate 0.01 --epsilon 2 --steps 30 --delta 1e-5 --accountant rdp --json",
    "steps": "--sampling-rate 0.01 --epsilon 2 --noise-multiplier 2 --delta 1e-5 --accountant rdp --json",
    "data": "describe {rows} --target y.npy --json",
    "train": "--plan --method dpsgd --steps 5 --model linear --accountant rdp --json",
    "tune": "--plan --configuration dpsgd,steps=2 --model linear --json",
    "predict": "{small} --input {rows} --json",
    "report": "{small} --out {out}.html --json",
    "curvature": "digits --rows 20 --loss softmax --json",
    "reproduce": "huang-figure9 --list --json",
    "completion": "bash --json",
}


def check(words: Words) -> tuple[int, str]:
    """Run a command; 0 with one JSON object, or 2 with one line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(words)
    quiet = re.compile(r".* \.\.\.$|.*: step |.*: \d+ of \d+ |dpgrad: outside the guarantee: ")
    said = [line for line in err.getvalue().splitlines() if not quiet.match(line)]
    assert code in (0, 2), (words, err.getvalue())
    if code == 2:
        assert out.getvalue() == "", words
        assert len(said) == 1, (words, err.getvalue())
        assert said[0].startswith("dpgrad: error: ")
        assert len(said[0]) <= 1000, words
    else:
        assert said == [], (words, err.getvalue())
        if "--json" in words:
            assert out.getvalue().count("\n") == 1, words
            json.loads(out.getvalue(), parse_constant=lambda text: pytest.fail(f"{text}: {words}"))
    return code, err.getvalue()
