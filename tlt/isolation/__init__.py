"""Run code that isn't TLT's in processes with limits: rewards, environments, a model's programs."""
