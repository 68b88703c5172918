"""What a command is about to do, told in figures before anything is started."""
