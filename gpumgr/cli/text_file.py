"""Text files that a user names."""

from pathlib import Path

from gpumgr.common.errors import InputError


def read_text(file: Path) -> str:
    """Raises InputError, which names file and line."""
    try:
        content = file.read_bytes()
        return content.decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{file}: it can't be read: {error.strerror}; give a file that exists and can be read") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{file}, line {line}: it is not UTF-8 text: {error.reason}; save it as UTF-8") from error
