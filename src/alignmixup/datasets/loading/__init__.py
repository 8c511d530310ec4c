"""How images come to the device: decoding, augmentation, loaders, downloads."""
