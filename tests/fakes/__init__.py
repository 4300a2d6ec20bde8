"""Backends for tests."""
