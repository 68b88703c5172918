"""Plans of commands for `--dry-run`: amounts of work, memory, disk and time, computed before anything is started."""
