"""Reinforcement learning of reasoning models, without the wait for the long tail."""
