"""Texts of messages."""


def short(text: str, most: int = 40) -> str:
    """Printable, and cut."""
    printed = "".join(each if each.isprintable() else "?" for each in text)
    return printed if len(printed) <= most else printed[: most - 3] + "..."


def count_text(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
