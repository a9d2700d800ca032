"""Entry point of `python -m anybatch` and of the `anybatch` command."""

from __future__ import annotations

import sys

from anybatch.errors import NoPlanFits
from anybatch.process import early_stop_signal
from anybatch.process.import_memory import explained


def main() -> None:
    """Run the command line interface (`anybatch.cli.main`). Ctrl-C during its imports also exits
    quietly."""
    try:
        with early_stop_signal.ending_at_once(), explained():
            from anybatch.cli import main
    except NoPlanFits as error:
        sys.stderr.write(f"anybatch: {error}\n")
        sys.exit(error.exit_status)
    main()


if __name__ == "__main__":
    main()
