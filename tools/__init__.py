"""Programs for development: generators of shipped files, checks of the source tree. Nothing of this is installed."""

from pathlib import Path
from typing import Final

#: The source tree.
PROJECT: Final = Path(__file__).resolve().parents[1]
