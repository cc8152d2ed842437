"""Runs an emulated cluster under faults on purpose, and compares what comes out with an undisturbed run."""
