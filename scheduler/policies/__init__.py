"""Policies: the decorator that makes one, its checks, and those that come with paellapy, one module each."""
