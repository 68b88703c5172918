"""`entente smoke`: tests each part of a run on a new card and recommends settings. Read `job.py` first."""
