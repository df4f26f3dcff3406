"""Write a run's policy or drafter as a folder that other programs load."""
