"""Bytes that leave the device: where they go (`depot`), and what of training goes there."""
