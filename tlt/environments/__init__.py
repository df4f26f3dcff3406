"""Answers of several turns: a user's environment answers the policy between them."""
