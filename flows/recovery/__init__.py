"""Recovery of training runs after a killed process."""
