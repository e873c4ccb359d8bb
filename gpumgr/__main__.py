"""The `gpumgr` command: `python -m gpumgr`, and the script of that name. At the top it imports the standard library only."""

import signal
import sys


def main() -> None:
    if sys.argv[1:2] == ["run"]:
        # SIGHUP means that the settings are to be read again; by default it ends the process. They are not read yet, so the signal can be
        # ignored here; a file that changes during the start is noticed without a signal (gpumgr/settings/live.py).
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from gpumgr.cli import main as command  # here, since the import takes more than a tenth of a second

    command()


if __name__ == "__main__":
    main()
