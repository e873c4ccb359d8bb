"""The `gpumgr` command: `python -m gpumgr`, and the script of that name. Nothing but the standard library is imported beforehand."""

import signal
import sys


def main() -> None:
    if sys.argv[1:2] == ["run"]:
        # SIGHUP asks for settings to be read again, and ends a process that has not said otherwise. These are not read yet, so there is
        # nothing to remember; from their first reading to where the agent listens, a changed file is noticed by itself (app.reload).
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from gpumgr.cli import main as command  # only here: this and what follows take a tenth of a second and more

    command()


if __name__ == "__main__":
    main()
