"""Loading images: downloads, decoding, augmentation, and loaders that bring them to the device."""
