"""One file per evaluation; each registers itself with ``register_task``."""
