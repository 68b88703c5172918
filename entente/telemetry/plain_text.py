"""Text from files, rows and models as text that is safe to show."""


def shown(text: str, *, keep: str = "") -> str:
    """The text with every character that does not print as its escape, such as \\\\x1b; those in `keep` stay.

    So text from files, rows and models cannot move a terminal's cursor, change colours, or reverse the direction of a line.
    """
    return "".join(letter if letter.isprintable() or letter in keep else _escape(letter) for letter in text)


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode()
