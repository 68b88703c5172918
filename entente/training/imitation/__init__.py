"""A base model that imitates a teacher's games."""
