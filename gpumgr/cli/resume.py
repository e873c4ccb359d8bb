"""`gpumgr resume`: the command that ends what `gpumgr suspend` began."""

from gpumgr.cli.suspend import resume as command

__all__ = ["command"]
