"""``python -m dpgrad``: the command line, from a source tree as from an installation."""

from dpgrad.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
