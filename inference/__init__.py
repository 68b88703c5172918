"""Engines that draw completions from the masked policy, the worker that serves one, and the clients that reach it."""
