"""Recipes: the only room that names concrete things together."""
