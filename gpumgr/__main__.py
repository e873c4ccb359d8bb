"""`python -m gpumgr` is the `gpumgr` command."""

from gpumgr.cli import main

main()
