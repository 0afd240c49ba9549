"""Policies: the decorator that makes one, its checks, and the policies of paellapy, one module each."""
