"""Rollouts: play forks of frozen positions, draw the policy's decisions, and make the rows that training reads."""
