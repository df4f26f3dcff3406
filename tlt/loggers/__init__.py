"""A job's figures and spans on other people's walls of screens: read from its journal, by a process
of its own, so that nothing of it slows a job or ends one."""
