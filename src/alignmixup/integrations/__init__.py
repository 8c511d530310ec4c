"""Mixers in the training loops of other libraries: one module a library, imported by its users."""
