"""Damage as a disk makes it."""

from pathlib import Path


def flip(file: Path) -> Path:
    """Flip one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file
