"""Recovery of training runs after a killed process, and upkeep of Prefect's database."""
