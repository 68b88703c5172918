"""Play forks of frozen positions, draw the policy's decisions, make the rows that training reads. Read `roll_out.py` first."""
