"""The command ``dpgrad``, and ``python -m dpgrad`` from a source tree."""

from dpgrad import _interrupt

__all__ = ["main"]


def main() -> int:
    """Load the command and run it; its exit status."""
    _interrupt.at_once()
    from dpgrad.cli import main as command

    return command()


if __name__ == "__main__":
    raise SystemExit(main())
