"""`entente smoke`: the first thing to run on a new card. It tries each part of a run and recommends settings."""
