"""`python -m anybatch`, and the command `anybatch`."""

from __future__ import annotations

from anybatch.process import early_stop_signal


def main() -> None:
    """Run the command line, as `anybatch.cli.main` does. Its imports end quietly by Ctrl-C, too."""
    with early_stop_signal.ending_at_once():
        from anybatch.cli import main
    main()


if __name__ == "__main__":
    main()
