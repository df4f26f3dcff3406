"""Train a drafter for a policy folder without a session: `tlt drafter train`."""
