"""Plain measuring programs, beside peers and beside the training step of the system before this one."""
