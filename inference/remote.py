"""The pool of workers under its former name."""

from inference.pool import RemoteEngine

__all__ = ["RemoteEngine"]
