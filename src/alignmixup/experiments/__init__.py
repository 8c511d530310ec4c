"""Runs: training a recipe, scoring it, sweeps, benchmarks."""
