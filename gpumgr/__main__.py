"""The `gpumgr` command: `python -m gpumgr`, and the script of that name. Only the standard library is imported at the top."""

import signal
import sys


def main() -> None:
    if sys.argv[1:2] == ["run"]:
        # SIGHUP asks the agent to read its settings again; by default it ends the process. The settings are not read yet, so the signal
        # can be ignored here; a settings file that changes during the start is noticed without a signal (gpumgr/settings/live.py).
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from gpumgr.cli import main as command  # here, since the import takes more than a tenth of a second

    command()


if __name__ == "__main__":
    main()
