"""The methods, one file each, registered by ``@register_mixer``; ``base`` holds what they share."""
