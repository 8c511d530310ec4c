"""Recipes: configuration only, one module per table of the paper."""
